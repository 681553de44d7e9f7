"""AutoCompressors (Chevalier et al. 2023, arXiv 2305.14788, 3.1).

    [_; Y; W] = Transformer([M; X; S])        M <- [M; Norm(W)]

S are learned summary tokens, M the summary vectors of all earlier segments (summary accumulation).
All attention is causal, so the keys and values of M remain valid, and each segment needs to read
only the newest summaries. Summaries have positions like all tokens, as in the paper's models with
rotary positions.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig
from famjax.core.types import Array
from famjax.stacks.segments import SegmentStack, SegmentState


class AutoCompressor(SegmentStack):
    """AutoCompressors with fam_len summary tokens for each segment.

    The summaries of as many segments are kept as `model.capacity` tokens fill.

    Attributes:
      block_len: tokens of a segment.
      capacity: tokens of the segments whose summaries are kept.
      receptive_field: None, which means all tokens.
    """

    def __init__(self, config: ResolvedModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs, mutual=False, held=False)
        self.capacity = self.max_read // self.memory_len * self.block_len

    def init_state(self, batch: int, offset: Array | None = None) -> SegmentState:
        return self.empty_state(batch)

    def writing_tokens(self, state: SegmentState) -> Array:
        return jnp.broadcast_to(self.prompt[...], (state.tokens.shape[1], *self.prompt.shape))

    def kept_tokens(self, read: Array) -> Array:
        """Return all of `read`; at the capacity, all but the last segment's, which N overwrites."""
        return jnp.minimum(read, self.max_read - self.memory_len)
