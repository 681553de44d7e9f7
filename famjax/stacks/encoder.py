"""The encoder of a sequence-to-sequence model: layers that attend in both directions.

A row may hold several sources, one after the other; a token attends only to its own source.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig
from famjax.core.remat import remat_with_policy
from famjax.core.types import Array
from famjax.layers.dropout import (
    EMBEDDING,
    LAYER,
    OUTPUT,
    apply_dropout,
    drop_layer,
    empty_key,
    make_dropout,
    split_key,
)
from famjax.layers.mlp import FeedForward
from famjax.layers.norm import Norm
from famjax.layers.positions import Positions
from famjax.layers.qkv import QKV
from famjax.parallel.sharding import TOKENS
from famjax.parallel.traced import fsdp_all_gather, with_logical_constraint


class EncoderLayer(nnx.Module):
    """Attention to all tokens of the source, followed by a feed-forward.

    Queries and keys have rotary positions, as far as `arch.rotary_fraction` says.
    """

    def __init__(self, config: ResolvedModelConfig, *, rngs: nnx.Rngs):
        self.qkv = QKV(config, rngs=rngs)
        self.mlp = FeedForward(config, rngs=rngs)
        self.layer_drop_rate = config.dropout.layer

    def __call__(self, x: Array, mask: Array, key: Array | None = None) -> Array:
        """Apply the layer to tokens [b s d] with a mask [b s s]; `key` is for dropout."""
        positions = jnp.arange(x.shape[1])
        q, k, v = self.qkv.project(x)
        q, k = (self.qkv.rotate(a, positions) for a in (q, k))
        a = self.qkv.output_projection(self.qkv.attend(q, k, v, mask, key), x, key)
        return drop_layer(x, self.mlp(a, x, key), self.layer_drop_rate, key)


class Encoder(nnx.Module):
    """`encoder.layers` layers, whose parameters are stacked, and a final norm."""

    def __init__(self, config: ResolvedModelConfig, *, rngs: nnx.Rngs):
        self.count = config.encoder.layers
        self.scanned, self.remat = config.scan_layers, config.remat
        # the initial scale of output projections depends on the depth, here the encoder's own
        layer_config = replace(config, layers=self.count)

        @nnx.split_rngs(splits=self.count)
        @nnx.vmap(in_axes=(0,))
        def make(rngs: nnx.Rngs) -> EncoderLayer:
            return EncoderLayer(layer_config, rngs=rngs)

        self.layers = nnx.List([make(rngs)])
        arch = config.arch
        self.positions = Positions(config, rngs=rngs) if arch.positions != "none" else None
        self.embed_norm = Norm(config.norm, config.width, arch) if arch.embed_norm else None
        self.norm = Norm(config.norm, config.width, arch) if arch.pre_norm else None
        self.rates = config.dropout
        self.key = empty_key() if any(vars(config.dropout).values()) else None

    def __call__(self, x: Array, segment: Array) -> Array:
        """Encode embedded sources: [b s d] -> [b s d].

        Args:
          segment: [b s] int32, the number of a token's source in its row; 0 is padding.
        """
        mask = segment[:, :, None] == segment[:, None, :]
        key = None if self.key is None else jax.random.wrap_key_data(self.key[...])
        if self.positions is not None:
            x = self.positions.add_to_sources(x, segment)
        if self.embed_norm is not None:
            x = self.embed_norm(x, x.dtype)
        x = apply_dropout(x, make_dropout(self.rates.embedding, key, EMBEDDING))
        graph, params = nnx.split(self.layers)

        def body(x: Array, xs: tuple[nnx.State, Array | None]) -> tuple[Array, None]:
            (layer,) = nnx.merge(graph, fsdp_all_gather(xs[0]))
            return layer(with_logical_constraint(x, TOKENS), mask, xs[1]), None

        body = remat_with_policy(body, self.remat, scanned=self.scanned and self.count > 1)
        xs = (params, split_key(key, LAYER, self.count))
        x, _ = jax.lax.scan(body, x, xs, unroll=1 if self.scanned else self.count)
        x = apply_dropout(x, make_dropout(self.rates.output, key, OUTPUT))
        return x if self.norm is None else self.norm(x, x.dtype)
