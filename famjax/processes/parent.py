"""Ends a process together with the one that started it."""

from __future__ import annotations

import os
import signal
import threading
import time

_POLL_SECONDS = 0.5


def end_with_parent(parent: int) -> None:
    """Make this process save and end when the one that started it has ended, however it ended.

    Args:
      parent: number of the process that started this one. It may have ended already.
    """

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
