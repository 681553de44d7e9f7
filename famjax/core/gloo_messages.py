"""Standard output without the log lines of gloo, which connects the CPUs of several processes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import BinaryIO

_GLOO = b"[Gloo] "


def uses_gloo() -> bool:
    """Return whether several processes would compute on CPUs, without starting JAX's backends.

    JAX_PLATFORMS decides. Where it is not set, JAX takes an accelerator if it finds one, so this is
    False if the software of any is installed.
    """
    import jax

    if chosen := getattr(jax.config, "jax_platforms", None):  # a value without a type
        return chosen.split(",")[0] == "cpu"
    return not (
        "TPU_LIBRARY_PATH" in os.environ
        or any(importlib.util.find_spec(name) for name in ("libtpu", "jax_plugins"))
        or entry_points(group="jax_plugins")
    )


@contextlib.contextmanager
def without_gloo() -> Iterator[None]:
    """Drop the lines "[Gloo] Rank 0 is connected to 1 peer ranks ..." from standard output.

    They come from C++, each time a group of devices first meets, and gloo has no setting for them.
    All other lines are passed on, by a thread. Only for CPUs (`uses_gloo`): libraries of
    accelerators may write while they hold Python's lock, and if the pipe is full then, the thread
    cannot empty it.
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
