"""Whether an ordering of the paper holds: paired differences over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy import stats

Verdict = Literal["holds", "does not hold", "cannot be told"]


class Judgement(NamedTuple):
    """What the seeds say of an ordering.

    Attributes:
      verdict: by the interval.
      difference: by how much the better one is better, the mean over seeds.
      low, high: ends of its interval; none of a single seed.
    """

    verdict: Verdict
    difference: float
    low: float
    high: float


def mean_and_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return the mean over seeds, and half of Student's interval around it; nan of one seed."""
    if len(values) < 2:
        return float(np.mean(values)), float("nan")
    quantile = stats.t.ppf((1 + level) / 2, len(values) - 1)
    return float(np.mean(values)), float(quantile * np.std(values, ddof=1) / len(values) ** 0.5)


def judge(
    better: Sequence[float],
    worse: Sequence[float],
    higher_is_better: bool,
    margin: float = 0.0,
    may_be_better: bool = False,
) -> Judgement:
    """Judge whether a model is better than another, or as good.

    Differences are those of equal seeds, which share the data's order. That one is better holds, or
    does not, where the 95% interval of their mean is on one side of 0. With a margin, that they are
    as good holds where the interval is within it, and does not where it is outside; only the side
    on which it is worse counts if it may be better. A single seed has no interval.

    Args:
      better, worse: scores by seed, in the same order.
      higher_is_better: of the score.
      margin, may_be_better: see `famjax.reproduce.experiment.Ordering`.
    """
    sign = 1.0 if higher_is_better else -1.0
    differences = sign * (np.array(better) - np.array(worse))
    mean, half = mean_and_interval(differences.tolist())
    low, high = mean - half, mean + half
    if margin:
        most = np.inf if may_be_better else margin
        holds, fails = -margin < low and high < most, low > most or high < -margin
    else:
        holds, fails = low > 0, high < 0
    verdict: Verdict = "holds" if holds else "does not hold" if fails else "cannot be told"
    return Judgement(verdict, mean, low, high)
