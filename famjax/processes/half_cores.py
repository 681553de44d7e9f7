"""Work in other processes: in one process on all cores, or in two on half of the cores each.

Training two small models at the same time, on half of the cores each, takes less time than training
one after the other on all cores. A process can be restricted to cores only before JAX starts its
threads, so this process must not use JAX before the first call of `run_in_halves`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from famjax.core.errors import UserError
from famjax.processes import runtime
from famjax.processes.parent import end_with_parent

Item = TypeVar("Item")
# seconds for the other process to save after an interruption
_SECONDS_TO_SAVE = 60


def run_in_process(work: Callable[..., int], *arguments: Any) -> None:
    """Call `work(*arguments)` in another process.

    Args:
      work: function that reports its own errors, and returns an exit status.

    Raises:
      SystemExit: the status was not 0.
    """
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_exit_with_status, args=(work, arguments))
    process.start()
    try:
        process.join()
    except KeyboardInterrupt:
        process.join()  # it receives the signal too, and saves
    if process.exitcode:
        raise SystemExit(process.exitcode)


def _exit_with_status(work: Callable[..., int], arguments: tuple[Any, ...]) -> None:
    _end_with_parent()
    sys.exit(work(*arguments))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent
    assert parent.pid
    end_with_parent(parent.pid)


def run_in_halves(
    work: Callable[[Item, bool], None], items: Sequence[Item], log: Path, console: Console
) -> None:
    """Call `work(item, quiet)` for all items, in order, each in the first process that is free.

    With an accelerator all of them are done in this process, since a TPU admits only one, and with
    a single core too.

    Args:
      work: a function that can be pickled; `quiet` is True in the other process.
      items: the items to work on.
      log: file for the other process's output.
      console: shows when this process waits for the other one.

    Raises:
      UserError: the other process failed.
    """
    if runtime.has_accelerator() or runtime.count_cores() == 1:
        for each in items:
            work(each, False)
        return
    runtime.share_gpu()  # one that has no device file
    context = multiprocessing.get_context("spawn")
    taken = context.Value("i", 0)
    process = context.Process(target=_work_quietly, args=(work, items, taken, log))
    process.start()
    cores = _take_half(first=True)
    try:
        while (item := _take(items, taken)) is not None:
            work(item, False)
        with console.status("waiting for the other process"):
            process.join()
    except BaseException:  # an interruption, or an error of this process's item
        process.terminate()  # it saves, and ends
        process.join(_SECONDS_TO_SAVE)
        raise
    finally:
        process.kill()
        if cores:
            os.sched_setaffinity(0, cores)
    if process.exitcode:
        raise UserError(f"the other process, on half of the cores, failed; see {log}")


def _work_quietly(
    work: Callable[[Item, bool], None], items: Sequence[Item], taken: Any, log: Path
) -> None:
    _end_with_parent()
    # signals to the process group do not reach this process: a second one would interrupt saving
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
        _take_half(first=False)
        runtime.setup()
        while (item := _take(items, taken)) is not None:
            work(item, True)


def _take(items: Sequence[Item], taken: Any) -> Item | None:
    """Return the next item that no process has taken, or None; `taken` counts the taken ones."""
    with taken.get_lock():
        number = taken.value
        taken.value += 1
    return items[number] if number < len(items) else None


def _take_half(first: bool) -> set[int]:
    """Restrict this process to half of its cores, if supported; return the previous set."""
    if not hasattr(os, "sched_setaffinity"):
        return set()
    before = os.sched_getaffinity(0)
    cores = sorted(before)
    middle = (len(cores) + 1) // 2
    os.sched_setaffinity(0, (cores[:middle] if first else cores[middle:]) or cores)
    return before
