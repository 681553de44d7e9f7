"""The Recurrent Memory Transformer (Bulatov et al. 2022, arXiv 2207.06881, 3.2).

    [_; Y; W] = Transformer([M; X; M])        M <- Norm(W)

A segment starts with the memory that the last segment has written, and ends with the memory tokens
that overwrite it. In both places memory tokens attend to each other in both directions
(`famjax.stacks.segments`).
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig
from famjax.core.types import Array
from famjax.stacks.segments import SegmentStack, SegmentState


class RecurrentMemory(SegmentStack):
    """Recurrent Memory Transformer with fam_len memory tokens.

    The memory that a document's first segment reads is learned.

    Attributes:
      block_len: tokens of a segment.
      capacity, receptive_field: None, unbounded.
    """

    def __init__(self, config: ResolvedModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs, mutual=True, held=True)

    def init_state(self, batch: int, offset: Array | None = None) -> SegmentState:
        memory = jnp.broadcast_to(self.prompt[...], (batch, *self.prompt.shape))
        return self.read_memory(self.empty_state(batch), memory)

    def writing_tokens(self, state: SegmentState) -> Array:
        assert state.memory is not None
        return state.memory[0]

    def kept_tokens(self, read: Array) -> Array:
        return jnp.zeros_like(read)
