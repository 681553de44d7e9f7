"""The Feedback Transformer (arXiv 2002.09402), token by token in float64 NumPy.

One sequence without a batch dimension; the only state is a list of memory vectors. Letters as in
`oracles.transformer`, and

    L  layers       tau  tokens that a token sees, itself not included       j  memories of a token

    z_t^l = Attn(x_t^l, {m_{t-tau}, ..., m_{t-1}})       m_t = sum_l softmax(w)_l x_t^l   (Eq. 1)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .transformer import Array, LayerWeights, f64, feed_forward, norm, rotate


@dataclass
class KeyWeights:
    """Projections that make keys and values of a memory for all layers (3.3)."""

    norm_scale: Array | None  # [d], or None: norms follow the residual sums
    norm_bias: Array | None  # [d], or None for RMSNorm
    wk: Array  # [d g e]
    wv: Array  # [d g e]


@dataclass
class Stack:
    """A stack's weights and hyperparameters.

    Attributes:
      layers: L of them; their wk and wv are not used where keys are shared.
      tau: tokens whose memory a token attends to.
      composition: how a memory is composed, see `compose`.
      keys: shared by all layers, or None: each has its own.
      logits: w of Equation 1, [j L+1], for the compositions that learn it.
      layer: of the composition "layer"; 0 is the embedding.
      distances: the vector of each distance from 1 to tau, [tau e], or None: positions are rotary.
      rope_base: for rotary positions.
      spans: tokens that each head of each layer sees, [L h], or None: all of tau.
      ramp: tokens over which the span mask decreases.
      pre_norm: norms before the sublayers, or after their residual sums.
    """

    layers: Sequence[LayerWeights]
    tau: int
    composition: str = "all"
    keys: KeyWeights | None = None
    logits: Array | None = None
    layer: int = 0
    distances: Array | None = None
    rope_base: float = 10_000.0
    spans: Array | None = None
    ramp: int = 32
    pre_norm: bool = True


@dataclass
class Memory:
    """Memories of the tokens so far: j vectors [d] for each token."""

    tokens: list[list[Array]] = field(default_factory=list)

    def of(self, s: int, layer: int) -> Array:
        """Return the memory of token s for `layer`."""
        memories = self.tokens[s]
        return memories[0] if len(memories) == 1 else memories[layer]


def softmax(scores: Any) -> Array:
    scores = f64(scores)
    powers = np.exp(scores - np.max(scores))
    return powers / np.sum(powers)


# memory


def _all(w: Stack, x: list[Array]) -> list[Array]:
    """Equation 1."""
    assert w.logits is not None
    shares = softmax(w.logits[0])
    return [sum((share * state for share, state in zip(shares, x, strict=True)), 0 * x[0])]


def _average(w: Stack, x: list[Array]) -> list[Array]:
    """v3 6.4: all states equally."""
    return [sum(x[1:], x[0]) / len(x)]


def _top(w: Stack, x: list[Array]) -> list[Array]:
    """v3 4.3.2: the last layer's output."""
    return [x[-1]]


def _layer(w: Stack, x: list[Array]) -> list[Array]:
    """v3 6.4: the output of one layer."""
    return [x[w.layer]]


def _same_and_lower(w: Stack, x: list[Array]) -> list[Array]:
    """v3 4.3.2, recurrent: layer l (from 0) remembers the states up to its own output, x[l + 1]."""
    assert w.logits is not None
    memories = []
    for layer in range(len(w.layers)):
        seen = x[: layer + 2]
        shares = softmax(w.logits[layer, : layer + 2])
        memories.append(sum((a * b for a, b in zip(shares, seen, strict=True)), 0 * x[0]))
    return memories


def _previous(w: Stack, x: list[Array]) -> list[Array]:
    """A Transformer: each layer remembers its input."""
    return x[:-1]


COMPOSITIONS = {
    "all": _all,
    "average": _average,
    "top": _top,
    "layer": _layer,
    "same_and_lower": _same_and_lower,
    "previous": _previous,
}


# one layer


def keys_values(w: Stack, i: int, memory: Array, position: int) -> tuple[Array, Array]:
    """Return what layer i attends to of one memory: [d] -> k [g e], v [g e]."""
    if w.keys is not None:
        scale, bias, wk, wv = w.keys.norm_scale, w.keys.norm_bias, w.keys.wk, w.keys.wv
    else:
        own = w.layers[i]
        scale, bias, wk, wv = own.norm1_scale, own.norm1_bias, own.wk, own.wv
    if w.pre_norm:
        assert scale is not None
        memory = norm(memory, scale, bias)
    k, v = np.einsum("d,dge->ge", memory, wk), np.einsum("d,dge->ge", memory, wv)
    return (k if w.distances is not None else rotate(k, position, w.rope_base)), v


def attend(w: Stack, i: int, x: Array, t: int, memory: Memory) -> Array:
    """Attn(x_t, {m_{t-tau}, ..., m_{t-1}}) of layer i, output projection included: [d] -> [d]."""
    own = w.layers[i]
    seen = range(max(0, t - w.tau), t)
    if not seen:
        return np.zeros_like(x)  # nothing to attend to
    q = np.einsum(
        "d,dhe->he", norm(x, own.norm1_scale, own.norm1_bias) if w.pre_norm else x, own.wq
    )
    if w.distances is None:
        q = rotate(q, t, w.rope_base)
    slots = [keys_values(w, i, memory.of(s, i), s) for s in seen]
    h, e = q.shape
    g = slots[0][0].shape[0]
    heads = np.zeros((h, e))
    for head in range(h):
        group = head // (h // g)
        scores = []
        for s, (k, _) in zip(seen, slots, strict=True):
            score = q[head] @ k[group]
            if w.distances is not None:
                score = score + q[head] @ w.distances[t - s - 1]
            scores.append(score / math.sqrt(e))
        weights = softmax(scores)
        if w.spans is not None:
            weights = faded(weights, seen, t, w.spans[i, head], w.ramp)
        for weight, (_, v) in zip(weights, slots, strict=True):
            heads[head] += weight * v[group]
    return np.einsum("he,hed->d", heads, own.wo)


def faded(weights: Array, seen: Sequence[int], t: int, z: float, ramp: int) -> Array:
    """Adaptive span (Sukhbaatar et al., 2019, Equations 3 and 4), applied after the softmax.

    m_z(x) = min(max((R + z - x) / R, 0), 1) of the distance x; the weights are then renormalized.
    """
    masked = f64(
        [
            min(max((ramp + z - (t - s)) / ramp, 0), 1) * a
            for s, a in zip(seen, weights, strict=True)
        ]
    )
    return masked / np.sum(masked)


def layer(w: Stack, i: int, x: Array, t: int, memory: Memory) -> Array:
    """x_t^i -> x_t^{i+1}: attention and feed-forward, each with its residual and its norm."""
    own = w.layers[i]
    z = attend(w, i, x, t, memory) + x
    if w.pre_norm:
        return feed_forward(own.mlp, norm(z, own.norm2_scale, own.norm2_bias)) + z
    z = norm(z, own.norm1_scale, own.norm1_bias)
    return norm(feed_forward(own.mlp, z) + z, own.norm2_scale, own.norm2_bias)


def stack(w: Stack, xs: Array) -> tuple[Array, Memory]:
    """[t d] -> [t d] and the memory of all tokens, without a final norm."""
    memory, ys = Memory(), []
    for t, x in enumerate(f64(xs)):
        states = [x]
        for i in range(len(w.layers)):
            states.append(layer(w, i, states[-1], t, memory))
        memory.tokens.append(COMPOSITIONS[w.composition](w, states))
        ys.append(states[-1])
    return np.stack(ys), memory
