"""A lock on a folder, for the moment in which a file in it is read, changed and written."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Wait until no other process holds a folder, and hold it.

    The kernel releases it when the process dies. On file systems without locks nothing is locked.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
