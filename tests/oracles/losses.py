"""Cross-entropy with label smoothing (Szegedy et al., 2016, arXiv 1512.00567, 7), in NumPy.

The target of a token is not one word but the distribution q: the share `smoothing` is spread over
the vocabulary, the right word included, as in PyTorch's `cross_entropy(label_smoothing=...)`.
"""

from __future__ import annotations

import numpy as np

from .adaptive import log_softmax

Array = np.ndarray


def target_distribution(target: int, v: int, smoothing: float) -> Array:
    """q(k) = (1 - smoothing) [k = target] + smoothing / v: [v]."""
    q = np.full(v, smoothing / v)
    q[target] += 1 - smoothing
    return q


def loss(logits: Array, target: int, smoothing: float) -> float:
    """-sum over k of q(k) log p(k), of one token's logits [v]."""
    q = target_distribution(target, len(logits), smoothing)
    return -sum(
        float(share) * log_p for share, log_p in zip(q, log_softmax(list(logits)), strict=True)
    )


def gradient(logits: Array, target: int, smoothing: float) -> Array:
    """p - q, the derivative by the logits: [v]."""
    p = np.exp(log_softmax(list(logits)))
    return p - target_distribution(target, len(logits), smoothing)
