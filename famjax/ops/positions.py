"""Positions of a call's tokens in their documents."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Int

from famjax.core.types import Array, Context


def document_positions(
    before: Int[Array, "b"], ctx: Context, tokens: int
) -> tuple[Int[Array, "b {tokens}"], Int[Array, "b {tokens}"], Int[Array, "b"]]:
    """Return where the documents of a call start, and each token's position in its document.

    Args:
      before: [b] int32, number of tokens of each lane's document in earlier calls.
      tokens: t, number of tokens of this call.

    Returns:
      start: [b t] int32, index in the call where the token's document starts; -1 before the call.
      position: [b t] int32, number of the document's tokens before the token.
      after: [b] int32, number of tokens of each lane's newest document after the call, without
        padding.
    """
    index = jnp.arange(tokens, dtype=jnp.int32)
    shape = (before.shape[0], tokens)
    reset = jnp.zeros(shape, bool) if ctx.reset is None else ctx.reset
    valid = jnp.ones(shape, bool) if ctx.valid is None else ctx.valid
    start = jax.lax.cummax(jnp.where(reset, index, -1), axis=1)
    position = jnp.where(start < 0, index + before[:, None], index - start)
    newest = valid & (index >= start[:, -1:])
    after = jnp.where(start[:, -1] < 0, before, 0) + newest.sum(-1, dtype=jnp.int32)
    all_padding = ~valid.any(-1)
    return start, position, jnp.where(all_padding, before, after)
