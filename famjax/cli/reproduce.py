"""`famjax reproduce list|ID ... [KEY=VALUE ...]`: tables and figures of the papers, made here."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from famjax.cli.main import parse, split_overrides
from famjax.cli.tables import Output
from famjax.core.errors import EXIT_USER_ERROR, UserError, did_you_mean
from famjax.core.paths import expanded
from famjax.core.units import counted
from famjax.processes import runtime

if TYPE_CHECKING:
    from famjax.reproduce.cell import Cell
    from famjax.reproduce.experiment import Experiment, Size

# number of experiments that an error may suggest
_NAMED = 5


@dataclass(frozen=True)
class Arguments:
    """Run experiments of the papers: train and evaluate what is not done yet, print the scores next
    to the paper's, and report whether each ordering that the paper claims holds.

    famjax reproduce list shows all tables and figures of the three papers."""

    experiments: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="ID ...")]
    """Ids such as fam-table-3, or all, or list; and KEY=VALUE overrides of all configs."""
    size: str = "here"
    """Scale: here (small enough for two cores) or paper (the paper's config; set its data with
    overrides)."""
    seeds: int = 3
    """Number of training runs of each model, with different seeds."""
    only: str = ""
    """Run only these models, separated by commas."""
    jobs: int | None = None
    """Number of processes, among which the cores are divided.
    Default: one per core; 1 on an accelerator."""
    hours: float | None = None
    """Start no training run that would not finish within this many hours, and report what is left.
    Not with --size paper, whose run times are unknown."""
    test: str = ""
    """With --size paper, the test files of experiments on text, in the form of data.files, or
    NAME:FILES,NAME:FILES for the sets of a table of TransformerFAM."""
    stored: bool = False
    """Take the results that are stored beside the pages, if the models' settings are the same, and
    train only what they lack; with --mixed if the code has changed since."""
    mixed: bool = False
    """Allow results of different versions of the code in one table."""
    folder: str = "runs/reproduce"
    """Folder for the training runs; a later call continues them."""
    pages: str = "docs/reproduced"
    """Folder for the pages with the results, each with a figure. Results with overrides, or of
    fewer trainings than a page there has, go to the folder pages in --folder."""


def run(argv: list[str]) -> int:
    """Run what is missing and show all; return `EXIT_USER_ERROR` if something was refused.

    Of several experiments, those without their data are only named, unless that is all of them.
    """
    given, rest = split_overrides(argv)
    arguments = parse(Arguments, rest, "famjax reproduce")
    _check(arguments)
    if arguments.experiments == ("list",):
        known = Arguments(("list",), folder=arguments.folder, pages=arguments.pages)
        if given or arguments != known:
            raise UserError("reproduce list: takes --folder and --pages only; remove the rest")
        return _list(arguments)
    from famjax.cli.reproduce_pages import page_file
    from famjax.cli.reproduce_results import check_versions
    from famjax.reproduce.runner import make_cells, prepare
    from famjax.reproduce.stored_results import restore_results

    progress = Output(stderr=True)
    root, size = expanded(arguments.folder), _size(arguments)
    only = tuple(filter(None, (part.strip() for part in arguments.only.split(","))))
    experiments = _chosen(arguments, progress)
    _check_only(only, experiments)
    _check_test(arguments.test, experiments)
    for experiment in experiments:
        for variant in experiment.variants:
            experiment.make_config(variant, 0, size, given)
    cells = {
        e.id: make_cells(e, root, arguments.seeds, only, size, given, arguments.test)
        for e in experiments
    }

    # --only names models of some
    experiments = [experiment for experiment in experiments if cells[experiment.id]]

    def check_data(experiment: Experiment) -> None:
        prepare(experiment, root)
        for cell in cells[experiment.id]:
            if cell.seed == 0:
                cell.check(experiment)

    ready = _passing(experiments, check_data, progress)
    if arguments.stored:
        for experiment in ready:
            file = page_file(experiment, expanded(arguments.pages), size).with_suffix(".json")
            count = restore_results(file, experiment, cells[experiment.id])
            progress.print(f"{file}: {counted(count, 'result')} taken")
    if size == "paper":
        _tell_costs(ready, arguments.seeds, only, given, progress)
    allowed = ready
    if not arguments.mixed:
        allowed = _passing(ready, lambda e: check_versions(e, cells[e.id]), progress)
    _train_and_show(allowed, [cell for e in allowed for cell in cells[e.id]], arguments, progress)
    return 0 if ready and len(allowed) == len(ready) else EXIT_USER_ERROR


def _train_and_show(
    experiments: Sequence[Experiment], cells: Sequence[Cell], arguments: Arguments, progress: Output
) -> None:
    """Train what is missing of the experiments' cells, and show each experiment."""
    from famjax.cli.reproduce_pages import show
    from famjax.reproduce.runner import Runner

    deadline = None
    if arguments.hours is not None:
        deadline = time.monotonic() + 3600 * arguments.hours
    by_id = {experiment.id: experiment for experiment in experiments}
    runner = Runner(by_id, _jobs(arguments), progress.print, deadline)
    left = runner.run(cells)
    out = Output()
    for experiment in experiments:
        root, pages = expanded(arguments.folder), expanded(arguments.pages)
        show(experiment, root, cells, pages, arguments.mixed, out)
    if left:
        progress.print(
            f"{len(left)} training runs are left, which take {runner.time_left(left)} and did not "
            "fit in --hours; run the command again to continue, with a larger --hours if nothing "
            "was started"
        )
        for name in by_id:
            own = Counter(cell.variant or "base" for cell in left if cell.experiment == name)
            if own:
                what = ", ".join(f"{variant} ({number})" for variant, number in own.items())
                progress.print(f"{name}, not run: {what}")


def _tell_costs(
    experiments: Sequence[Experiment],
    seeds: int,
    only: Sequence[str],
    given: tuple[str, ...],
    progress: Output,
) -> None:
    """Print what trainings of the paper's size cost, and how to plan them."""
    from famjax.reproduce.cost import CHIP, chip_seconds, paper_flops
    from famjax.reproduce.runner import format_time

    min_time = format_time(chip_seconds(paper_flops(experiments, seeds, only, given)))
    sizes = [e.at_paper for e in experiments if e.at_paper]
    configs = sorted(filter(None, {name for s in sizes for name in (s.config, s.base_config)}))
    if configs:
        progress.print(
            f"at the paper's size the matrix products of training take {min_time} of an "
            f"{CHIP.name.upper()} at its peak, and training takes longer; famjax plan "
            f"{configs[0]} --topology v5e:4x8 prints the memory and the minimum time of a step"
            + (f", likewise for {', '.join(configs[1:])}" if configs[1:] else "")
        )


def _list(arguments: Arguments) -> int:
    from famjax.cli.reproduce_pages import SEEDS, list_tables
    from famjax.reproduce.cost import CHIP

    out = Output()
    pages = expanded(arguments.pages)
    for table in list_tables(expanded(arguments.folder), pages):
        out.print(table)
    if not pages.is_dir():
        out.print(f"{pages}: no such folder; run the list in famjax's checkout to see what was run")
    out.print(
        f"Times are those of {SEEDS} seeds. At the paper's size they are those of the matrix "
        f"products alone, at the peak of one {CHIP.name.upper()}, {CHIP.flops / 1e12:.0f} TFLOP/s. "
        "famjax plan CONFIG prints the memory and the time of a step on other chips."
    )
    return 0


def _size(arguments: Arguments) -> Size:
    return "paper" if arguments.size == "paper" else "here"


def _chosen(arguments: Arguments, progress: Output) -> list[Experiment]:
    """Return the named experiments as they are at the size; of "all", those that have it.

    Raises:
      UserError: a name is unknown, or a named experiment does not have the size.
    """
    from famjax.reproduce.experiments import EXPERIMENTS

    names, size = _known(arguments.experiments, list(EXPERIMENTS)), _size(arguments)
    if size == "paper" and arguments.experiments == ("all",):
        without = [name for name in names if not EXPERIMENTS[name].at_paper]
        names = [name for name in names if name not in without]
        progress.print(f"left out, since they have no paper's size: {', '.join(without)}")
    return [EXPERIMENTS[name].at(size, arguments.test) for name in names]


def _passing(
    experiments: Sequence[Experiment], check: Callable[[Experiment], None], progress: Output
) -> list[Experiment]:
    """Return the experiments that pass a check; name the others with the reason.

    Args:
      check: raises a `UserError` if the experiment does not pass.

    Raises:
      UserError: the only experiment does not pass.
    """
    passing = []
    for experiment in experiments:
        try:
            check(experiment)
        except UserError as error:
            if len(experiments) == 1:
                raise
            reason = str(error).removeprefix(f"{experiment.id}: ")
            progress.print(f"{experiment.id} is left out: {reason}")
        else:
            passing.append(experiment)
    return passing


def _check_test(test: str, experiments: Sequence[Experiment]) -> None:
    """Raise a `UserError` if not exactly one kind of test files is wanted."""
    wanted = {e.measure.test_files: e.id for e in experiments if e.measure.test_files}
    if test and not wanted:
        raise UserError("--test: no experiment that was named takes test files; leave it out")
    if test and len(wanted) > 1:
        ids = ", ".join(wanted.values())
        raise UserError(f"--test: {ids} are tested on different texts; run them one by one")


def _check_only(only: Sequence[str], experiments: Sequence[Experiment]) -> None:
    """Raise a `UserError` for a model that no experiment has."""
    known = dict.fromkeys(v.name for experiment in experiments for v in experiment.variants)
    for name in only:
        if name not in known:
            ids = ", ".join(experiment.id for experiment in experiments)
            raise UserError(f"--only {name}: {ids} has {', '.join(known)}")


def _known(names: Sequence[str], known: Sequence[str]) -> list[str]:
    if not names:
        raise UserError(f"reproduce: name experiments, list or all (known: {', '.join(known)})")
    for word in ("list", "all"):
        if word in names and len(names) > 1:
            others = ", ".join(name for name in names if name != word)
            other = others or f"the other {word}"
            raise UserError(f"{word}: must be the only name; leave out {word}, or {other}")
    if list(names) == ["all"]:
        return list(known)
    for name in names:
        if name not in known:
            near = _about(name, known) or did_you_mean(name, known) or ";"
            raise UserError(f"{name}: no such experiment{near} famjax reproduce list shows all")
    return list(dict.fromkeys(names))


def _about(name: str, known: Sequence[str]) -> str:
    """Return "; did you mean X, Y or Z?" for the experiments that contain the name; "" if none do.

    It may be part of the id, or its words be parts of the id, title, source or names of models.
    """
    from famjax.reproduce.experiments import EXPERIMENTS

    words = re.findall("[a-z0-9]+", name.lower())

    def has_words(identity: str) -> bool:
        experiment = EXPERIMENTS[identity]
        models = [variant.name for variant in experiment.variants]
        text = " ".join([identity, experiment.title, experiment.source, *models]).lower()
        return bool(words) and all(word in text for word in words)

    found = [identity for identity in known if name.lower() in identity]
    found = found or list(filter(has_words, known))
    if not found:
        return ""
    named = list(map(repr, found[:_NAMED]))
    if len(found) > _NAMED:
        named.append(f"another of {len(found)}")
    *others, last = named
    either = f"{', '.join(others)} or {last}" if others else last
    return f"; did you mean {either}?"


def _check(arguments: Arguments) -> None:
    """Raise a `UserError` for options that cannot be, alone or together."""
    if arguments.size not in ("here", "paper"):
        raise UserError(f"--size {arguments.size}: here or paper")
    if arguments.seeds < 1:
        raise UserError(f"--seeds {arguments.seeds}: must be at least 1")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise UserError(f"--jobs {arguments.jobs}: must be at least 1")
    if arguments.hours is not None and not arguments.hours > 0:
        raise UserError(f"--hours {arguments.hours}: must be more than 0")
    if arguments.hours is not None and arguments.size == "paper":
        raise UserError(
            "--hours: how long trainings of the paper's size take is not known; leave it out, stop "
            "with Ctrl-C, and run the command again to continue"
        )
    if arguments.test and arguments.size == "here":
        raise UserError("--test: only with --size paper; here the experiments have their own texts")


def _jobs(arguments: Arguments) -> int:
    if arguments.jobs is not None:
        return arguments.jobs
    return 1 if runtime.has_accelerator() else runtime.count_cores()
