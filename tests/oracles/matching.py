"""The loss of `train.match`, token by token in float64 NumPy: softmax and linear attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import linear, transformer

Array = np.ndarray
BASE = 10_000.0


def errors(layers: Sequence[tuple[transformer.LayerWeights, str, Any]], x: Array) -> list[float]:
    """Each linear layer's sum |linear - softmax|^2 / sum |softmax|^2 over a row x [t d].

    layers: as in `transformer.stack`. Higher layers have the softmax outputs as inputs.
    """
    found = []
    for w, kind, hyper in layers:
        if kind == "linear":
            theirs, ours = softmax_heads(w, x), linear_heads(w, x, **hyper)
            found.append(float(np.square(ours - theirs).sum() / np.square(theirs).sum()))
            kind, hyper = "full", {}
        x, _ = transformer.stack([(w, kind, hyper)], None, x)
    return found


def softmax_heads(w: transformer.LayerWeights, x: Array) -> Array:
    """[t d] -> [t h e], before the output projection."""
    read = [transformer.qkv(w, row, t, BASE) for t, row in enumerate(x)]
    h, e = read[0][0].shape
    per_key = h // w.wk.shape[1]
    out = np.zeros((len(x), h, e))
    for t, (q, _, _) in enumerate(read):
        for i in range(h):
            j = i // per_key
            similar = [math.exp(q[i] @ k[j] / math.sqrt(e)) for _, k, _ in read[: t + 1]]
            for s, (_, _, v) in zip(similar, read, strict=False):
                out[t, i] += s / sum(similar) * v[j]
    return out


def linear_heads(w: transformer.LayerWeights, x: Array, phi: linear.Phi, rope: bool) -> Array:
    """[t d] -> [t h e], before the output projection."""
    read = [transformer.qkv(w, row, t if rope else None, BASE) for t, row in enumerate(x)]
    keys, values = [k for _, k, _ in read], [v for _, _, v in read]
    return np.stack(
        [linear.attend(phi, q, keys[: t + 1], values[: t + 1]) for t, (q, _, _) in enumerate(read)]
    )
