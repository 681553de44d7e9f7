"""Absolute position embeddings, with the position of a stream in the carried state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig
from famjax.core.errors import UserError
from famjax.core.types import Array, Context
from famjax.ops import rotary
from famjax.ops.positions import document_positions

# base of the wavelengths of sinusoids (Vaswani et al., 2017, 3.5)
_BASE = 10_000.0


class Positions(nnx.Module):
    """Adds a vector to each token by its position in the document, as `arch.positions` says.

    Learned positions wrap around after the table's last row, as an endless stream requires. With
    full attention they never do: the table's size is its capacity. Sinusoids are those of the
    position in documents of less than 2^31 tokens.
    """

    def __init__(self, config: ResolvedModelConfig, *, rngs: nnx.Rngs):
        arch = config.arch
        self.kind, self.size, self.first = arch.positions, config.capacity, arch.position_offset
        # the scale of the token embeddings: next to much larger vectors a position is not learned
        scale = config.width**-0.5 * arch.embed_scale
        shape = (self.first + self.size, config.width)
        is_learned = self.kind == "learned"
        draw = jax.random.normal(rngs.params(), shape) * scale if is_learned else None
        self.table = None if draw is None else nnx.Param(draw)

    def init_state(self, batch: int) -> Array:
        """Return [1 b] int32: tokens read of the document; of a table, modulo its size."""
        return jnp.zeros((1, batch), jnp.int32)

    def state_axes(self) -> Any:
        return (None, "batch")

    def __call__(self, x: Array, state: Array, ctx: Context) -> tuple[Array, Array]:
        """Add position vectors: [b t d] -> [b t d], and the state after the tokens."""
        _, position, after = document_positions(state[0], ctx, x.shape[1])
        if ctx.offset is not None:  # these positions are integers
            position = position + ctx.offset.astype(jnp.int32)[:, None]
        return self.add(x, position), (after if self.table is None else after % self.size)[None]

    def add_to_sources(self, x: Array, segment: Array) -> Array:
        """Add position vectors to sources, each of which begins at position 0: [b s d] -> [b s d].

        Args:
          segment: [b s] int32, the number of a token's source in its row; 0 is padding.

        Raises:
          UserError: a source is longer than the table, outside of jit; under jit it wraps around.
        """
        position = jnp.where(segment > 0, segment_positions(segment), 0)
        if not isinstance(position, jax.core.Tracer):
            self.check_source(int(position.max()) + 1)
        return self.add(x, position)

    def check_source(self, tokens: int, name: str = "a source") -> None:
        """Raise a `UserError` if a source of that many tokens is longer than the table."""
        if self.table is not None and tokens > self.size:
            raise UserError(
                f"{name} has {tokens:,} tokens, but the encoder only {self.size:,} learned "
                "positions (model.capacity); shorten the source"
            )

    def add(self, x: Array, position: Array) -> Array:
        """Add the vectors of positions [b t] to x [b t d]."""
        if self.table is not None:
            vectors = self.table[...][self.first + position % self.size]
        else:
            vectors = sinusoids(position, x.shape[-1], halves=self.kind == "sinusoidal_halves")
        return x + vectors.astype(x.dtype)


def sinusoids(position: Array, width: int, halves: bool = False) -> Array:
    """Return PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d)).

    Source: Vaswani et al., 2017, 3.5.

    Args:
      position: [...] int32, below 2^31.
      width: d, even.
      halves: first all sines, then all cosines, instead of alternating.

    Returns:
      [... d] in float32, or float64 if JAX has x64 enabled.
    """
    theta = _BASE ** (-np.arange(0, width, 2) / width)
    angle = rotary.long_range_angles(position, theta)
    waves = jnp.stack([jnp.sin(angle), jnp.cos(angle)], -2 if halves else -1)
    return waves.reshape(*position.shape, width)


def segment_positions(segment: Array) -> Array:
    """Return each token's position in its part of a row: [b s] int32, numbers of parts -> [b s]."""
    index = jnp.arange(segment.shape[1], dtype=jnp.int32)
    before = jnp.pad(segment[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return index - jax.lax.cummax(jnp.where(segment == before, 0, index), axis=1)
