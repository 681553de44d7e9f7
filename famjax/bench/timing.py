"""Interleaved timing of programs, and measurement of peak memory."""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

K = TypeVar("K")


class PairedTimes(NamedTuple):
    """Seconds of two programs, measured interleaved.

    Attributes:
      first, second: minimum seconds of each program over the repetitions: its time without
        disturbance.
      ratio: first / second.
      typical: median over the repetitions of the ratio of both times.
      spread: half of the interquartile range of these ratios.
    """

    first: float
    second: float
    ratio: float
    typical: float
    spread: float


def time_pair(first: Callable[[], Any], second: Callable[[], Any], repetitions: int) -> PairedTimes:
    """Time two functions interleaved, after one call of each to compile."""
    for run in (first, second):
        jax.block_until_ready(run())
    times = [(time_call(first), time_call(second)) for _ in range(repetitions)]
    return compare_times(*zip(*times, strict=True))


def time_interleaved(runs: Mapping[K, Callable[[], Any]], repetitions: int) -> dict[K, list[float]]:
    """Time functions interleaved, after one call of each; return the seconds of each by name."""
    for run in runs.values():
        jax.block_until_ready(run())
    times: dict[K, list[float]] = {name: [] for name in runs}
    for _ in range(repetitions):
        for name, run in runs.items():
            times[name].append(time_call(run))
    return times


def compare_times(first: Sequence[float], second: Sequence[float]) -> PairedTimes:
    """Compare the seconds of two programs by repetition, of which there must be at least two."""
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    low, typical, high = statistics.quantiles(ratios, n=4)
    first_time, second_time = min(first), min(second)
    return PairedTimes(first_time, second_time, first_time / second_time, typical, (high - low) / 2)


def time_call(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin


def reset_peak_memory() -> None:
    """Return free memory to the system, and reset this process's peak if the system supports it.

    The peak of an accelerator cannot be reset.
    """
    with contextlib.suppress(OSError, AttributeError):  # a libc other than glibc
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
