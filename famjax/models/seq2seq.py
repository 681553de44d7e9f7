"""A sequence-to-sequence model: an encoder, and a language model whose layers attend to its output.

    source = model.read_source(tokens, segment)          # once
    logits, state = model(targets, state, Context(source=source))
    logits, state = model.step(token, state, Context(source=source))

The decoder may be any stack with cross attention; its state is the same as without an encoder. In
training a row holds several pairs: a target attends to the source with the same number.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from famjax.config.resolved import resolve_model
from famjax.config.schema import ModelConfig
from famjax.core.types import Array
from famjax.layers.cross_attention import EncodedSource
from famjax.models.language_model import LanguageModel
from famjax.ops.lookup import look_up
from famjax.ops.relative import unmask_empty_rows
from famjax.parallel.sharding import TOKENS, register_parameter_axes
from famjax.parallel.traced import with_logical_constraint
from famjax.stacks.encoder import Encoder

register_parameter_axes((r"source_embedding$", ("vocab", "embed")))


class Seq2Seq(LanguageModel):
    """An encoder, and a decoder with the protocol of a language model.

    Args:
      config: the model's config; its encoder.layers must not be 0.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        resolved = resolve_model(config)
        v, d = resolved.vocab_size, resolved.width
        source_table = (
            None if config.encoder.shared else jax.random.normal(rngs.params(), (v, d)) * d**-0.5
        )
        self.source_embedding = None if source_table is None else nnx.Param(source_table)
        self.encoder = Encoder(resolved, rngs=rngs)
        # linear attention to no tokens is 0; a softmax over none is undefined
        self.allow_empty = config.encoder.cross == "linear"

    def encode(self, tokens: Array, segment: Array) -> Array:
        """Encode sources: [b s] int32, [b s] int32 -> [b s d]; see `Encoder`."""
        return self.encoder(self.embed_source(tokens), segment)

    def embed_source(self, tokens: Array) -> Array:
        """Embed the sources' tokens: [b s] int32 -> [b s d]."""
        if self.source_embedding is None:
            return self.embed(tokens)
        x = look_up(self.source_embedding[...], tokens).astype(self.dtype) * self.embed_scale
        return with_logical_constraint(x, TOKENS)

    def read_source(
        self, tokens: Array, source_segment: Array, segment: Array | None = None
    ) -> EncodedSource:
        """Encode sources, and project them for the decoder's layers.

        Args:
          tokens: [b s] int32, the sources' tokens.
          source_segment: [b s] int32, number of each token's source in its row, from 1; 0 is
            padding.
          segment: [b t] int32, number of each target token's target in its row; targets attend to
            the source with the same number. None for generation: there is one source per row, and
            targets may have any length.

        Returns:
          The `Context.source` of the decoder.
        """
        kv = self.stack.project_source(self.encode(tokens, source_segment))
        if segment is None:
            mask = (source_segment > 0)[:, None]
            return self.stack.summarize_source(EncodedSource(kv, self._unmask_empty_rows(mask)))
        mask = segment[:, :, None] == source_segment[:, None, :]
        return EncodedSource(kv, self._unmask_empty_rows(mask))

    def _unmask_empty_rows(self, mask: Array) -> Array:
        return mask if self.allow_empty else unmask_empty_rows(mask)[0]


def make_model(config: ModelConfig, *, rngs: nnx.Rngs) -> LanguageModel:
    """Return a new model, with an encoder if the config has one."""
    kind = Seq2Seq if config.encoder.layers else LanguageModel
    return kind(config, rngs=rngs)


def source_of(model: LanguageModel, batch: Any) -> EncodedSource | None:
    """Return the source of a batch's rows; None without an encoder."""
    if not isinstance(model, Seq2Seq):
        return None
    return model.read_source(batch["source"], batch["source_segment"], batch["segment"])
