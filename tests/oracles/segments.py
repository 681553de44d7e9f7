"""RMT and AutoCompressors, segment by segment and token by token in float64 NumPy.

Letters as in `transformer`; one sequence, which may end in the middle of a segment.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .transformer import Array, LayerWeights, f64, norm, tokens_layer

Norm = tuple[Array, Array | None]


def transformer(
    layers: Sequence[LayerWeights], x: Array, seen: Sequence[Sequence[int]], base: float
) -> Array:
    """All layers, at positions 0, 1, ...; token t sees the tokens seen[t]. [t d] -> [t d]."""
    for w in layers:
        x = tokens_layer(w, x, seen, 0, base)
    return x


def normalized(x: Array, by: Norm) -> Array:
    return np.stack([norm(row, f64(by[0]), None if by[1] is None else f64(by[1])) for row in x])


def rmt(
    layers: Sequence[LayerWeights],
    memory_norm: Norm,
    first: Array,
    x: Array,
    *,
    segment: int,
    rope_base: float,
) -> tuple[Array, Array]:
    """Bulatov et al. 2022, 3.2: [memory, segment, memory] in each segment.

    A memory token sees all of its group; all else is causal.

    Args:
      first: [f d], the memory before the first segment.
      x: [t d].

    Returns:
      [t d], and the memory after the last whole segment.
    """
    memory, ys = f64(first), []
    f = len(memory)
    for start in range(0, len(x), segment):
        tokens = f64(x[start : start + segment])
        end = f + len(tokens)
        seen = [range(max(t + 1, f)) for t in range(end)] + [range(end + f)] * f
        y = transformer(layers, np.concatenate([memory, tokens, memory]), seen, rope_base)
        ys.append(y[f:end])
        if len(tokens) == segment:
            memory = normalized(y[end:], memory_norm)
    return np.concatenate(ys), memory


def autocompressor(
    layers: Sequence[LayerWeights],
    memory_norm: Norm,
    summary: Array,
    x: Array,
    *,
    segment: int,
    rope_base: float,
) -> tuple[Array, Array]:
    """Chevalier et al. 2023, 3.1: [all summaries so far, segment, summary tokens], causal.

    Args:
      summary: [f d], the summary tokens.
      x: [t d].

    Returns:
      [t d], and the summaries of all whole segments [n d].
    """
    summaries, ys = np.zeros((0, x.shape[1])), []
    for start in range(0, len(x), segment):
        tokens = f64(x[start : start + segment])
        first, end = len(summaries), len(summaries) + len(tokens)
        read = np.concatenate([summaries, tokens, f64(summary)])
        y = transformer(layers, read, [range(t + 1) for t in range(len(read))], rope_base)
        ys.append(y[first:end])
        if len(tokens) == segment:
            summaries = np.concatenate([summaries, normalized(y[end:], memory_norm)])
    return np.concatenate(ys), summaries
