"""Standard output without what gloo, which joins the CPUs of several processes, says of itself."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import BinaryIO

_GLOO = b"[Gloo] "


@contextlib.contextmanager
def without_gloo() -> Iterator[None]:
    """Drop the lines "[Gloo] Rank 0 is connected to 1 peer ranks ..." from standard output.

    They come from C++, each time a group of devices first meets, and gloo has no setting for them.
    All other lines are passed on.
    """
    sys.stdout.flush()
    screen = os.dup(1)
    read, write = os.pipe()
    os.dup2(write, 1)
    os.close(write)
    reader = threading.Thread(target=_pass_on, args=(os.fdopen(read, "rb"), screen), daemon=True)
    reader.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(screen, 1)
        # a process that was started inside may have the pipe still
        reader.join(timeout=1)


def _pass_on(stream: BinaryIO, screen: int) -> None:
    for line in stream:
        if not line.startswith(_GLOO):
            with contextlib.suppress(OSError):  # who read it is gone; what is written must go on
                os.write(screen, line)
