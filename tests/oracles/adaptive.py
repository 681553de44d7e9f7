"""Adaptive input (arXiv 1809.10853) and softmax (arXiv 1609.04309), token by token in NumPy.

A cluster is {"table": [s c], "projection": [c d] or None}; token ids continue across clusters.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray


def embed(clusters: list[Any], token: int) -> Array:
    """Embed one token: [d]."""
    for cluster in clusters:
        if token < len(cluster["table"]):
            return cluster["table"][token] @ cluster["projection"]
        token -= len(cluster["table"])
    raise ValueError("beyond the vocabulary")


def log_softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    total = top + math.log(sum(math.exp(s - top) for s in scores))
    return [s - total for s in scores]


def log_probs(clusters: list[Any], entries: Array, x: Array) -> Array:
    """Return log p of every token [v], of one normalized x [d]; entries [d n]."""
    first, *tails = clusters
    scores = [float(row @ x) for row in first["table"]]
    scores += [float(entries[:, i] @ x) for i in range(len(tails))]
    head = log_softmax(scores)
    found = head[: len(first["table"])]
    for i, tail in enumerate(tails):
        of_cluster = head[len(first["table"]) + i]
        narrow = tail["projection"] @ x
        found += [of_cluster + p for p in log_softmax([float(r @ narrow) for r in tail["table"]])]
    return np.array(found)
