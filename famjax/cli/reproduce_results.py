"""Results of an experiment's trainings, as `famjax reproduce` shows them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from famjax.core.errors import UserError
from famjax.reproduce.cell import Cell
from famjax.reproduce.experiment import Experiment, Ordering
from famjax.reproduce.judge import Judgement, judge
from famjax.reproduce.runner import read_result


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
    done = code_versions([result for result in results if result is not None])
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


def code_versions(each: Sequence[dict[str, Any]]) -> list[str]:
    """Return the versions of the code that made the results and their bases."""
    codes = {result.get(key) for result in each for key in ("code", "base_code")}
    return sorted(code for code in codes if code)
