"""Cross-entropy from logits, and in chunks without all logits in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Integer, Shaped

from famjax.core.types import Array, PyTree
from famjax.parallel.sharding import TOKENS
from famjax.parallel.traced import (
    row_shards,
    sequence_shards,
    shard_map_rows,
    target_device,
    with_logical_constraint,
)

# maximum bytes of a chunk's float32 logits on a device
LOGITS_BYTES = 64 * 2**20
# ... on an accelerator, where smaller chunks are bound by reading the embedding table
ACCELERATOR_LOGITS_BYTES = 512 * 2**20

Scores = TypeVar("Scores", bound=tuple[Shaped[Array, "b t"], ...])


def select_logit(
    logits: Float[Array, "*lead v"], index: Integer[Array, "*lead"]
) -> Float[Array, "*lead"]:
    """Return logits[index]: [... v], [...] -> [...]; 0 where the index is out of bounds.

    A masked sum instead of a gather, so that the gradient has no scatter.
    """
    return jnp.where(jnp.arange(logits.shape[-1]) == index[..., None], logits, 0).sum(-1)


def token_losses(
    logits: Float[Array, "*lead v"], targets: Integer[Array, "*lead"]
) -> tuple[Float[Array, "*lead"], Bool[Array, "*lead"]]:
    """Return -log softmax(logits)[target] in nats, and whether no logit exceeds the target's.

    Args:
      logits: [... v].
      targets: [...].

    Returns:
      the losses [...]; bool [...].
    """
    logit = select_logit(logits, targets)
    # max instead of argmax: the index is not needed
    return jax.nn.logsumexp(logits, axis=-1) - logit, logit >= logits.max(-1)


def smoothed_token_losses(
    logits: Float[Array, "*lead v"], targets: Integer[Array, "*lead"], smoothing: float
) -> tuple[Float[Array, "*lead"], Bool[Array, "*lead"], Float[Array, "*lead"]]:
    """Return `token_losses`, and the losses with label smoothing (Szegedy et al., 2016, 7).

    The share `smoothing` of the target's probability is spread evenly over the vocabulary, the
    target included: (1 - smoothing) * -log p(target) + smoothing * mean over v of -log p, as in
    PyTorch. Since -log p is the log-sum minus the logit, this equals
    nll + smoothing * (target's logit - mean logit).

    Args:
      logits: [... v].
      targets: [...].

    Returns:
      the losses [...]; bool [...]; the losses with label smoothing [...].
    """
    nll, correct = token_losses(logits, targets)
    return nll, correct, nll + smoothing * (select_logit(logits, targets) - logits.mean(-1))


def chunked_cross_entropy(
    score: Callable[[PyTree, Array, Array], Scores],
    arrays: PyTree,
    x: Float[Array, "b t d"],
    targets: Integer[Array, "b t"],
    v: int,
) -> Scores:
    """Return score(arrays, x, targets), in chunks of tokens to limit the memory for logits.

    The logits [b t v] of all tokens are never in memory together; the backward pass rematerializes
    each chunk. If the logits of all tokens fit, there is one chunk and no loop.

    Args:
      score: arrays, x [b t d], targets [b t] -> a tuple of [b t]; independent for each token.
      arrays: what all tokens share: the embedding table, and others.
      v: vocabulary size.
    """
    b, t = targets.shape
    shards = sequence_shards(t)
    # per device: its rows, and its shard of the tokens
    count = num_chunks(b // row_shards(b), t // shards, v)
    x = with_logical_constraint(x, TOKENS)
    if count == 1:
        return score(arrays, x, targets)

    # chunks are along time, since rows may be sharded; if tokens are sharded, each chunk has tokens
    # of every shard
    def split_chunks(a: Array) -> Array:
        a = a.reshape(len(a), shards, count, -1, *a.shape[2:])
        return jnp.moveaxis(a, 2, 0).reshape(count, a.shape[0], -1, *a.shape[4:])

    def join_chunks(a: Array) -> Array:
        a = a.reshape(count, a.shape[1], shards, -1)
        return jnp.moveaxis(a, 0, 2).reshape(a.shape[1], t)

    def score_chunk(arrays: PyTree, x: Array, targets: Array) -> Scores:
        x = with_logical_constraint(x, TOKENS)
        return score(arrays, x, with_logical_constraint(targets, TOKENS[:2]))

    # within a loop XLA cannot merge the recomputation (CSE)
    rematted = jax.checkpoint(score_chunk, prevent_cse=False)

    def score_rows(arrays: PyTree, x: Array, targets: Array) -> Scores:
        chunks = split_chunks(x), split_chunks(targets)
        scores = jax.lax.map(lambda chunk: rematted(arrays, *chunk), chunks)
        return jax.tree.map(join_chunks, scores)

    # the gradients of the table are reduced once, not for every chunk
    return shard_map_rows(score_rows, b, (None, 0, 0), 0)(arrays, x, targets)


def num_chunks(b: int, t: int, v: int) -> int:
    """Return the smallest number of chunks, a divisor of t, for which a chunk's logits fit.

    It is t if not even one token per row fits.

    Args:
      b: number of rows on a device.
    """
    limit = LOGITS_BYTES if target_device().platform == "cpu" else ACCELERATOR_LOGITS_BYTES
    fits = (n for n in range(1, t + 1) if t % n == 0 and b * (t // n) * v * 4 <= limit)
    return next(fits, t)
