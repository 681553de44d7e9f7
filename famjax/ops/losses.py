"""Losses on logits."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from famjax.core.sharding import (
    TOKENS,
    device,
    row_shards,
    sequence_shards,
    with_logical_constraint,
)
from famjax.core.types import Array

# what the logits of one piece may take on a device, in float32
LOGITS_BYTES = 64 * 2**20
# ... of an accelerator: a piece of fewer tokens would wait for the table of words to be read
ACCELERATOR_LOGITS_BYTES = 512 * 2**20


def chosen(logits: Array, index: Array) -> Array:
    """Return logits[index]: [... v], [...] -> [...]; 0 where the index is beyond them.

    A masked sum rather than a gather, so that there is no scatter in the gradient.
    """
    return jnp.where(jnp.arange(logits.shape[-1]) == index[..., None], logits, 0).sum(-1)


def token_losses(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Return -log softmax(logits)[target] in nats, and whether no logit exceeds the target's.

    Args:
      logits: [... v]; targets: [...].

    Returns:
      Two [...], float and bool.
    """
    logit = chosen(logits, targets)
    # a maximum rather than an argmax: no index
    return jax.nn.logsumexp(logits, axis=-1) - logit, logit >= logits.max(-1)


def chunked_cross_entropy(
    score: Callable[[Array, Array], tuple[Array, Array]], x: Array, targets: Array, v: int
) -> tuple[Array, Array]:
    """Return score(x, targets), in pieces of tokens whose [b t v] logits are not too large.

    The logits of all tokens are never there at once, neither forward nor backward, which computes
    each piece again. What fits is one piece, and no loop.

    Args:
      score: x [b t d], targets [b t] -> two [b t]; each token by itself.
      v: logits of a token.
    """
    b, t = targets.shape
    parts = sequence_shards(t)
    # of a device: its rows, and its part of the tokens
    count = pieces(b // row_shards(b), t // parts, v)
    x = with_logical_constraint(x, TOKENS)
    if count == 1:
        return score(x, targets)

    # by time, and not by rows, which may lie on different devices; where devices share the tokens,
    # a piece has some of each
    def cut(a: Array) -> Array:
        a = a.reshape(b, parts, count, -1, *a.shape[2:])
        return jnp.moveaxis(a, 2, 0).reshape(count, b, -1, *a.shape[4:])

    def joined(a: Array) -> Array:
        return jnp.moveaxis(a.reshape(count, b, parts, -1), 0, 2).reshape(b, t)

    def score_rows(x: Array, targets: Array) -> tuple[Array, Array]:
        return score(
            with_logical_constraint(x, TOKENS), with_logical_constraint(targets, TOKENS[:2])
        )

    # in a loop XLA cannot merge what is computed twice
    again = jax.checkpoint(score_rows, prevent_cse=False)
    nats, right = jax.lax.map(lambda piece: again(*piece), (cut(x), cut(targets)))
    return joined(nats), joined(right)


def pieces(b: int, t: int, v: int) -> int:
    """Return the least divisor of t whose pieces fit, or t, if not even one token of each row.

    Args:
      b: rows on a device.
    """
    most = LOGITS_BYTES if device().platform == "cpu" else ACCELERATOR_LOGITS_BYTES
    fits = (n for n in range(1, t + 1) if t % n == 0 and b * (t // n) * v * 4 <= most)
    return next(fits, t)
