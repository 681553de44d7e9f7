"""Intervals of differences between models that were evaluated on the same documents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def paired_interval(
    nats: np.ndarray,
    other_nats: np.ndarray,
    size: np.ndarray,
    samples: int = 10_000,
    level: float = 0.95,
) -> tuple[float, float | None, float | None]:
    """Return by how many bits per byte a model is worse than another.

    The interval is a bootstrap over documents.

    Documents are drawn with replacement, the same for both models, so that what makes a document
    hard cancels. Seeds of training are not drawn: they are averaged.

    Args:
      nats: [documents], the sum over a document's tokens, averaged over seeds.
      other_nats: [documents], of the other model.
      size: [documents], bytes.
      samples: draws.
      level: of confidence.

    Returns:
      the difference in bits per byte, and the ends of its interval; one document has none.
    """
    difference = (nats - other_nats) / np.log(2)
    if len(size) == 1:
        return float(difference[0] / size[0]), None, None
    rng = np.random.default_rng(0)
    # one sample at a time, so that many documents take no more memory
    means = []
    for _ in range(samples):
        drawn = rng.integers(len(size), size=len(size))
        means.append(difference[drawn].sum() / size[drawn].sum())
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(difference.sum() / size.sum()), float(low), float(high)


def ratio_interval(
    sums: np.ndarray, counts: np.ndarray, samples: int = 10_000, level: float = 0.95
) -> tuple[float, float, float]:
    """Return the mean of all values of n documents, and the ends of its bootstrap interval.

    Documents are drawn, each with all its values, so that the mean is that of the values however
    many a document has. Equal means have the ends of `mean_interval`.

    Args:
      sums, counts: [n], of the values of each document.
    """
    means = sums / counts
    if np.ptp(means) == 0 or np.ptp(counts) == 0:
        return mean_interval(means, samples, level)
    rng, tail = np.random.default_rng(0), (1 - level) / 2
    drawn = []
    for _ in range(samples):
        rows = rng.integers(len(sums), size=len(sums))
        drawn.append(sums[rows].sum() / counts[rows].sum())
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return float(sums.sum() / counts.sum()), float(low), float(high)


def mean_of_ratios(
    sets: Sequence[tuple[np.ndarray, np.ndarray]], samples: int = 10_000, level: float = 0.95
) -> tuple[float, float, float]:
    """Return the mean over sets of `ratio_interval`'s means, and the ends of its interval.

    Documents are drawn within each set. If that changes nothing, the ends are as far away as those
    of `mean_interval` for as many documents of equal values.

    Args:
      sets: sums and counts [n] of the n documents of each.
    """
    if len(sets) == 1:
        return ratio_interval(*sets[0], samples, level)
    rng, tail = np.random.default_rng(0), (1 - level) / 2
    drawn = np.zeros(samples)
    for sums, counts in sets:
        for i in range(samples):
            rows = rng.integers(len(sums), size=len(sums))
            drawn[i] += sums[rows].sum() / counts[rows].sum() / len(sets)
    mean = float(np.mean([sums.sum() / counts.sum() for sums, counts in sets]))
    if np.allclose(drawn, mean, rtol=0, atol=1e-12):
        away = _distance(sum(len(sums) for sums, _ in sets), level)
        return mean, mean - away, mean + away
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return mean, float(low), float(high)


def mean_interval(
    values: np.ndarray, samples: int = 10_000, level: float = 0.95
) -> tuple[float, float, float]:
    """Return the mean of values [n] of n documents, and the ends of its bootstrap interval.

    Equal values have none: the ends are then as far away as those of Clopper and Pearson are for n
    successes of n, 1 - ((1 - level) / 2)^(1/n).
    """
    mean, tail = float(values.mean()), (1 - level) / 2
    if np.ptp(values) == 0:
        away = _distance(len(values), level)
        return mean, mean - away, mean + away
    rng = np.random.default_rng(0)
    # one at a time, so that many documents take no more memory
    means = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(samples)]
    low, high = np.quantile(means, [tail, 1 - tail])
    return mean, float(low), float(high)


def _distance(documents: int, level: float) -> float:
    """Return how far the ends are from the mean of so many documents of equal values."""
    return float(1 - ((1 - level) / 2) ** (1 / documents))
