"""Learned absolute position embeddings (GPT-2), with the position in the carried state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig
from famjax.core.types import Array, Context
from famjax.ops.positions import document_positions


class Positions(nnx.Module):
    """Adds a learned vector to each token by its position in the document.

    Positions wrap around after the table's last row, as an endless stream requires. With full
    attention they never do: the table's size is its capacity.
    """

    def __init__(self, config: ResolvedModelConfig, *, rngs: nnx.Rngs):
        self.size = config.capacity
        draw = jax.random.normal(rngs.params(), (self.size, config.width))
        # the scale of the token embeddings: next to much larger vectors a position is not learned
        scale = config.width**-0.5 * config.arch.embed_scale
        self.table = nnx.Param(draw * scale)

    def init_state(self, batch: int) -> Array:
        """Return [1 b] int32: tokens read of the document, modulo the table size."""
        return jnp.zeros((1, batch), jnp.int32)

    def state_axes(self) -> Any:
        return (None, "batch")

    def __call__(self, x: Array, state: Array, ctx: Context) -> tuple[Array, Array]:
        """Add position vectors: [b t d] -> [b t d], and the state after the tokens."""
        _, position, after = document_positions(state[0], ctx, x.shape[1])
        if ctx.offset is not None:  # rows of the table are integer positions
            position = position + ctx.offset.astype(jnp.int32)[:, None]
        x = x + self.table[...][position % self.size].astype(x.dtype)
        return x, (after % self.size)[None]
