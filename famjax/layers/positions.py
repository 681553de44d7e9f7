"""Learned absolute positions (GPT-2), as a part of the carried state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.core.config import ModelConfig
from famjax.core.types import Array, Context
from famjax.ops.positions import in_document


class Positions(nnx.Module):
    """Adds a learned vector to each token by its place in the document.

    Behind the table's last row it begins with the first one again: the only reading of an absolute
    table that a stream without end allows. Full attention never gets there: the table's size is its
    capacity.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.size = config.capacity
        draw = jax.random.normal(rngs.params(), (self.size, config.width))
        # as large as the tokens are: beside vectors many times its size a place is not learned
        scale = config.width**-0.5 * (config.arch.embed_scale or config.width**0.5)
        self.table = nnx.Param(draw * scale)

    def init_state(self, batch: int) -> Array:
        """Return [1 b] int32: tokens of the document read, modulo the table."""
        return jnp.zeros((1, batch), jnp.int32)

    def state_axes(self) -> Any:
        return (None, "batch")

    def __call__(self, x: Array, state: Array, ctx: Context) -> tuple[Array, Array]:
        """[b t d] -> [b t d]."""
        _, position, after = in_document(state[0], ctx, x.shape[1])
        if ctx.offset is not None:  # rows of the table are whole positions
            position = position + ctx.offset.astype(jnp.int32)[:, None]
        x = x + self.table[...][position % self.size].astype(x.dtype)
        return x, (after % self.size)[None]
