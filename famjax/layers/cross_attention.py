"""A decoder layer's attention to the encoder's output: softmax, or normalized linear (T2R 3.2.2).

Queries and keys are not rotated: the encoder's output itself holds the positions. Keys and values
are projected once for a source (`CrossAttention.project`), however much is decoded from it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig
from famjax.core.errors import UserError
from famjax.core.types import Array, acc_dtype
from famjax.layers.dropout import CROSS_ATTENTION
from famjax.layers.feature_map import FeatureMap
from famjax.layers.qkv import QKV
from famjax.ops.linear_attention import attend_masked, attend_sums


class SourceKV(NamedTuple):
    """Keys and values of a source's tokens: k [b s g e], or phi(k) [b s g k]; v [b s g e]."""

    k: Array
    v: Array


class SourceSums(NamedTuple):
    """All that linear attention needs from a source: s [b g k e], z [b g k] (T2R, Equation 7)."""

    s: Array
    z: Array


class EncodedSource(NamedTuple):
    """What a decoder attends to.

    Attributes:
      kv: `SourceKV` or `SourceSums`, those of one layer, or of all layers as
        `Stack.project_source` returns them.
      mask: [b t s] bool, or [b 1 s]: which tokens of the source each token of the call sees; with
        softmax attention each must see at least one. `SourceSums` already have it applied.
    """

    kv: Any
    mask: Array


def make_feature_map(config: ResolvedModelConfig, *, rngs: nnx.Rngs) -> FeatureMap:
    """Return the feature map of linear cross attention, with `encoder.features` features."""
    linear = replace(config.linear, features=config.encoder.features)
    return FeatureMap(replace(config, linear=linear), rngs=rngs)


class CrossAttention(nnx.Module):
    """x + Attention(PreLN(x), source), or LN(x + Attention(x, source)) with `arch.pre_norm` false.

    A row of the source may serve several consecutive rows of the decoder, such as n beams.
    """

    def __init__(self, config: ResolvedModelConfig, *, rngs: nnx.Rngs):
        self.qkv = QKV(config, rngs=rngs)
        is_linear = config.encoder.cross == "linear"
        self.map = make_feature_map(config, rngs=rngs) if is_linear else None

    def project(self, source: Array) -> SourceKV:
        """Project the encoder's output [b s d] to keys and values."""
        k, v = self.qkv.project_kv(source.astype(self.qkv.dtype))
        return SourceKV(k if self.map is None else self.map(k[..., None, :])[..., 0, :], v)

    def summarize(self, kv: SourceKV, mask: Array) -> SourceKV | SourceSums:
        """Return the sums over whole sources, with mask [b 1 s]; `kv` if attention is softmax."""
        if self.map is None:
            return kv
        dtype = acc_dtype(kv.k)
        k = jnp.where(mask[:, 0, :, None, None], kv.k, 0).astype(dtype)
        return SourceSums(jnp.einsum("bsgk,bsge->bgke", k, kv.v.astype(dtype)), k.sum(1))

    def __call__(self, x: Array, source: EncodedSource | None, key: Array | None = None) -> Array:
        """Attend to the source: [b t d] -> [b t d], or with one token [b d] -> [b d].

        `key` is for dropout, see `Context`.
        """
        if source is None:
            raise UserError(
                "a model with an encoder needs the source of the targets: set Context.source to "
                "the result of Seq2Seq.read_source"
            )
        if x.ndim == 2:
            return self(x[:, None], source, key)[:, 0]
        key = None if key is None else jax.random.fold_in(key, CROSS_ATTENTION)
        q = self.qkv.project_query(self.qkv.normalize(x))
        b, t, h, e = q.shape
        # beams are more queries of the same source
        rows = jax.tree.leaves(source.kv)[0].shape[0]
        y = self._attend(q.reshape(rows, -1, h, e), source, key).reshape(b, t, h, -1)
        return self.qkv.output_projection(y, x, key)

    def _attend(self, q: Array, source: EncodedSource, key: Array | None) -> Array:
        """[b t h e] -> [b t h e]."""
        kv = source.kv
        if self.map is None:
            assert isinstance(kv, SourceKV)
            return self.qkv.attend(q, kv.k, kv.v, source.mask, key)
        *lead, h, e = q.shape
        g = self.qkv.kv_heads
        features = self.map(q.reshape(*lead, g, h // g, e))
        if isinstance(kv, SourceSums):
            y = attend_sums(features, kv.s, kv.z).astype(q.dtype)
        else:
            y = attend_masked(features, kv.k, kv.v, source.mask)
        return y.reshape(*q.shape[:-1], -1)

    def fold_feature_map(self) -> None:
        """Fold the feature map into the projections, if there is one (T2R, Equation 8)."""
        if self.map is None:
            return
        assert self.qkv.k is not None
        self.map.fold_into(self.qkv.q, self.qkv.query_gain)
        self.map.fold_into(self.qkv.k)
        self.map.drop_weights()
        self.qkv.query_gain = 1.0
