"""Work shared by two processes, each on half of the cores.

Two small models on half of the cores each are trained sooner than one after the other on all cores.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from famjax.core.errors import UserError
from famjax.processes import runtime

Item = TypeVar("Item")


def run_in_halves(
    work: Callable[[Item, bool], None], items: Sequence[Item], log: Path, console: Console
) -> None:
    """Call `work(item, quiet)` for every other item here, and for the rest in another process.

    Args:
      work: can be pickled; it is quiet in the other process.
      items: those with even index are for this process.
      log: file of the other process's output.
      console: tells when this process waits for the other one.

    Raises:
      UserError: the other process failed.
    """
    process = multiprocessing.get_context("spawn").Process(
        target=_run_quietly, args=(work, items[1::2], log)
    )
    process.start()
    cores = _take_half(first=True)
    try:
        for item in items[::2]:
            work(item, False)
        with console.status("waiting for the other process"):
            process.join()
    finally:
        process.kill()
        if cores:
            os.sched_setaffinity(0, cores)
    if process.exitcode:
        raise UserError(f"the other process, on half of the cores, failed; see {log}")


def _run_quietly(work: Callable[[Item, bool], None], items: Sequence[Item], log: Path) -> None:
    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
        _take_half(first=False)
        runtime.setup()
        for item in items:
            work(item, True)


def _take_half(first: bool) -> set[int]:
    """Restrict the process to half of the cores, if supported; return the previous set."""
    if not hasattr(os, "sched_setaffinity"):
        return set()
    before = os.sched_getaffinity(0)
    cores = sorted(before)
    middle = (len(cores) + 1) // 2
    os.sched_setaffinity(0, (cores[:middle] if first else cores[middle:]) or cores)
    return before
