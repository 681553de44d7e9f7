"""An encoder and decoders with cross attention, token by token in float64 NumPy.

One source [s d] and one target [t d], embedded. Letters as in `oracles.transformer`. A decoder
layer attends to the tokens before, then to the source, then has its feed-forward (Vaswani et al.,
2017, 3.1); linear cross attention is T2R's (arXiv 2103.13076, 3.2.2 with Equations 4 and 5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import feedback, linear
from .transformer import Array, LayerWeights, attend, f64, feed_forward, norm, qkv


@dataclass
class Layer:
    """A decoder layer: its own weights, and those of cross attention.

    `phi` is that of linear cross attention, and `causal_phi` that of linear attention to the tokens
    before; None is softmax.
    """

    own: LayerWeights
    cross: LayerWeights  # norm1, wq, wk, wv and wo
    phi: linear.Phi | None = None
    causal_phi: linear.Phi | None = None


def sinusoids(positions: int, width: int, halves: bool = False) -> Array:
    """Return the vectors of the first positions [t d] (Vaswani et al., 2017, 3.5).

    With `halves` component i is the sine of pair i for i < d/2, and the cosine of pair i - d/2
    after that (Marian).
    """
    out = np.zeros((positions, width))
    for position in range(positions):
        for pair in range(width // 2):
            angle = position / 10_000 ** (2 * pair / width)
            at = (pair, pair + width // 2) if halves else (2 * pair, 2 * pair + 1)
            out[position, list(at)] = math.sin(angle), math.cos(angle)
    return out


def sublayer(scale: Array, bias: Array | None, pre_norm: bool, x: Array, y: Array) -> Array:
    """Return x + y, normed if norms follow the sums."""
    return x + y if pre_norm else norm(x + y, scale, bias)


def normed(scale: Array, bias: Array | None, pre_norm: bool, x: Array) -> Array:
    return norm(x, scale, bias) if pre_norm else x


def mlp(w: LayerWeights, pre_norm: bool, a: Array) -> Array:
    y = feed_forward(w.mlp, normed(w.norm2_scale, w.norm2_bias, pre_norm, a))
    return sublayer(w.norm2_scale, w.norm2_bias, pre_norm, a, y)


def encoder(
    layers: Sequence[LayerWeights],
    final: tuple[Array, Array | None] | None,
    x: Array,
    rotary: bool = True,
) -> Array:
    """Return the encoder's output; every token attends to all. Pre-norm has the `final` norm."""
    x, pre_norm = f64(x), final is not None
    for w in layers:
        read = [self_qkv(w, pre_norm, row, i if rotary else None) for i, row in enumerate(x)]
        keys, values = [k for _, k, _ in read], [v for _, _, v in read]
        out = []
        for (q, _, _), row in zip(read, x, strict=True):
            y = attend(w, q, keys, values)
            a = sublayer(w.norm1_scale, w.norm1_bias, pre_norm, row, y)
            out.append(mlp(w, pre_norm, a))
        x = np.stack(out)
    return x if final is None else np.stack([norm(row, *map(_array, final)) for row in x])


def _array(a: Array | None) -> Array | None:
    return None if a is None else f64(a)


def self_qkv(w: LayerWeights, pre_norm: bool, x: Array, position: int | None) -> tuple[Array, ...]:
    """QKV of one token at a position; without a norm before it if norms follow the sums.

    Without a position, queries and keys are not rotated.
    """
    if pre_norm:
        return qkv(w, x, position, 10_000.0)
    q, k, v = (np.einsum("d,dhe->he", x, a) for a in (w.wq, w.wk, w.wv))
    if position is None:
        return q, k, v
    return feedback.rotate(q, position, 10_000.0), feedback.rotate(k, position, 10_000.0), v


def cross(layer: Layer, pre_norm: bool, a: Array, source: Array) -> Array:
    """Return a token's output of cross attention, with the residual: [d] -> [d]."""
    w = layer.cross
    q = np.einsum("d,dhe->he", normed(w.norm1_scale, w.norm1_bias, pre_norm, a), w.wq)
    keys = [np.einsum("d,dge->ge", row, w.wk) for row in f64(source)]
    values = [np.einsum("d,dge->ge", row, w.wv) for row in f64(source)]
    y = attend_by(layer.phi, w, q, keys, values)
    return sublayer(w.norm1_scale, w.norm1_bias, pre_norm, a, y)


def attend_by(
    phi: linear.Phi | None, w: LayerWeights, q: Array, keys: list[Array], values: list[Array]
) -> Array:
    """Return the output of softmax attention, or of linear attention with `phi`: [d]."""
    if phi is None:
        return attend(w, q, keys, values)
    return np.einsum("he,hed->d", linear.attend(phi, q, keys, values), w.wo)


def decoder(
    layers: Sequence[Layer],
    pre_norm: bool,
    x: Array,
    source: Array,
    window: int = 10**9,
    rotary: bool = True,
) -> Array:
    """Return the decoder's output without a final norm; a token sees `window` tokens."""
    x = f64(x)
    for layer in layers:
        w = layer.own
        read = [self_qkv(w, pre_norm, row, i if rotary else None) for i, row in enumerate(x)]
        out = []
        for t, row in enumerate(x):
            seen = read[max(0, t - window + 1) : t + 1]
            keys, values = [k for _, k, _ in seen], [v for _, _, v in seen]
            y = attend_by(layer.causal_phi, w, read[t][0], keys, values)
            a = sublayer(w.norm1_scale, w.norm1_bias, pre_norm, row, y)
            out.append(mlp(w, pre_norm, cross(layer, pre_norm, a, source)))
        x = np.stack(out)
    return x


def feedback_decoder(w: feedback.Stack, layers: Sequence[Layer], x: Array, source: Array) -> Array:
    """Return the output of a Feedback Transformer with cross attention (v3 4.2.1)."""
    memory, ys = feedback.Memory(), []
    for t, row in enumerate(f64(x)):
        states = [row]
        for i, layer in enumerate(layers):
            own = layer.own
            y = feedback.attend(w, i, states[-1], t, memory)
            a = sublayer(own.norm1_scale, own.norm1_bias, w.pre_norm, states[-1], y)
            states.append(mlp(own, w.pre_norm, cross(layer, w.pre_norm, a, source)))
        memory.tokens.append(feedback.COMPOSITIONS[w.composition](w, states))
        ys.append(states[-1])
    return np.stack(ys)
