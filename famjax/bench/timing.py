"""Timing two programs against each other, and the peak memory of one."""

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


class Pair(NamedTuple):
    """Seconds of two programs, measured in turns.

    Attributes:
      first, second: the least of the turns, seconds: what the program takes where nothing disturbs.
      ratio: first / second.
      typical: median over the turns of their ratios, disturbed or not.
      spread: half the range between the quartiles of those.
    """

    first: float
    second: float
    ratio: float
    typical: float
    spread: float


def time_pair(first: Callable[[], Any], second: Callable[[], Any], repetitions: int) -> Pair:
    """Time two functions in turns; each is called once before, to compile."""
    for run in (first, second):
        jax.block_until_ready(run())
    times = [(time_call(first), time_call(second)) for _ in range(repetitions)]
    return compare_times(*zip(*times, strict=True))


def time_interleaved(runs: Mapping[K, Callable[[], Any]], repetitions: int) -> dict[K, list[float]]:
    """Time functions in turns, each called once before; return the seconds of each, by name."""
    for run in runs.values():
        jax.block_until_ready(run())
    times: dict[K, list[float]] = {name: [] for name in runs}
    for _ in range(repetitions):
        for name, run in runs.items():
            times[name].append(time_call(run))
    return times


def compare_times(first: Sequence[float], second: Sequence[float]) -> Pair:
    """Compare the seconds of two programs, turn by turn; there must be two turns at least."""
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    low, typical, high = statistics.quantiles(ratios, n=4)
    least, other = min(first), min(second)
    return Pair(least, other, least / other, typical, (high - low) / 2)


def time_call(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin


def reset_peak_memory() -> None:
    """Begin a new measurement of the peak of this process's memory, where the system can.

    What was freed and not given back goes first.
    """
    with contextlib.suppress(OSError, AttributeError):  # another libc than glibc
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Return the peak in bytes: of the device since the process began, for it cannot be reset; or
    else of the process, since `reset_peak_memory`.
    """
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    return 0
