"""Telling, while something takes long that says nothing by itself, how long it has taken."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def ticking(show: Callable[[float], None], patience: float, every: float) -> Iterator[None]:
    """Call `show` from a thread with the seconds since now, for as long as what is inside takes.

    Args:
      show: what it raises is lost.
      patience: seconds before the first call.
      every: seconds between calls.
    """
    begin, done = time.perf_counter(), threading.Event()

    def tick() -> None:
        wait = patience
        while not done.wait(wait):
            show(time.perf_counter() - begin)
            wait = every

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def seconds(number: float) -> str:
    """Return a time for people: "0.4 s", "12 s", "2:05 minutes"."""
    if number < 10:
        return f"{number:.1f} s"
    if number < 120:
        return f"{number:.0f} s"
    minutes, rest = divmod(round(number), 60)
    return f"{minutes}:{rest:02d} minutes"
