"""Runs the missing trainings of experiments side by side, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from famjax.core.errors import UserError
from famjax.core.json_files import RUN_AGAIN, read_json
from famjax.core.units import counted
from famjax.processes import runtime
from famjax.reproduce.cell import DATA, RESULT, Cell
from famjax.reproduce.cost import trained_tokens
from famjax.reproduce.experiment import Experiment, Size, Variant

# time that a process has to save when it is told to stop
_SECONDS_TO_SAVE = 60
_POLL_SECONDS = 0.1
# times are given in days from this many hours on
_HOURS_SHOWN = 48
_PROCESS = "famjax.cli.reproduce_cell"
# the share of an experiment's minutes that starting, compiling and evaluating take, and the share
# of the longest variant's time from which a cell's time counts
_FIXED, _SHORT = 0.15, 0.5


class Runner:
    """Runs cells side by side, each on its part of the cores.

    Args:
      experiments: the experiments, by id.
      jobs: number of processes at a time.
      say: called to show a line of progress.
      deadline: time on the clock of `time.monotonic`; cells that would end later are not started.
        None is no deadline.
    """

    def __init__(
        self,
        experiments: dict[str, Experiment],
        jobs: int,
        say: Callable[[str], None],
        deadline: float | None = None,
    ):
        self._experiments, self._say, self._deadline = experiments, say, deadline
        self._cores = split_cores(jobs)
        # expected and measured seconds of finished cells, by experiment
        self._took: dict[str, list[tuple[float, float]]] = {}
        # expected seconds of each variant, by experiment
        self._expected: dict[str, dict[str, float]] = {}
        self._folders: dict[Cell, Path] = {}
        self._done = 0

    def run(self, cells: Sequence[Cell]) -> list[Cell]:
        """Run the cells without a result, in order; return those for which there is no time.

        Raises:
          UserError: a cell failed. The others that run are stopped, and continue at the next call.
        """
        runtime.share_gpu()
        waiting = self._needed(cells)
        total = len(waiting)
        left: list[Cell] = []
        free, running = list(self._cores), list[_Process]()
        # as Ctrl-C does, so that the processes are stopped
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            while waiting or running:
                late = [cell for cell in waiting if self._is_late(cell)]
                left += late
                waiting = [cell for cell in waiting if cell not in late]
                while free and (cell := self._next(waiting, running)) is not None:
                    waiting.remove(cell)
                    self._announce(cell)
                    running.append(_Process(cell, self._experiment(cell), free.pop(0)))
                if not running:
                    return left + waiting  # the bases of those waiting were left out
                time.sleep(_POLL_SECONDS)
                for process in [process for process in running if process.has_ended()]:
                    running.remove(process)
                    free.append(process.cores)
                    self._report(process, waiting, total)
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()
            signal.signal(signal.SIGTERM, before)
        return left

    def _needed(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells to run: those without a result, and the bases that they continue."""
        # by folder, since experiments share bases
        needed: dict[Path, Cell] = {}

        def add(cell: Cell) -> None:
            base = cell.base(self._experiment(cell))
            if base is not None and not self._is_trained(base):
                add(base)
            needed.setdefault(cell.folder(self._experiment(cell)), cell)

        for cell in cells:
            if cell.variant and not self._is_done(cell):
                add(cell)
        return sorted(needed.values(), key=lambda cell: bool(cell.variant))

    def _next(self, waiting: Sequence[Cell], running: Sequence[_Process]) -> Cell | None:
        """Return the first cell whose base is trained, and whose training is not yet running."""
        busy = {self._training_folder(process.cell) for process in running}
        for cell in waiting:
            base = cell.base(self._experiment(cell))
            is_ready = base is None or self._is_trained(base)
            if is_ready and self._training_folder(cell) not in busy:
                return cell
        return None

    def _training_folder(self, cell: Cell) -> Path:
        if cell not in self._folders:
            self._folders[cell] = cell.training_folder(self._experiment(cell))
        return self._folders[cell]

    def _is_trained(self, base: Cell) -> bool:
        """Return whether a base is trained. Called often, so it does not look at the data."""
        return (self._training_folder(base) / RESULT).exists()

    def _is_done(self, cell: Cell) -> bool:
        return read_result(cell, self._experiment(cell)) is not None

    def _experiment(self, cell: Cell) -> Experiment:
        return self._experiments[cell.experiment]

    def estimate(self, cell: Cell) -> float | None:
        """Return the seconds that a cell takes; None if they are not known.

        This is the expected time, scaled by how much longer than expected the experiment's finished
        cells took. At the paper's size expected times are relative, so that a cell must have
        finished.
        """
        expected, took = self._expect(cell), self._took.get(cell.experiment)
        if took:
            return expected * sum(own for _, own in took) / sum(before for before, _ in took)
        return expected if cell.size == "here" else None

    def _expect(self, cell: Cell) -> float:
        name = cell.experiment
        if name not in self._expected:
            self._expected[name] = expected_seconds(self._experiment(cell), cell.size, cell.given)
        return self._expected[name][cell.variant]

    def time_left(self, cells: Sequence[Cell]) -> str:
        """Return the time that cells take side by side, such as "about 12 minutes"."""
        each = [self.estimate(cell) for cell in cells]
        known = [seconds for seconds in each if seconds is not None]
        if len(known) < len(each):
            return "an unknown time"
        return f"about {format_time(sum(known) / len(self._cores))}"

    def _is_late(self, cell: Cell) -> bool:
        return self._deadline is not None and (
            time.monotonic() + (self.estimate(cell) or 0) > self._deadline
        )

    def _announce(self, cell: Cell) -> None:
        seconds = self.estimate(cell)
        time_taken = "an unknown time" if seconds is None else f"about {format_time(seconds)}"
        self._say(f"training {_describe(cell)}: {time_taken}")

    def _report(self, process: _Process, waiting: Sequence[Cell], total: int) -> None:
        process.check()
        self._done += 1
        cell, seconds = process.cell, process.seconds()
        expected = self._expect(cell)
        variants = [s for name, s in self._expected[cell.experiment].items() if name]
        # the time of a cell that hardly trains says little about that of others
        if expected > _SHORT * max(variants):
            self._took.setdefault(cell.experiment, []).append((expected, seconds))
        shown = f"{self._done}/{total} {_describe(cell)}: {seconds:.0f} s"
        self._say(f"{shown}, {self.time_left(waiting)} left" if waiting else shown)


def expected_seconds(
    experiment: Experiment, size: Size = "here", given: tuple[str, ...] = ()
) -> dict[str, float]:
    """Return the seconds that a seed of each variant takes; at the paper's size, only their ratios.

    A part is fixed, the rest is in proportion to the tokens. A variant with the config of the base
    shares its training, and takes the fixed part.

    Args:
      experiment: the experiment.
      size, given: see `Cell`.

    Returns:
      seconds by name of the variant; "" is the base.
    """
    base = experiment.make_base_config(0, size, given) if experiment.has_base(size) else None

    def tokens(variant: Variant, given: tuple[str, ...]) -> int:
        config = experiment.make_config(variant, 0, size, given)
        return 0 if config == base and variant.continues is None else trained_tokens(config)

    found = {variant.name: tokens(variant, given) for variant in experiment.variants}
    usual = [tokens(v, ()) for v in experiment.variants] if given else found.values()
    longest = max(usual)
    if base is not None:
        found[""] = trained_tokens(base)
    whole = 60 * experiment.minutes
    return {name: whole * (_FIXED + (1 - _FIXED) * own / longest) for name, own in found.items()}


def _describe(cell: Cell) -> str:
    return f"{cell.experiment}: {cell.variant or 'base'}, seed {cell.seed}"


class _Process:
    """A process that runs a cell."""

    def __init__(self, cell: Cell, experiment: Experiment, cores: str):
        self.cell, self.cores = cell, cores
        folder = cell.folder(experiment)
        folder.mkdir(parents=True, exist_ok=True)
        self.log, self._begin = folder / "log.txt", time.monotonic()
        own = json.dumps(asdict(cell)), cores, str(os.getpid())
        arguments = [sys.executable, "-m", _PROCESS, *own]
        with self.log.open("ab") as log:
            self._begin_of_log = log.tell()
            # in a process group of its own: Ctrl-C reaches only this process, which tells the
            # others to save and end; a second signal would interrupt that
            group = 0 if hasattr(os, "setpgid") else None
            self._process = subprocess.Popen(arguments, stdout=log, stderr=log, process_group=group)

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def check(self) -> None:
        """Raise a `UserError` with the reason if the process failed."""
        status = self._process.returncode
        if not status:
            return
        if status < 0:
            name = signal.Signals(-status).name
            reason = f"was ended by {name}; if the machine ran out of memory, give --jobs 1"
        else:
            text = self.log.read_bytes()[self._begin_of_log :].decode(errors="replace")
            reason = reason_of_failure(text)
        what = f"{self.cell.experiment}, {self.cell.variant or 'base'}, seed {self.cell.seed}"
        raise UserError(f"{what}: {reason}; see {self.log}")

    def terminate(self) -> None:
        """Tell the process to save and end."""
        self._process.terminate()

    def wait(self) -> None:
        """Wait for a process that was told to end; if it takes too long, end it."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_SECONDS_TO_SAVE)
        self._process.kill()


def reason_of_failure(output: str) -> str:
    """Return the error in a process's output, with the option of `famjax reproduce` for folders."""
    lines = output.strip().splitlines() or ["no output"]
    # a training suggests its own option, for example if another command trains in the same folder
    return lines[-1].removeprefix("famjax: ").replace("give --run ", "give --folder ")


def split_cores(jobs: int) -> list[str]:
    """Return the cores of each process, such as "0,1"; "" on systems that cannot choose them."""
    if not hasattr(os, "sched_getaffinity"):
        return [""] * jobs
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // jobs)
    parts = [cores[i * size % len(cores) :][:size] for i in range(jobs)]
    return [",".join(map(str, part)) for part in parts]


def make_cells(
    experiment: Experiment,
    root: Path,
    seeds: int,
    only: Sequence[str],
    size: Any,
    given: tuple[str, ...],
    test: str = "",
) -> list[Cell]:
    """Return an experiment's trainings: all bases, then all variants of a seed before the next.

    Variants come after those that they continue.

    Args:
      only: names of the variants; () takes all.
      given, test: see `Cell`.
    """
    variants = experiment.variants_at(size)
    names = [variant.name for variant in variants if not only or variant.name in only]
    cells = [
        Cell(str(root), experiment.id, name, seed, size, given, test)
        for seed in range(seeds)
        for name in names
    ]
    ordered = [each for cell in cells for each in (*reversed(cell.bases(experiment)), cell)]
    bases = [cell for cell in ordered if not cell.variant]
    return list(dict.fromkeys((*bases, *ordered)))


def prepare(experiment: Experiment, root: Path) -> None:
    """Make the data of an experiment now, so that several processes do not do it at once.

    Raises:
      UserError: data is missing that cannot be made.
    """
    (root / DATA).mkdir(parents=True, exist_ok=True)
    experiment.measure.prepare(root / DATA)


def read_result(cell: Cell, experiment: Experiment) -> dict[str, Any] | None:
    """Return the result of a cell; None if it has none, or one with other settings or scores."""
    file = cell.folder(experiment) / RESULT
    if not file.exists():
        return None
    result = dict(read_json(file, RUN_AGAIN))
    if not cell.variant:
        return result
    names = {score.name for score in experiment.scores}
    is_current = result.get("settings") == cell.settings(experiment)
    return result if is_current and names <= set(result["scores"]) else None


def format_time(seconds: float) -> str:
    """Return a time as text: "12 days", "1:05 hours", "12 minutes"."""
    minutes = max(1, round(seconds / 60))
    if minutes >= 60 * _HOURS_SHOWN:
        return f"{round(minutes / 1440)} days"
    if minutes >= 60:
        return f"{minutes // 60}:{minutes % 60:02d} hours"
    return counted(minutes, "minute")
