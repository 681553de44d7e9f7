"""Timing two programs against each other, and the peak memory of one."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax


class Pair(NamedTuple):
    """Seconds of two programs, measured in turns, and their ratio.

    Attributes:
      first, second: medians, seconds.
      ratio: median over the turns of first / second, so that a machine that slows down for a
        while slows both.
      spread: half the range between the quartiles of that ratio.
    """

    first: float
    second: float
    ratio: float
    spread: float


def in_turns(first: Callable[[], Any], second: Callable[[], Any], turns: int) -> Pair:
    """Time two functions in turns; each is called once before, to compile."""
    for run in (first, second):
        jax.block_until_ready(run())
    times = [(seconds(first), seconds(second)) for _ in range(turns)]
    ratios = [a / b for a, b in times]
    low, _, high = statistics.quantiles(ratios, n=4)
    return Pair(
        statistics.median(a for a, _ in times),
        statistics.median(b for _, b in times),
        statistics.median(ratios),
        (high - low) / 2,
    )


def seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin


def reset_peak_memory() -> None:
    """Begin a new measurement of the peak of this process's memory, where the system can."""
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
