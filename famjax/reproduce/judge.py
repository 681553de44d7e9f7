"""Judgement of whether an ordering of the paper holds, by paired differences over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy import stats

Verdict = Literal["holds", "does not hold", "inconclusive"]


class Judgement(NamedTuple):
    """The evidence of the seeds on an ordering.

    Attributes:
      verdict: whether the ordering holds, by the interval.
      difference: by how much the model claimed to be better is better, mean over seeds.
      low, high: ends of the difference's 95% interval; NaN for a single seed.
    """

    verdict: Verdict
    difference: float
    low: float
    high: float


def mean_and_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean over seeds, and half the width of Student's 95% interval (NaN for one)."""
    if len(values) < 2:
        return float(np.mean(values)), float("nan")
    quantile = stats.t.ppf(0.975, len(values) - 1)
    return float(np.mean(values)), float(quantile * np.std(values, ddof=1) / len(values) ** 0.5)


def judge(
    better: Sequence[float],
    worse: Sequence[float],
    higher_is_better: bool,
    margin: float = 0.0,
    may_be_better: bool = False,
) -> Judgement:
    """Judge whether a model is better than another, or as good.

    Scores are compared between equal seeds. These share the order of the data, except where one
    model continues a base and the other does not. Without a margin the
    claim "better" holds, or does not hold, if the 95% interval of the mean difference is above, or
    below, 0. With a margin the claim "as good" holds if the interval lies within the margin, and
    does not hold if it lies outside; with `may_be_better`, the margin only limits by how much the
    first model may be worse. Otherwise the result is inconclusive. A single seed has no interval.

    Args:
      better, worse: scores of the two models by seed, in the same order.
      higher_is_better: whether a higher score is better.
      margin, may_be_better: see `famjax.reproduce.experiment.Ordering`.
    """
    sign = 1.0 if higher_is_better else -1.0
    differences = sign * (np.array(better) - np.array(worse))
    mean, half = mean_and_interval(differences.tolist())
    low, high = mean - half, mean + half
    if margin:
        limit = np.inf if may_be_better else margin
        holds, fails = -margin < low and high < limit, low > limit or high < -margin
    else:
        holds, fails = low > 0, high < 0
    verdict: Verdict = "holds" if holds else "does not hold" if fails else "inconclusive"
    return Judgement(verdict, mean, low, high)
