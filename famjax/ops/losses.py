"""Losses on logits."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from famjax.core.sharding import sequence_parts, spread
from famjax.core.types import Array

# what the logits of one piece may take, in float32, all devices together
LOGITS_BYTES = 64 * 2**20


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


def in_pieces(
    score: Callable[[Array, Array], tuple[Array, Array]], x: Array, targets: Array, v: int
) -> tuple[Array, Array]:
    """Return score(x, targets), in pieces of tokens whose [b t v] logits take `LOGITS_BYTES`.

    The logits of all tokens are never there at once, neither forward nor backward, which computes
    each piece again. What fits is one piece, and no loop.

    Args:
      score: x [b t d], targets [b t] -> two [b t]; each token by itself.
      v: logits of a token.
    """
    b, t = targets.shape
    parts = sequence_parts(t)
    count = pieces(b * parts, t // parts, v)
    x = spread(x)
    if count == 1:
        return score(x, targets)

    # by time, and not by rows, which may lie on different devices; where devices share the tokens,
    # a piece has some of each
    def cut(a: Array) -> Array:
        a = a.reshape(b, parts, count, -1, *a.shape[2:])
        return jnp.moveaxis(a, 2, 0).reshape(count, b, -1, *a.shape[4:])

    def joined(a: Array) -> Array:
        return jnp.moveaxis(a.reshape(count, b, parts, -1), 0, 2).reshape(b, t)

    # in a loop XLA cannot merge what is computed twice
    again = jax.checkpoint(score, prevent_cse=False)
    given = (cut(x), cut(targets))
    nats, right = jax.lax.map(lambda piece: again(spread(piece[0]), piece[1]), given)
    return joined(nats), joined(right)


def pieces(b: int, t: int, v: int) -> int:
    """Return the least divisor of t whose pieces fit, or t, if not even one token of each row."""
    fits = (n for n in range(1, t + 1) if t % n == 0 and b * (t // n) * v * 4 <= LOGITS_BYTES)
    return next(fits, t)
