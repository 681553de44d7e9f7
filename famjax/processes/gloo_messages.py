"""Filters the log lines of gloo, which runs CPU collectives, from standard output."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import BinaryIO

# the pieces of a line that gloo prints one by one; those of several threads may be mixed
_GLOO_LINE = re.compile(
    rb"(\[Gloo\] Rank |\d+| is connected to | peer ranks\. "
    rb"|Expected number of connected peer ranks is : )*\n?"
)


def uses_gloo() -> bool:
    """Return whether collectives would run on CPUs, without initializing JAX's backends.

    JAX_PLATFORMS decides if it is set. Otherwise JAX uses an accelerator if it finds one, so the
    result is False if any accelerator plugin is installed.
    """
    import jax

    if chosen := getattr(jax.config, "jax_platforms", None):  # untyped in JAX
        return chosen.split(",")[0] == "cpu"
    return not (
        "TPU_LIBRARY_PATH" in os.environ
        or any(importlib.util.find_spec(name) for name in ("libtpu", "jax_plugins"))
        or entry_points(group="jax_plugins")
    )


def filter_on_cpu() -> contextlib.AbstractContextManager[None]:
    """Return `filter_gloo_lines()` if collectives would run on CPUs, else a null context."""
    return filter_gloo_lines() if uses_gloo() else contextlib.nullcontext()


@contextlib.contextmanager
def filter_gloo_lines() -> Iterator[None]:
    """Drop the lines "[Gloo] Rank 0 is connected to 1 peer ranks ..." from standard output.

    C++ code prints them each time a group of devices first connects, and gloo has no setting to
    switch them off. A process with several devices prints from several threads, whose lines may be
    cut and mixed. A thread forwards all other lines. Use this only for CPUs (`uses_gloo`):
    accelerator libraries may write while they hold the GIL, and if the pipe is full at that time,
    the thread cannot drain it.
    """
    sys.stdout.flush()
    stdout = os.dup(1)
    read, write = os.pipe()
    os.dup2(write, 1)
    os.close(write)
    reader = threading.Thread(
        target=_forward_lines, args=(os.fdopen(read, "rb"), stdout), daemon=True
    )
    reader.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        # a child process may still hold the pipe
        reader.join(timeout=1)


def _forward_lines(stream: BinaryIO, stdout: int) -> None:
    in_gloo = False  # a number or an empty line is gloo's only after one of its lines
    for line in stream:
        words = b"Gloo" in line or b"peer ranks" in line
        in_gloo = (words or in_gloo) and bool(_GLOO_LINE.fullmatch(line))
        if not in_gloo:
            with contextlib.suppress(OSError):  # its reader may be gone; keep draining the pipe
                os.write(stdout, line)
