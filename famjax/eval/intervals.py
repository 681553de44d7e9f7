"""Bootstrap confidence intervals over documents, of means and of differences between models."""

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
    """Return by how many bits per byte a model is worse than another, with a bootstrap interval.

    Documents are drawn with replacement, the same ones for both models, so that the difficulty of a
    document cancels. Empty documents are not drawn. Training seeds are not either: they are
    averaged.

    Args:
      nats: [documents], the model's loss summed over a document's tokens, averaged over seeds.
      other_nats: [documents], the same for the other model.
      size: [documents], sizes in bytes.
      samples: number of bootstrap samples.
      level: confidence level.

    Returns:
      the difference in bits per byte, and the ends of its interval, which are None if there is only
      one document.
    """
    difference = (nats - other_nats) / np.log(2)
    mean = float(difference.sum() / size.sum())
    difference, size = difference[size > 0], size[size > 0]
    if len(size) == 1:
        return mean, None, None
    rng = np.random.default_rng(0)
    # one sample at a time, so that memory does not grow with samples * documents
    means = []
    for _ in range(samples):
        drawn = rng.integers(len(size), size=len(size))
        means.append(difference[drawn].sum() / size[drawn].sum())
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return mean, float(low), float(high)


def ratio_interval(
    sums: np.ndarray, counts: np.ndarray, samples: int = 10_000, level: float = 0.95
) -> tuple[float, float, float]:
    """Return the mean of all values of n documents, and the ends of its bootstrap interval.

    The mean is over values, although documents may have different numbers of them. The bootstrap
    draws documents, each with all its values. If all documents have the same mean or the same
    number of values, this is `mean_interval` of their means.

    Args:
      sums, counts: [n], the sum and the number of each document's values.
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
    """Return the mean over sets of the means of `ratio_interval`, and the ends of its interval.

    The bootstrap draws documents within each set. If all samples are equal, the ends are those that
    `mean_interval` has for the same number of documents with equal values.

    Args:
      sets: for each set the sums and counts [n] of its n documents.
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

    A bootstrap of equal values has no width. The ends are then 1 - ((1 - level) / 2)^(1/n) from the
    mean, like the Clopper-Pearson bound for n successes out of n.
    """
    mean, tail = float(values.mean()), (1 - level) / 2
    if np.ptp(values) == 0:
        away = _distance(len(values), level)
        return mean, mean - away, mean + away
    rng = np.random.default_rng(0)
    # one sample at a time, so that memory does not grow with samples * documents
    means = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(samples)]
    low, high = np.quantile(means, [tail, 1 - tail])
    return mean, float(low), float(high)


def _distance(documents: int, level: float) -> float:
    """Return the distance from the mean to the ends for a number of documents of equal values."""
    return float(1 - ((1 - level) / 2) ** (1 / documents))
