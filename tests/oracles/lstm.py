"""The LSTM, token by token and unit by unit in float64 NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def token(w: Any, x: Array, h: Array, c: Array) -> tuple[Array, Array]:
    """One layer, one token: [d] -> h, c [d].

    w: {"input": [d 4 d], "hidden": [d 4 d], "bias": [4 d]}.
    """
    new_h, new_c = np.zeros_like(h), np.zeros_like(c)
    for k in range(len(h)):
        i, f, g, o = (
            x @ w["input"][:, gate, k] + h @ w["hidden"][:, gate, k] + w["bias"][gate, k]
            for gate in range(4)
        )
        new_c[k] = sigmoid(f) * c[k] + sigmoid(i) * math.tanh(g)
        new_h[k] = sigmoid(o) * math.tanh(new_c[k])
    return new_h, new_c


def stack(layers: list[Any], xs: Array) -> tuple[Array, Array, Array]:
    """[t d] -> [t d], and h and c of every layer [l d] after the last token."""
    h, c = np.zeros((2, len(layers), xs.shape[1]))
    ys = []
    for x in np.asarray(xs, np.float64):
        for i, w in enumerate(layers):
            h[i], c[i] = token(w, x, h[i], c[i])
            x = h[i]
        ys.append(x.copy())
    return np.array(ys), h, c
