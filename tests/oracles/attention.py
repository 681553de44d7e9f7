"""Attention weights of every query, and their measures (T2R 4, A.2), in float64 NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import linear, transformer

Array = np.ndarray


def weights(w: transformer.LayerWeights, kind: str, hyper: dict[str, Any], x: Array) -> Array:
    """Return one layer's attention weights over a document [t d]: [h t t]."""
    t, similar = len(x), _similar(kind, hyper)
    rotated = kind != "linear" or hyper["rope"]
    read = [
        transformer.qkv(w, row, i if rotated else None, 10_000.0)
        for i, row in enumerate(transformer.f64(x))
    ]
    h, g = w.wq.shape[1], w.wk.shape[1]
    out = np.zeros((h, t, t))
    for i in range(h):
        j = i // (h // g)
        for a in range(t):
            seen = _seen(kind, hyper, a)
            scores = [similar(j, read[a][0][i], read[b][1][j]) for b in seen]
            floor = linear.EPS if kind == "linear" else 0
            out[i, a, seen] = np.array(scores) / max(sum(scores), floor)
    return out


def _similar(kind: str, hyper: dict[str, Any]) -> Callable[[int, Array, Array], float]:
    """Return the similarity of a query and a key of key head j: (j, [e], [e])."""
    if kind == "linear":
        phi = hyper["phi"]
        return lambda j, q, k: phi(j, q) @ phi(j, k)
    return lambda j, q, k: math.exp(q @ k / math.sqrt(len(q)))


def _seen(kind: str, hyper: dict[str, Any], t: int) -> list[int]:
    if kind == "swa":
        return list(range(max(0, t - hyper["window"] + 1), t + 1))
    if kind == "bswa":
        tau = t // hyper["block"]
        past = transformer.seen_in_memory(tau, hyper["block"], hyper["segments"])
        return past + list(range(tau * hyper["block"], t + 1))
    return list(range(t + 1))


def of_model(
    layers: Sequence[tuple[transformer.LayerWeights, str, dict[str, Any]]],
    prompt: Array | None,
    x: Array,
) -> list[Array | None]:
    """Return every layer's [h t t], None for FAM; x [t d] is the input of the first layer."""
    out: list[Array | None] = []
    for i, (w, kind, hyper) in enumerate(layers):
        before, _ = transformer.stack(layers[:i], prompt, x)
        out.append(None if kind == "fam" else weights(w, kind, hyper, before))
    return out


def entropy(row: Array) -> float:
    """Return the entropy of one query's weights, which should sum to 1; NaN otherwise."""
    if (row < 0).any() or row.sum() == 0:
        return math.nan
    return -sum(p * math.log(p) for p in row / row.sum() if p > 0)


def distance(row: Array, other: Array) -> float:
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(row, other, strict=True)))
