"""Tables of `famjax reproduce`: scores beside the paper's, and whether its claims hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from famjax.cli.reproduce_results import Results, code_versions
from famjax.cli.tables import PAPER_NUMBERS, Table
from famjax.reproduce.experiment import Experiment, Ordering, Score, Variant
from famjax.reproduce.judge import mean_and_interval

# maximum number of scores that a table in a terminal shows
_SHOWN = 4
# columns that only the table of a page has
_COSTS = ("parameters", "tokens", "TFLOP")
# heading of the column with versions of the code
_VERSION = "commit"


def score_table(results: Results, is_page: bool = False) -> Table:
    """Return the table of scores: means over seeds, half of 95% intervals, the paper's numbers.

    Args:
      is_page: whether it is for a page, with all scores and the costs of training, or for a
        terminal, with the first scores alone.
    """
    experiment = results.experiment
    scores = experiment.scores if is_page else experiment.scores[:_SHOWN]
    costs = _cost_columns(results) if is_page else ()
    has_paper = is_of_a_paper(experiment)
    has_versions = len(code_versions(results.each())) > 1
    columns = (
        *("model", "seeds", *costs, *((_VERSION,) if has_versions else ())),
        *(score.name for score in scores),
        *((PAPER_NUMBERS,) if has_paper else ()),
    )
    title = f"{experiment.source}: {experiment.title}"
    table = Table(title, columns, words=(0, len(columns) - 1) if has_paper else (0,))
    for variant in experiment.variants:
        own = results.by_variant.get(variant.name, {})
        values = [results.values(variant.name, score.name) for score in scores]
        table.add_row(
            variant.name,
            str(len(own)),
            *(_costs(results, variant) if is_page else []),
            *([", ".join(code_versions(list(own.values())))] if has_versions else []),
            *(_format(score, each) for score, each in zip(scores, values, strict=True)),
            *([_paper_numbers(experiment, variant)] if has_paper else []),
        )
    for name, row in results.baselines().items():
        cells = [score.format(row[score.name]) if score.name in row else "" for score in scores]
        table.add_row(name, "", *[""] * (len(costs) + has_versions), *cells)
    return table


def _format(score: Score, values: Sequence[float]) -> str:
    """Return a mean and half of its 95% interval over seeds, such as "12.3% ± 1.2"."""
    if not values:
        return "-"
    mean, half = mean_and_interval(values)
    if np.isnan(half):
        return score.format(mean)
    return f"{score.format(mean)} ± {score.format(half).rstrip('%')}"


def _paper_numbers(experiment: Experiment, variant: Variant) -> str:
    """Return the paper's numbers as text, such as "XLSum 15.9%"."""
    return ", ".join(
        f"{name} {100 * value:.1f}%" if experiment.paper_unit(name) else f"{name} {value:g}"
        for name, value in variant.paper.items()
    )


def is_of_a_paper(experiment: Experiment) -> bool:
    return experiment.source != "famjax"


def _cost_columns(results: Results) -> Sequence[str]:
    """Return the headings of the costs; without FLOPs, which results of older code do not have."""
    has_flops = all(
        "flops" in result and ("base_tokens" in result) == ("base_flops" in result)
        for result in results.each()
    )
    return _COSTS if has_flops else _COSTS[:-1]


def has_base(results: Results) -> bool:
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


def ordering_table(results: Results) -> Table:
    """Return the table of claims, and whether each holds here."""
    columns = _claim_columns(results.experiment)
    table = Table("", columns, words=(0, 1, 2, 3))
    for ordering in results.experiment.orderings:
        table.add_row(*_verdict(results, ordering))
    return table


def _claim_columns(experiment: Experiment) -> list[str]:
    has_own = any(ordering.ours for ordering in experiment.orderings)
    claim = "the paper claims" if is_of_a_paper(experiment) and not has_own else "claim"
    return [claim, "metric", "result here", "better by (95% interval)"]


def claim(ordering: Ordering) -> str:
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
        return [claim(ordering), score.name, "not run", ""]
    by = _difference(score, judgement.difference)
    if not np.isnan(judgement.low):
        by += f" ({_difference(score, judgement.low)} to {_difference(score, judgement.high)})"
    by += " points" if score.unit else ""
    if ordering.margin:
        by += f", margin {100 * ordering.margin if score.unit else ordering.margin:g}"
    return [claim(ordering), score.name, judgement.verdict, by]


def _difference(score: Score, value: float) -> str:
    """Return a difference of a score with its sign; those of shares are in percentage points."""
    return f"{100 * value:+.1f}" if score.unit else f"{value:+.{score.digits}f}"


def describe_costs(results: Results) -> str:
    costs = " and ".join(_cost_columns(results)[1:])
    of_base = ", including the base" if has_base(results) else ""
    return f"{costs[0].upper()}{costs[1:]} are of training{of_base}."


def has_table(experiment: Experiment, page: str) -> bool:
    """Return whether a page's table has the experiment's models, scores and numbers of the paper.

    Trivial baselines are not compared, since only results tell which there are.
    """
    _, _, table = page.partition("\n| model ")
    heading, *rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in f"| model {table}".partition("\n\n")[0].splitlines()
    ]
    has_paper = is_of_a_paper(experiment)
    columns = [name for name in heading if name not in (*_COSTS, _VERSION)]
    scores = [score.name for score in experiment.scores]
    # a rule is below the heading, and baselines have no seeds
    models = [(row[0], row[-1] if has_paper else "") for row in rows[1:] if row[1]]
    expected = [(each.name, _paper_numbers(experiment, each)) for each in experiment.variants]
    numbers = [PAPER_NUMBERS] if has_paper else []
    return columns == ["model", "seeds", *scores, *numbers] and models == expected
