"""`famjax reproduce list|ID ... [KEY=VALUE ...]`: tables and figures of the papers, made here."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from famjax.cli.main import parse
from famjax.cli.tables import Output
from famjax.core.errors import EXIT_USER_ERROR, UserError, nearest
from famjax.core.paths import expanded

if TYPE_CHECKING:
    from famjax.reproduce.cell import Cell
    from famjax.reproduce.experiment import Experiment, Size


@dataclass(frozen=True)
class Arguments:
    """Run experiments of the papers: train and evaluate what is not done yet, print the scores
    beside the paper's, and say whether each ordering that the paper claims holds.

    famjax reproduce list shows all tables and figures of the three papers."""

    experiments: tyro.conf.Positional[tuple[str, ...]]
    """Ids such as fam-table-3, or all, or list; and KEY=VALUE overrides of all configs."""
    size: str = "here"
    """Size: here (for two cores) or paper (the paper's config; give its data by overrides)."""
    seeds: int = 3
    """Number of trainings of each model."""
    only: str = ""
    """Run only these models, separated by commas."""
    jobs: int | None = None
    """Number of processes, each on its part of the cores.
    Default: one per core; 1 on an accelerator."""
    hours: float | None = None
    """Start no training that would not end within this many hours, and report what is left."""
    mixed: bool = False
    """Allow results of different versions of the code in one table."""
    folder: str = "runs/reproduce"
    """Folder of the trainings; a later call continues them."""
    pages: str = "docs/reproduced"
    """Folder of the pages to write, each with a figure."""


def run(argv: list[str]) -> int:
    given = tuple(token for token in argv if not token.startswith("-") and "=" in token)
    arguments = parse(Arguments, [a for a in argv if a not in given], "famjax reproduce")
    names = list(arguments.experiments)
    from famjax.cli.reproduce_output import list_table, show
    from famjax.reproduce.experiments import EXPERIMENTS

    out, progress = Output(), Output(stderr=True)
    root, pages = expanded(arguments.folder), expanded(arguments.pages)
    if names == ["list"]:
        for table in list_table(root, pages):
            out.print(table)
        return 0
    experiments = [EXPERIMENTS[name] for name in _known(names, list(EXPERIMENTS))]
    _check(arguments)
    from famjax.reproduce.runner import Runner, format_time, make_cells

    size: Size = "paper" if arguments.size == "paper" else "here"
    only = tuple(filter(None, (part.strip() for part in arguments.only.split(","))))
    for experiment in experiments:
        if size == "paper" and not experiment.paper_config:
            raise UserError(f"{experiment.id}: has no config at the paper's size; leave out --size")
    _check_only(only, experiments, size)
    if size == "here":
        experiments = _prepared(experiments, root, progress)
    cells = [
        cell
        for experiment in experiments
        for cell in make_cells(experiment, root, arguments.seeds, only, size, given)
    ]
    by_id = {experiment.id: experiment for experiment in experiments}
    for cell in cells:
        if cell.seed == 0:
            cell.check(by_id[cell.experiment])
    allowed = experiments if arguments.mixed else _of_one_version(experiments, cells, progress)
    refused = len(experiments) - len(allowed)
    ids = {experiment.id for experiment in allowed}
    cells = [cell for cell in cells if cell.experiment in ids]
    deadline = None
    if arguments.hours is not None:
        deadline = time.monotonic() + 3600 * arguments.hours
    runner = Runner(by_id, _jobs(arguments), progress.print, deadline)
    left = runner.run(cells)
    for experiment in allowed:
        if any(cell.experiment == experiment.id for cell in cells):
            show(experiment, root, cells, pages, arguments.mixed, out)
    if left:
        rest = format_time(sum(map(runner.estimate, left)) / _jobs(arguments))
        progress.print(
            f"{len(left)} trainings are left, which take about {rest} and did not fit into "
            "--hours; run the command again to continue, with more --hours if nothing was started"
        )
    return EXIT_USER_ERROR if refused else 0


def _of_one_version(
    experiments: Sequence[Experiment], cells: Sequence[Cell], progress: Output
) -> list[Experiment]:
    """Return the experiments whose results will be of one version of the code; name the others.

    Raises:
      UserError: the only experiment is of several versions.
    """
    from famjax.cli.reproduce_output import check_versions

    allowed = []
    for experiment in experiments:
        try:
            check_versions(experiment, cells)
        except UserError as error:
            if len(experiments) == 1:
                raise
            progress.print(f"left out: {error}")
        else:
            allowed.append(experiment)
    return allowed


def _prepared(experiments: Sequence[Experiment], root: Path, progress: Output) -> list[Experiment]:
    """Make the data of experiments, and return the experiments.

    Of several experiments, those whose data is missing are named, and left out.
    """
    from famjax.reproduce.runner import prepare

    ready = []
    for experiment in experiments:
        try:
            prepare(experiment, root)
        except UserError as error:
            if len(experiments) == 1:
                raise
            progress.print(f"{experiment.id} is left out: {error}")
        else:
            ready.append(experiment)
    return ready


def _check_only(only: Sequence[str], experiments: Sequence[Experiment], size: Size) -> None:
    """Raise a `UserError` for a model that no experiment has."""
    known = dict.fromkeys(
        v.name for experiment in experiments for v in experiment.variants_at(size)
    )
    for name in only:
        if name not in known:
            ids = ", ".join(experiment.id for experiment in experiments)
            raise UserError(f"--only {name}: {ids} has {', '.join(known)}")


def _known(names: Sequence[str], known: Sequence[str]) -> list[str]:
    if not names:
        raise UserError(f"reproduce: name experiments, list or all (known: {', '.join(known)})")
    if names == ["all"]:
        return list(known)
    for name in names:
        if name not in known:
            near = nearest(name, known)
            raise UserError(f"{name}: no such experiment{near}; famjax reproduce list shows all")
    return list(dict.fromkeys(names))


def _check(arguments: Arguments) -> None:
    if arguments.size not in ("here", "paper"):
        raise UserError(f"--size {arguments.size}: here or paper")
    if arguments.seeds < 1:
        raise UserError(f"--seeds {arguments.seeds}: must be at least 1")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise UserError(f"--jobs {arguments.jobs}: must be at least 1")
    if arguments.hours is not None and arguments.hours <= 0:
        raise UserError(f"--hours {arguments.hours}: must be more than 0")


def _jobs(arguments: Arguments) -> int:
    if arguments.jobs is not None:
        return arguments.jobs
    # look for device files: asking JAX would take the accelerator from the processes that train
    devices = ("/dev/nvidia0", "/dev/accel0", "/dev/vfio/0", "/dev/kfd")
    if os.environ.get("JAX_PLATFORMS") != "cpu" and any(map(os.path.exists, devices)):
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores or 1
