"""Periodic callbacks with the elapsed time, during a long operation that prints nothing itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ticker(show: Callable[[float], None], patience: float, every: float) -> Iterator[None]:
    """Call `show` periodically from a thread with the elapsed seconds while the body runs.

    Args:
      show: its exceptions are lost.
      patience: seconds before the first call.
      every: seconds between calls.
    """
    start, done = time.perf_counter(), threading.Event()

    def tick() -> None:
        wait = patience
        while not done.wait(wait):
            show(time.perf_counter() - start)
            wait = every

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def format_seconds(number: float) -> str:
    """Return a human-readable duration: "0.4 s", "12 s", "2:05 minutes"."""
    if number < 10:
        return f"{number:.1f} s"
    if number < 120:
        return f"{number:.0f} s"
    minutes, rest = divmod(round(number), 60)
    return f"{minutes}:{rest:02d} minutes"
