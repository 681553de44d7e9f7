"""Bootstrap confidence intervals over documents, of means and of differences between models."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

_SAMPLES = 10_000
# probability that a sample is below the interval, whose confidence level is 95%
_TAIL = (1 - 0.95) / 2


def paired_interval(
    nll: np.ndarray, other_nll: np.ndarray, size: np.ndarray, samples: int = _SAMPLES
) -> tuple[float, float | None, float | None]:
    """Return by how many bits per byte a model is worse than another, with a bootstrap interval.

    Documents are drawn with replacement, the same ones for both models, so that the difficulty of a
    document cancels. Empty documents are not drawn. Training seeds are not either: they are
    averaged.

    Args:
      nll: [documents], the model's loss in nats, summed over a document's tokens, averaged over
        seeds.
      other_nll: [documents], the same for the other model.
      size: [documents], sizes in bytes.
      samples: number of bootstrap samples.

    Returns:
      the difference in bits per byte, and the ends of its interval, which are None if there is only
      one document.
    """
    difference = (nll - other_nll) / np.log(2)
    mean = float(difference.sum() / size.sum())
    difference, size = difference[size > 0], size[size > 0]
    if len(size) == 1:
        return mean, None, None
    rng = np.random.default_rng(0)
    return mean, *_ends(_draw_ratios(rng, difference, size, samples))


def ratio_interval(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float, float]:
    """Return the mean of all values of n documents, and the ends of its bootstrap interval.

    The mean is over values, although documents may have different numbers of them. The bootstrap
    draws documents, each with all its values. If all documents have the same mean or the same
    number of values, this is `mean_interval` of their means.

    Args:
      sums, counts: [n], the sum and the number of each document's values.
    """
    means = sums / counts
    if np.ptp(means) == 0 or np.ptp(counts) == 0:
        return mean_interval(means)
    drawn = _draw_ratios(np.random.default_rng(0), sums, counts)
    return float(sums.sum() / counts.sum()), *_ends(drawn)


def mean_of_ratios(sets: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[float, float, float]:
    """Return the mean over sets of the means of `ratio_interval`, and the ends of its interval.

    The bootstrap draws documents within each set. If all samples are equal, the ends are those that
    `mean_interval` has for the same number of documents with equal values.

    Args:
      sets: for each set the sums and counts [n] of its n documents.
    """
    if len(sets) == 1:
        return ratio_interval(*sets[0])
    rng = np.random.default_rng(0)
    drawn = np.zeros(_SAMPLES)
    for sums, counts in sets:
        drawn += _draw_ratios(rng, sums, counts) / len(sets)
    mean = float(np.mean([sums.sum() / counts.sum() for sums, counts in sets]))
    if np.allclose(drawn, mean, rtol=0, atol=1e-12):
        away = _distance(sum(len(sums) for sums, _ in sets))
        return mean, mean - away, mean + away
    return mean, *_ends(drawn)


def mean_interval(values: np.ndarray) -> tuple[float, float, float]:
    """Return the mean of values [n] of n documents, and the ends of its bootstrap interval.

    A bootstrap of equal values has no width. The ends are then 1 - 0.025^(1/n) from the mean, like
    the Clopper-Pearson bound for n successes out of n.
    """
    mean = float(values.mean())
    if np.ptp(values) == 0:
        away = _distance(len(values))
        return mean, mean - away, mean + away
    rng = np.random.default_rng(0)
    return mean, *_ends(_bootstrap(rng, len(values), lambda rows: values[rows].mean()))


def _draw_ratios(
    rng: np.random.Generator, sums: np.ndarray, counts: np.ndarray, samples: int = _SAMPLES
) -> np.ndarray:
    """Return a bootstrap of the ratio of two sums over documents, [n] each: [samples]."""
    return _bootstrap(rng, len(sums), lambda rows: sums[rows].sum() / counts[rows].sum(), samples)


def _bootstrap(
    rng: np.random.Generator,
    documents: int,
    statistic: Callable[[np.ndarray], np.floating],
    samples: int = _SAMPLES,
) -> np.ndarray:
    """Return a statistic of documents that are drawn with replacement: [samples].

    Args:
      statistic: function of the indices [documents] of the documents drawn.
    """
    # one sample at a time, so that memory does not grow with samples * documents
    return np.array([statistic(rng.integers(documents, size=documents)) for _ in range(samples)])


def _ends(drawn: np.ndarray) -> tuple[float, float]:
    """Return the ends of the interval of a bootstrap's samples."""
    low, high = np.quantile(drawn, [_TAIL, 1 - _TAIL])
    return float(low), float(high)


def _distance(documents: int) -> float:
    """Return the distance from the mean to the ends for a number of documents of equal values."""
    return float(1 - _TAIL ** (1 / documents))
