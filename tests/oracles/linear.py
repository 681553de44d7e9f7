"""T2R's Equations 3 to 7 and its feature maps (2.2, 2.3, 3.1), token by token in float64 NumPy.

One sequence, sequentially by head. Constants that the paper does not give are those of the authors'
code: the minimum of the denominator, and the scale of features that may be negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray
# of key head j and x [e] -> phi(x) [k]
Phi = Callable[[int, Array], Array]

EPS = 1e-2
SMALL = 1e-2


def elu(x: Array) -> Array:
    return np.where(x > 0, x, np.exp(np.minimum(x, 0)) - 1)


def learned(activation: str, w: Array, b: Array) -> Phi:
    """Equation 3b, and other activations (note 4). w: [g e k], b: [g k]."""

    def phi(j: int, x: Array) -> Array:
        a = x @ w[j] + b[j]
        return {
            "relu": np.maximum(a, 0),
            "learned_elu": elu(a) + 1,
            "cos": SMALL * np.cos(a),
            "tanh": SMALL * np.tanh(a),
        }[activation]

    return phi


def elu_plus_one(j: int, x: Array) -> Array:
    """Katharopoulos et al., 2020."""
    return elu(x) + 1


def rfa(vectors: Array, tau: Array) -> Phi:
    """Peng et al., 2021: random features of x / |x|, with a temperature. vectors: [g e k/2]."""

    def phi(j: int, x: Array) -> Array:
        unit = x / math.sqrt(x @ x + 1e-6)
        products = [unit @ vectors[j][:, i] / tau[j] for i in range(vectors.shape[2])]
        return SMALL * np.array([*map(math.sin, products), *map(math.cos, products)])

    return phi


def performer(vectors: Array) -> Phi:
    """Choromanski et al., 2021: positive random features. vectors: [g e k]."""

    def phi(j: int, x: Array) -> Array:
        e, k = vectors.shape[1:]
        x = x / e**0.25
        features = [math.exp(vectors[j][:, i] @ x - x @ x / 2) + 1e-4 for i in range(k)]
        return np.array(features) / math.sqrt(k)

    return phi


def attend(phi: Phi, q: Array, keys: Sequence[Array], values: Sequence[Array]) -> Array:
    """Equation 4, its first line: q [h e], each key and value [g e] -> [h e]."""
    h, e = q.shape
    g = len(keys[0])
    out = np.zeros((h, e))
    for i in range(h):
        j = i // (h // g)
        similar = [phi(j, q[i]) @ phi(j, k[j]) for k in keys]
        for s, v in zip(similar, values, strict=True):
            out[i] += s * v[j] / max(sum(similar), EPS)
    return out


def state(phi: Phi, keys: Sequence[Array], values: Sequence[Array]) -> Array:
    """Equation 5: S after the last token, [g k e]."""
    heads = range(len(keys[0]))
    return np.stack(
        [
            sum(np.outer(phi(j, k[j]), v[j]) for k, v in zip(keys, values, strict=True))
            for j in heads
        ]
    )


def phi_of(kind: str, weights: Any, vectors: Array | None) -> Phi:
    """Return the feature map with this name in `model.linear.map`."""
    if kind == "elu":
        return elu_plus_one
    if kind == "rfa":
        return rfa(vectors, weights["tau"])
    if kind == "performer":
        return performer(vectors)
    return learned(kind, weights["kernel"], weights["bias"])
