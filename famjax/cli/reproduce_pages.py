"""Pages of `famjax reproduce`, their index, and the list of the papers' tables and figures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from famjax.cli.figures import save_figure
from famjax.cli.reproduce_figures import plot
from famjax.cli.reproduce_results import Results, code_versions, collect
from famjax.cli.reproduce_tables import (
    claim,
    describe_costs,
    has_base,
    has_table,
    is_of_a_paper,
    ordering_table,
    score_table,
)
from famjax.cli.tables import Output, Table
from famjax.core.units import inflect
from famjax.reproduce.cell import Cell
from famjax.reproduce.cost import CHIP, chip_seconds, paper_flops
from famjax.reproduce.experiment import Experiment, Size
from famjax.reproduce.experiments import EXPERIMENTS
from famjax.reproduce.papers import listed
from famjax.reproduce.runner import expected_seconds, format_time, make_cells, read_result
from famjax.reproduce.stored_results import store_results

# number of seeds for which the list states costs, the default of `famjax reproduce`
SEEDS = 3
# what the names of pages at the paper's size end with
_PAPER = "-paper"
# how a page says of how many trainings it is
_TRAININGS = re.compile(r"^(\d+) of \d+ trainings, ", re.MULTILINE)


def show(
    experiment: Experiment,
    root: Path,
    cells: Sequence[Cell],
    pages: Path,
    mixed: bool,
    out: Output,
) -> None:
    """Print an experiment's results, and write its page.

    The page goes to `pages`; results with overrides, or of fewer trainings than the page that is
    there, go to a folder in `root`.
    """
    results = collect(experiment, cells, mixed)
    if not results.by_variant:
        out.print(f"{experiment.id}: nothing is done yet")
        return
    out.print(score_table(results))
    if experiment.orderings:
        out.print(ordering_table(results))
    page = page_file(experiment, pages, "paper" if "--size" in results.options else "here")
    if reason := _reason_to_keep(page, results):
        page = root / "pages" / page.name
        out.print(f"{pages / page.name} is left as it is: {reason}")
    figure = save_figure(plot(results), page.with_suffix(".png"))
    page.write_text(make_page(results, figure.name))
    store_results(page.with_suffix(".json"), results.by_variant)
    write_index(page.parent)
    out.print(f"page: {page}   figure: {figure}")


def page_file(experiment: Experiment, pages: Path, size: Size) -> Path:
    """Return the file of an experiment's page."""
    return pages / f"{experiment.id}{_PAPER if size == 'paper' else ''}.md"


def _reason_to_keep(page: Path, results: Results) -> str:
    """Return why results must not replace a page among the others, or "" if they may."""
    if results.overrides:
        return f"these results are with {' '.join(results.overrides)}"
    found = _TRAININGS.search(page.read_text()) if page.exists() else None
    if found and int(found[1]) > (here := len(results.each())):
        return f"it has {found[1]} trainings, and these results {here}"
    return ""


def make_page(results: Results, figure: str) -> str:
    """Return an experiment's page, in Markdown."""
    experiment, each = results.experiment, results.each()
    seconds = sum(result["train_seconds"] + result["evaluation_seconds"] for result in each)
    seeds = max(map(len, results.by_variant.values()))
    versions = code_versions(each)
    options = [*results.options, *(["--mixed"] if len(versions) > 1 else [])]
    lines = [
        f"# {experiment.source}: {experiment.title}",
        "",
        " ".join([f"    famjax reproduce {experiment.id} --seeds {seeds}", *options]),
        "",
        _notes(experiment),
        "",
        f"{len(each)} of {results.trainings} trainings, {format_time(seconds)} of process time"
        f"{' (without that of their bases)' if has_base(results) else ''}, on "
        f"{each[0]['device']}, commit {', '.join(versions)}. Means over seeds, ± half "
        f"of the 95% interval (Student's). {describe_costs(results)}",
        "",
        score_table(results, is_page=True).markdown(),
        "",
    ]
    if experiment.orderings:
        lines += [ordering_table(results).markdown(), ""]
    if experiment.follow_up:
        lines += ["## Follow-up", "", experiment.follow_up, ""]
    lines += [f"![{experiment.title}]({figure})", ""]
    return "\n".join(lines)


def _notes(experiment: Experiment) -> str:
    return f"{experiment.note} {experiment.unequal_parameters}".strip()


def write_index(pages: Path) -> None:
    """Write the page with links to the pages of the experiments."""
    lines = ["# Reproduced", "", "Results of `famjax reproduce`, one page per experiment.", ""]
    for experiment in EXPERIMENTS.values():
        for suffix, size in (("", ""), (_PAPER, ", at the paper's size")):
            page = f"{experiment.id}{suffix}.md"
            if (pages / page).exists():
                name = experiment.source if is_of_a_paper(experiment) else experiment.id
                lines.append(f"- [{name}]({page}): {experiment.title}{size}")
    (pages / "index.md").write_text("\n".join([*lines, ""]))


def list_tables(root: Path, pages: Path) -> Iterator[Table]:
    """Yield a table for each paper: its tables and figures, and the state of each here."""
    for paper, entries in listed(EXPERIMENTS.values()).items():
        table = Table(paper, ("", "shows", "state", "paper size", "command"), words=(0, 1, 2, 3, 4))
        for entry in entries:
            state, command, paper_size = entry.state, entry.command, ""
            if entry.experiment:
                experiment = EXPERIMENTS[entry.experiment]
                state = _state(experiment, root, pages)
                paper_size = _paper_state(experiment, pages)
                command = f"famjax reproduce {entry.experiment}"
            table.add_row(entry.name, entry.shows, state, paper_size, command)
        yield table


def _paper_state(experiment: Experiment, pages: Path) -> str:
    """Return the page of an experiment at the paper's size, or what it would train and take.

    Its trainings depend on the user's data, so only the page tells whether it was run.
    """
    if experiment.at_paper is None:
        return "no config"
    page = pages / f"{experiment.id}{_PAPER}.md"
    if page.exists():
        return f"{page}"
    cost = format_time(chip_seconds(paper_flops([experiment], SEEDS)))
    return f"not run: {cost} at the peak of an {CHIP.name.upper()}; {experiment.at_paper.config}"


def _state(experiment: Experiment, root: Path, pages: Path) -> str:
    """Return how much of an experiment is done, or the time that it would take."""
    trainings = make_cells(experiment, root, SEEDS, (), "here", ())
    cells = [cell for cell in trainings if cell.variant]
    done = sum(read_result(cell, experiment) is not None for cell in cells)
    if done:
        return f"{done} of {len(cells)} trainings done"
    expected = expected_seconds(experiment)
    cost = format_time(sum(expected[cell.variant] for cell in trainings))
    page = pages / f"{experiment.id}.md"
    if not page.exists():
        return f"not run: {cost} of a core"
    lacks = _missing(experiment, page.read_text(), len(cells))
    note = f" ({', '.join(lacks)})" if lacks else ""
    return f"{page}{note}; again: {cost} of a core"


def _missing(experiment: Experiment, page: str, trainings: int) -> list[str]:
    """Return what a page lacks of the experiment as it is now, in words."""
    lacks = []
    found = _TRAININGS.search(page)
    if found and int(found[1]) < trainings:
        lacks.append(f"{found[1]} of {trainings} trainings")
    rows = [f"| {claim(o)} | {experiment.score(o.score).name} |" for o in experiment.orderings]
    claims = sum(row not in page for row in rows)
    if not has_table(experiment, page):
        lacks.append("with another table")
    if claims:
        lacks.append(f"without {claims} new {inflect(claims, 'claim', 'claims')}")
    _, _, follow_up = page.partition("\n## Follow-up\n\n")
    has_notes = f"\n{_notes(experiment)}\n" in page
    if not has_notes or follow_up.partition("\n")[0] != experiment.follow_up:
        lacks.append("with other notes")
    return lacks
