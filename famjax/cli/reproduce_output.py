"""Output of `famjax reproduce`: tables, verdicts, figures, pages."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from famjax.cli.figures import new_figure, save_figure
from famjax.cli.tables import PAPER_NUMBERS, Output, Table
from famjax.core.errors import UserError
from famjax.core.units import inflect
from famjax.reproduce.cell import Cell
from famjax.reproduce.cost import CHIP, chip_seconds, paper_flops
from famjax.reproduce.experiment import Experiment, Ordering, Score, Size, Variant
from famjax.reproduce.experiments import EXPERIMENTS
from famjax.reproduce.judge import Judgement, judge, mean_and_interval
from famjax.reproduce.papers import listed
from famjax.reproduce.runner import expected_seconds, format_time, make_cells, read_result
from famjax.reproduce.stored_results import store_results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# maximum number of scores that a table in a terminal shows
_SHOWN = 4
# number of seeds for which the list states costs, the default of `famjax reproduce`
SEEDS = 3
# what the names of pages at the paper's size end with
_PAPER = "-paper"
# how a page says of how many trainings it is
_TRAININGS = re.compile(r"^(\d+) of \d+ trainings, ", re.MULTILINE)
# columns that only the table of a page has
_COSTS = ("parameters", "tokens", "TFLOP")
# heading of the column with versions of the code
_VERSION = "commit"
# maximum number of scores that a figure has side by side
_PANELS = 3
# characters of a line of a figure's title
_TITLE_WIDTH = 70
# an axis is logarithmic if the largest x is at least this many times the smallest
_FAR_APART = 100
# it is also logarithmic if at least so many x have equal ratios of at least so much
_EQUAL_RATIOS = ((4, 0.0), (3, 4.0))
# maximum number of whole x that are all written on a linear axis
_MAX_TICKS = 10


@dataclass(frozen=True)
class Results:
    """The results of an experiment's trainings.

    Attributes:
      experiment: the experiment.
      by_variant: results of the finished trainings, by variant and seed.
      trainings: number of trainings of all variants with the seeds that were asked for.
      options: options of `famjax reproduce` with which they differ from the experiment's own.
      overrides: the user's overrides, except those of the data at the paper's size.
    """

    experiment: Experiment
    by_variant: Mapping[str, Mapping[int, dict[str, Any]]]
    trainings: int
    options: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()

    def values(self, variant: str, score: str) -> list[float]:
        return [result["scores"][score] for result in self.by_variant.get(variant, {}).values()]

    def each(self) -> list[dict[str, Any]]:
        return [result for seeds in self.by_variant.values() for result in seeds.values()]

    def baselines(self) -> dict[str, dict[str, float]]:
        """Return the scores of the trivial baselines, from the first result."""
        return next((result["baselines"] for result in self.each()), {})

    def judge(self, ordering: Ordering) -> Judgement | None:
        """Judge an ordering by the seeds that all of its models have; None if there are none."""
        score = self.experiment.score(ordering.score)
        names = (ordering.better, ordering.worse, *ordering.wider_than)
        found = [self.by_variant.get(name, {}) for name in names]
        seeds = sorted(set.intersection(*map(set, found)))
        if not seeds:
            return None
        values = np.array([[each[seed]["scores"][score.name] for seed in seeds] for each in found])
        if ordering.wider_than:
            values = values[::2] - values[1::2]
        better, worse = values.tolist()
        claim = ordering.margin, ordering.may_be_better
        return judge(better, worse, score.higher_is_better, *claim)


def check_versions(experiment: Experiment, cells: Sequence[Cell]) -> None:
    """Check that the results of an experiment's cells are of one version of the code.

    What is still to be trained will be of the version of its cell.

    Raises:
      UserError: the results are, or would be, of several versions.
    """
    own = [cell for cell in cells if cell.experiment == experiment.id and cell.variant]
    results = [read_result(cell, experiment) for cell in own]
    done = _versions([result for result in results if result is not None])
    left = {cell.code for cell, result in zip(own, results, strict=True) if result is None}
    versions = sorted({*done, *left})
    if done and len(versions) > 1:
        raise UserError(
            f"{experiment.id}: its results {'are' if len(done) > 1 else 'would be'} from "
            f"different versions of the code ({', '.join(versions)}); --mixed shows them together. "
            "To reproduce all of them with this version, which reuses its own finished training "
            f"runs, remove {own[0].folder(experiment).parents[1]}"
        )


def collect(experiment: Experiment, cells: Sequence[Cell], mixed: bool) -> Results:
    """Return the results of an experiment's cells.

    Raises:
      UserError: results are of several versions of the code, and `mixed` is not set.
    """
    if not mixed:
        check_versions(experiment, cells)
    own = [cell for cell in cells if cell.experiment == experiment.id and cell.variant]
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for cell in own:
        if (result := read_result(cell, experiment)) is not None:
            found.setdefault(cell.variant, {})[cell.seed] = result
    trainings = len(experiment.variants) * len({cell.seed for cell in own})
    # at the paper's size overrides name the data
    overrides = own[0].given if own[0].size == "here" else ()
    return Results(experiment, found, trainings, _options(experiment, own), overrides)


def _options(experiment: Experiment, cells: Sequence[Cell]) -> tuple[str, ...]:
    """Return the options of `famjax reproduce` that an experiment's cells were given."""
    cell, names = cells[0], list(dict.fromkeys(cell.variant for cell in cells))
    size = ("--size", "paper") if cell.size == "paper" else ()
    test = ("--test", shlex.quote(cell.test)) if cell.test else ()
    is_part = len(names) < len(experiment.variants)
    only = ("--only", shlex.quote(",".join(names))) if is_part else ()
    return (*size, *test, *only, *cell.given)


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


def _shown_scores(results: Results) -> Sequence[Score]:
    return results.experiment.scores[:_SHOWN]


def _format(score: Score, values: Sequence[float]) -> str:
    """Return a mean and half of its 95% interval over seeds, such as "12.3% ± 1.2"."""
    if not values:
        return "-"
    mean, half = mean_and_interval(values)
    if np.isnan(half):
        return score.format(mean)
    return f"{score.format(mean)} ± {score.format(half).rstrip('%')}"


def _paper(experiment: Experiment, variant: Variant) -> str:
    """Return the paper's numbers as text, such as "XLSum 15.9%"."""
    return ", ".join(
        f"{name} {100 * value:.1f}%" if experiment.paper_unit(name) else f"{name} {value:g}"
        for name, value in variant.paper.items()
    )


def _rows(results: Results, scores: Sequence[Score], with_costs: bool = False) -> list[list[str]]:
    """Return the rows of the table of scores; `with_costs` adds the columns of costs."""
    rows, has_paper, versions = [], _is_of_a_paper(results.experiment), _version_column(results)
    for variant in results.experiment.variants:
        values = [results.values(variant.name, score.name) for score in scores]
        seeds = str(len(values[0]))
        cells = [_format(score, each) for score, each in zip(scores, values, strict=True)]
        costs = _costs(results, variant) if with_costs else []
        if versions:
            own = list(results.by_variant.get(variant.name, {}).values())
            costs.append(", ".join(_versions(own)))
        paper = [_paper(results.experiment, variant)] if has_paper else []
        rows.append([variant.name, seeds, *costs, *cells, *paper])
    for name, row in results.baselines().items():
        cells = [score.format(row[score.name]) if score.name in row else "" for score in scores]
        costs = [""] * (len(_cost_columns(results)) if with_costs else 0) + [""] * len(versions)
        rows.append([name, "", *costs, *cells, *([""] if has_paper else [])])
    return rows


def _paper_column(results: Results) -> list[str]:
    """Return the heading of the column with the paper's numbers, if the experiment has a paper."""
    return [PAPER_NUMBERS] if _is_of_a_paper(results.experiment) else []


def _version_column(results: Results) -> list[str]:
    """Return the heading of the column with versions of the code, if there are several."""
    return [_VERSION] if len(_versions(results.each())) > 1 else []


def _is_of_a_paper(experiment: Experiment) -> bool:
    return experiment.source != "famjax"


def _cost_columns(results: Results) -> Sequence[str]:
    """Return the headings of the costs; without FLOPs, which results of older code do not have."""
    has_flops = all(
        "flops" in result and ("base_tokens" in result) == ("base_flops" in result)
        for result in results.each()
    )
    return _COSTS if has_flops else _COSTS[:-1]


def _describe_costs(results: Results) -> str:
    costs = " and ".join(_cost_columns(results)[1:])
    of_base = ", including the base" if _has_base(results) else ""
    return f"{costs[0].upper()}{costs[1:]} are of training{of_base}."


def _has_base(results: Results) -> bool:
    return any("base_tokens" in result for result in results.each())


def _costs(results: Results, variant: Variant) -> list[str]:
    """Return the number of parameters, and the tokens and FLOPs of training with its base."""
    columns = _cost_columns(results)
    result = next(iter(results.by_variant.get(variant.name, {}).values()), None)
    if result is None:
        return ["-"] * len(columns)
    tokens = result["tokens"] + result.get("base_tokens", 0)
    flops = result.get("flops", 0) + result.get("base_flops", 0)
    cells = f"{result['parameters']:,}", f"{tokens:,}", f"{float(f'{flops / 1e12:.3g}'):,g}"
    return list(cells[: len(columns)])


def score_table(results: Results) -> Table:
    """Return the table of scores: means over seeds, half of 95% intervals, the paper's numbers."""
    scores = _shown_scores(results)
    version = _version_column(results)
    columns = ("model", "seeds", *version, *(s.name for s in scores), *_paper_column(results))
    title = f"{results.experiment.source}: {results.experiment.title}"
    papers = (len(columns) - 1,) if _is_of_a_paper(results.experiment) else ()
    table = Table(title, columns, words=(0, *papers))
    for row in _rows(results, scores):
        table.add_row(*row)
    return table


def _claim_columns(experiment: Experiment) -> list[str]:
    has_own = any(ordering.ours for ordering in experiment.orderings)
    claim = "the paper claims" if _is_of_a_paper(experiment) and not has_own else "claim"
    return [claim, "metric", "result here", "better by (95% interval)"]


def _claim(ordering: Ordering) -> str:
    how = "better than"
    if ordering.margin:
        how = "not worse than" if ordering.may_be_better else "as good as"
    claim = f"{ordering.better} is {how} {ordering.worse}"
    if ordering.wider_than:
        claim += f", by more than {' than '.join(ordering.wider_than)}"
    return f"{claim} (ours)" if ordering.ours else claim


def _verdict(results: Results, ordering: Ordering) -> list[str]:
    """Return the claim, the score, the verdict, and the difference with its interval."""
    score = results.experiment.score(ordering.score)
    judgement = results.judge(ordering)
    if judgement is None:
        return [_claim(ordering), score.name, "not run", ""]
    by = _difference(score, judgement.difference)
    if not np.isnan(judgement.low):
        by += f" ({_difference(score, judgement.low)} to {_difference(score, judgement.high)})"
    by += " points" if score.unit else ""
    if ordering.margin:
        by += f", margin {100 * ordering.margin if score.unit else ordering.margin:g}"
    return [_claim(ordering), score.name, judgement.verdict, by]


def _difference(score: Score, value: float) -> str:
    """Return a difference of a score with its sign; those of shares are in percentage points."""
    return f"{100 * value:+.1f}" if score.unit else f"{value:+.{score.digits}f}"


def ordering_table(results: Results) -> Table:
    """Return the table of claims, and whether each holds here."""
    columns = _claim_columns(results.experiment)
    table = Table("", columns, words=(0, 1, 2, 3))
    for ordering in results.experiment.orderings:
        table.add_row(*_verdict(results, ordering))
    return table


def plot(results: Results) -> Figure:
    """Plot what the paper plots, with intervals over seeds.

    With an axis, this is a line for each variant over the points of the measure, if it has points,
    or else the drawn scores over the variants' x, side by side in rows of three. Without an axis,
    it is a row for each variant.
    """
    experiment = results.experiment
    scores = [experiment.score(name) for name in experiment.drawn] or [experiment.scores[0]]
    height = 4 if experiment.axis else 1.2 + 0.35 * len(experiment.variants)
    columns, rows = min(len(scores), _PANELS), -(-len(scores) // _PANELS)
    size = (7 if len(scores) == 1 else 10, height * rows)
    figure, axes = new_figure(rows, columns, size)
    title = f"{experiment.source}, here: {experiment.title}"
    figure.suptitle(textwrap.fill(title, _TITLE_WIDTH), fontsize="medium")
    panels = np.ravel(axes)
    for panel in panels[len(scores) :]:
        panel.remove()
    panels = panels[: len(scores)]
    for panel in panels:
        panel.grid(alpha=0.3, axis="y" if experiment.axis else "both")
    if experiment.axis and experiment.measure.points:
        _draw_points(panels[0], results)
        return figure
    for panel, score in zip(panels, scores, strict=True):
        _draw_score(panel, results, score)
    return figure


def _draw_score(axes: Any, results: Results, score: Score) -> None:
    """Draw a score of all variants, over their x if the experiment has an axis."""
    experiment = results.experiment
    factor = 100 if score.unit else 1
    done = [variant for variant in experiment.variants if results.values(variant.name, score.name)]
    points = [
        np.multiply(factor, mean_and_interval(results.values(v.name, score.name))) for v in done
    ]
    label = f"{score.name}, %" if score.unit else score.name
    if experiment.axis:
        _draw_lines(axes, done, points, score.unit)
        axes.set(xlabel=experiment.axis, ylabel=label)
    else:
        _draw_rows(axes, [variant.name for variant in done], points, score.unit)
        axes.set_xlabel(label)


def _draw_rows(axes: Any, names: Sequence[str], points: Sequence[np.ndarray], unit: str) -> None:
    """Draw a point with its interval for each name, one below the other."""
    mean, half = np.array(points).T
    bars = _error_bars(mean, half, unit)
    axes.errorbar(mean, names, xerr=bars, fmt="o", capsize=3)
    axes.invert_yaxis()
    axes.margins(y=0.5 / len(names))


def _draw_points(axes: Any, results: Results) -> None:
    """Draw a line for each variant over the points of the measure."""
    experiment = results.experiment
    points = experiment.measure.points
    unit = experiment.score(next(iter(points))).unit
    count = len(experiment.variants)
    for number, variant in enumerate(experiment.variants, 1):
        later = count - number  # number of lines drawn over this one
        values = [results.values(variant.name, name) for name in points]
        if values[0]:
            line = np.array([mean_and_interval(each) for each in values]) * (100 if unit else 1)
            mean, half = line.T
            bars = _error_bars(mean, half, unit)
            x = list(points.values())
            # wider and larger than those drawn over it, so that equal ones stay visible
            look = {"marker": "o", "markersize": 5 + later, "linewidth": 1.5 + later / 2}
            bar_look = {"capsize": 3, "elinewidth": 1.5, "label": variant.name}
            axes.errorbar(x, mean, yerr=bars, **look, **bar_look)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(points.values()), list(points))
    axes.set(xlabel=experiment.axis, ylabel=unit or "")
    axes.legend()


def _error_bars(mean: np.ndarray, half: np.ndarray, unit: str) -> np.ndarray:
    """Return the lengths of the error bars below and above means [n], [2 n].

    Shares end at 0 and 100%, which Student's interval of a few seeds may exceed.
    """
    half = np.nan_to_num(half)
    if unit != "%":
        return np.stack([half, half])
    return np.stack([np.minimum(half, mean), np.minimum(half, 100 - mean)])


def _draw_lines(
    axes: Any, variants: Sequence[Variant], points: Sequence[np.ndarray], unit: str
) -> None:
    """Draw a line for each `line` of the variants, and a horizontal one for those without x."""
    lines = list(dict.fromkeys(variant.line for variant in variants if variant.x is not None))
    for line in lines:
        own = [
            (variant.x, *point)
            for variant, point in zip(variants, points, strict=True)
            if variant.x is not None and variant.line == line
        ]
        x, mean, half = np.array(own).T
        bars = _error_bars(mean, half, unit)
        axes.errorbar(x, mean, yerr=bars, marker="o", capsize=3, label=line or None)
    places = sorted({variant.x for variant in variants if variant.x is not None})
    if _is_geometric(places):
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [f"{x:g}" for x in places])
    elif places and min(places) > 0 and max(places) >= _FAR_APART * min(places):
        axes.set_xscale("log")
    elif places and len(places) <= _MAX_TICKS and all(x == round(x) for x in places):
        axes.set_xticks(places, [f"{x:g}" for x in places])
    level = [pair for pair in zip(variants, points, strict=True) if pair[0].x is None]
    for number, (variant, point) in enumerate(level, len(lines)):
        axes.axhline(point[0], linestyle=":", color=f"C{number}", label=variant.name)
    if len(lines) + len(level) > 1:
        axes.legend()


def _is_geometric(x: Sequence[float]) -> bool:
    """Return whether sorted x such as 8, 16, 32, 64 or 4, 16, 64 have equal ratios."""
    if len(x) < 2 or x[0] <= 0:
        return False
    ratio = x[1] / x[0]
    is_enough = any(len(x) >= count and ratio >= least for count, least in _EQUAL_RATIOS)
    return is_enough and bool(np.allclose(np.divide(x[1:], x[:-1]), ratio))


def make_page(results: Results, figure: str) -> str:
    """Return an experiment's page, in Markdown."""
    experiment, each = results.experiment, results.each()
    scores = experiment.scores
    seconds = sum(result["train_seconds"] + result["evaluation_seconds"] for result in each)
    seeds = max(map(len, results.by_variant.values()))
    lines = [
        f"# {experiment.source}: {experiment.title}",
        "",
        " ".join([f"    famjax reproduce {experiment.id} --seeds {seeds}", *results.options]),
        "",
        _notes(experiment),
        "",
        f"{len(each)} of {results.trainings} trainings, {format_time(seconds)} of process time"
        f"{' (without that of their bases)' if _has_base(results) else ''}, on "
        f"{each[0]['device']}, commit {', '.join(_versions(each))}. Means over seeds, ± half of "
        f"the 95% interval (Student's). {_describe_costs(results)}",
        "",
        _markdown(
            [
                *("model", "seeds", *_cost_columns(results), *_version_column(results)),
                *(score.name for score in scores),
                *_paper_column(results),
            ],
            _rows(results, scores, with_costs=True),
        ),
        "",
    ]
    if experiment.orderings:
        verdicts = [_verdict(results, ordering) for ordering in experiment.orderings]
        lines += [_markdown(_claim_columns(experiment), verdicts), ""]
    if experiment.follow_up:
        lines += ["## Follow-up", "", experiment.follow_up, ""]
    lines += [f"![{experiment.title}]({figure})", ""]
    return "\n".join(lines)


def _notes(experiment: Experiment) -> str:
    return f"{experiment.note} {experiment.unequal_parameters}".strip()


def _versions(each: Sequence[dict[str, Any]]) -> list[str]:
    """Return the versions of the code that made the results and their bases."""
    codes = {result.get(key) for result in each for key in ("code", "base_code")}
    return sorted(code for code in codes if code)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def write_index(pages: Path) -> None:
    """Write the page with links to the pages of the experiments."""
    lines = ["# Reproduced", "", "Results of `famjax reproduce`, one page per experiment.", ""]
    for experiment in EXPERIMENTS.values():
        for suffix, size in (("", ""), (_PAPER, ", at the paper's size")):
            page = f"{experiment.id}{suffix}.md"
            if (pages / page).exists():
                name = experiment.source if _is_of_a_paper(experiment) else experiment.id
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
    rows = [f"| {_claim(o)} | {experiment.score(o.score).name} |" for o in experiment.orderings]
    claims = sum(row not in page for row in rows)
    if not _has_table(experiment, page):
        lacks.append("with another table")
    if claims:
        lacks.append(f"without {claims} new {inflect(claims, 'claim', 'claims')}")
    _, _, follow_up = page.partition("\n## Follow-up\n\n")
    has_notes = f"\n{_notes(experiment)}\n" in page
    if not has_notes or follow_up.partition("\n")[0] != experiment.follow_up:
        lacks.append("with other notes")
    return lacks


def _has_table(experiment: Experiment, page: str) -> bool:
    """Return whether a page's table has the experiment's models, scores and numbers of the paper.

    Trivial baselines are not compared, since only results tell which there are.
    """
    _, _, table = page.partition("\n| model ")
    heading, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in f"| model {table}".partition("\n\n")[0].splitlines()
    ]
    has_paper = _is_of_a_paper(experiment)
    columns = [name for name in heading if name not in (*_COSTS, _VERSION)]
    scores = [score.name for score in experiment.scores]
    # a rule is below the heading, and baselines have no seeds
    models = [(row[0], row[-1] if has_paper else "") for row in rows[1:] if row[1]]
    expected = [(variant.name, _paper(experiment, variant)) for variant in experiment.variants]
    numbers = [PAPER_NUMBERS] if has_paper else []
    return columns == ["model", "seeds", *scores, *numbers] and models == expected
