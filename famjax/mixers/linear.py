"""Normalized linear attention, a layer with a recurrent form (T2R 2.2, Equations 3 to 7).

    out_i = phi(q_i)^T S_i / phi(q_i)^T z_i          S_i = sum_{j <= i} phi(k_j) v_j^T

phi is in `famjax.layers.feature_map`, the sums in `famjax.ops.linear_attention`.

Attention weights are never computed and so have no dropout. The authors' code applies dropout in
its quadratic form, but not in its recurrent form, which is the one implemented here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig, num_features, resolve_model, sizes
from famjax.config.schema import Config, ModelConfig
from famjax.core.errors import format_multiples
from famjax.core.remat import tag_product
from famjax.core.types import Array, Context, at_least_float32, param_dtype
from famjax.layers import feature_map
from famjax.layers.feature_map import FeatureMap
from famjax.layers.mlp import FeedForward
from famjax.layers.qkv import QKV
from famjax.mixers.mixer import Mixer, MixerSpec, attention_flops, layer_weights
from famjax.ops.linear_attention import (
    Sums,
    attend_all,
    causal_weights,
    chunkwise_attention,
    recurrent_attention,
)
from famjax.ops.positions import document_positions

_AttendFn = Callable[[Array, Array, Array, Sums, Array], tuple[Array, Sums]]


class LinearState(NamedTuple):
    """Sums over the tokens of a lane's document, float32 regardless of the compute dtype.

    Attributes:
      s, z: S [b g k e] and z [b g k].
      length: [b] int32, number of the document's tokens read so far.
    """

    s: Array
    z: Array
    length: Array


class LinearAttention(Mixer):
    """Causal linear attention over the document, with a state of O(k e) per head."""

    def __init__(self, config: ResolvedModelConfig, *, rngs: nnx.Rngs):
        self.qkv = QKV(config, rngs=rngs)
        self.map = FeatureMap(config, rngs=rngs)
        self.features = config.linear.features
        self.rope = config.linear.rope
        self.chunk = config.linear.chunk
        self.block_len = 1

    def init_state(self, batch: int, prompt: Array | None = None) -> LinearState:
        g, k, e = self.qkv.kv_heads, self.features, self.qkv.head_dim
        dtype = param_dtype()
        s, z = jnp.zeros((batch, g, k, e), dtype), jnp.zeros((batch, g, k), dtype)
        return LinearState(s, z, jnp.zeros((batch,), jnp.int32))

    def state_axes(self) -> LinearState:
        s: Any = ("batch", "kv_heads", None, None)
        z: Any = ("batch", "kv_heads", None)
        lanes: Any = ("batch",)
        return LinearState(s, z, lanes)

    def encode_memory_prompt(self, prompt: Array, offset: Array | None = None) -> Array:
        """Return the FAM prompt after full attention among its tokens (B.1).

        Their positions are -f to -1.

        Args:
          prompt: [f d], or with an offset [b], [b f d]; the result has the same shape.
        """
        q, k, v = self.project(prompt, _add_offset(jnp.arange(-prompt.shape[-2], 0), offset))
        return self.qkv.output_projection(_merge_heads(attend_all(q, k, v)), prompt)

    def __call__(
        self, x: Array, state: LinearState, ctx: Context, mlp: FeedForward
    ) -> tuple[Array, LinearState]:
        """Process any number of tokens: [b t d] -> [b t d]."""
        return self._forward(
            x, state, ctx, functools.partial(chunkwise_attention, chunk=self.chunk)
        )

    def step(
        self, x: Array, state: LinearState, ctx: Context, mlp: FeedForward
    ) -> tuple[Array, LinearState]:
        """Process one token per lane: [b 1 d] -> [b 1 d]."""
        return self._forward(x, state, ctx, recurrent_attention)

    def encode_prompt_with_softmax(self, prompt: Array, offset: Array | None = None) -> Array:
        return self.qkv.encode_memory_prompt(prompt, offset)

    def match_softmax(
        self, x: Array, state: LinearState, ctx: Context, mlp: FeedForward
    ) -> tuple[Array, Array]:
        """Process whole documents [b t d] with softmax attention; return linear attention's error.

            error = sum |linear - softmax|^2 / sum |softmax|^2

        Both sums are over a row's tokens and heads, before the output projection. Hedgehog and
        LoLCATs train their feature maps with this loss; T2R does not. Only phi receives the
        gradient of the error.

        Returns:
          [b t d], the layer's output with softmax attention; [b], the errors.
        """
        b, t, _ = x.shape
        position = _add_offset(jnp.arange(t), ctx.offset)
        # saves no residuals below phi, whichever parameters are trained
        q, k, v = (jax.lax.stop_gradient(a) for a in self.qkv.project(x))
        # tagged here, since `attend` tags its output only when it is differentiated: without the
        # tag remat would recompute it
        softmax = tag_product(self.qkv.attend_causally(q, k, v, position))
        empty, start = self.init_state(b), jnp.zeros((b, t), jnp.int32)
        sums = Sums(empty.s, empty.z)
        linear, _ = chunkwise_attention(*self.phi(q, k, position), v, sums, start, self.chunk)
        return self.qkv.output_projection(softmax, x), _relative_error(
            _merge_heads(linear), softmax
        )

    def attention_map(self, x: Array) -> Array:
        """Return the attention weights of a document in one call: [b t d] -> [b h t t].

        The weights are phi(q_i) phi(k_j) divided by their sum over j. As in the layer's output, the
        divisor is at least `EPS`, so that rows with a smaller sum do not sum to 1. Feature maps
        with negative features have negative weights.
        """
        q, k, _ = self.project(x, jnp.arange(x.shape[1]))
        weights = causal_weights(q, k)
        b, g, r, t, _ = weights.shape
        return weights.reshape(b, g * r, t, t)

    def project(self, x: Array, position: Array) -> tuple[Array, Array, Array]:
        """Project x [... t d] at positions [... t].

        Returns:
          phi(q) [... t g r k], phi(k) [... t g k], v [... t g e].
        """
        q, k, v = self.qkv.project(x)
        return *self.phi(q, k, position), v

    def phi(self, q: Array, k: Array, position: Array) -> tuple[Array, Array]:
        """Map unrotated q [... t h e] and k [... t g e] at positions [... t] to features.

        Returns:
          phi(q) [... t g r k], phi(k) [... t g k].
        """
        if self.rope:
            long_range = jnp.issubdtype(position.dtype, jnp.integer)
            q, k = (self.qkv.rotate(a, position, long_range=long_range) for a in (q, k))
        *_, h, e = q.shape
        g = self.qkv.kv_heads
        q = q.reshape(*q.shape[:-2], g, h // g, e)
        return self.map(q), self.map(k[..., None, :])[..., 0, :]

    def fold_feature_map(self) -> None:
        """Fold the feature map into the projections, which then return W q + b and W k + b."""
        assert self.qkv.k is not None
        self.map.fold_into(self.qkv.q, self.qkv.query_gain)
        self.map.fold_into(self.qkv.k)
        self.map.drop_weights()
        self.qkv.query_gain, self.rope = 1.0, False

    def _forward(
        self, x: Array, state: LinearState, ctx: Context, attend: _AttendFn
    ) -> tuple[Array, LinearState]:
        valid = jnp.ones(x.shape[:2], bool) if ctx.valid is None else ctx.valid
        # no document starts with padding
        reset = None if ctx.reset is None else ctx.reset & valid
        start, position, length = document_positions(
            state.length, ctx._replace(reset=reset), x.shape[1]
        )
        q, k, v = self.project(x, _add_offset(position, ctx.offset))
        k, v = (jnp.where(valid[..., None, None], a, 0) for a in (k, v))
        y, (s, z) = attend(q, k, v, Sums(state.s, state.z), start)
        return self.qkv.output_projection(_merge_heads(y), x, ctx.key), LinearState(s, z, length)


class LinearSpec(MixerSpec):
    title = "linear attention"
    allows_post_norm = True
    keys = ("model.linear.*",)
    is_blockwise = False
    has_feature_map = True
    has_attention_weights = False
    has_attention_map = True
    formats = ("hf", "orbax", "stablehlo")
    convert_name = "t2r"

    def make(self, config: ResolvedModelConfig, rngs: nnx.Rngs) -> LinearAttention:
        return LinearAttention(config, rngs=rngs)

    def initial_param(self, model: ResolvedModelConfig, name: str, rngs: nnx.Rngs) -> Array:
        # not from `make`: the projections would draw from the same random stream
        return getattr(FeatureMap(model, rngs=rngs), name.removeprefix("map."))[...]

    def check(self, config: Config) -> Iterator[str]:
        c = config.model.linear
        if c.map == "rfa" and c.features % 2:
            yield (
                f"model.linear.features={c.features} is odd; rfa has a sine and a cosine of each "
                f"random vector, take {format_multiples(c.features, 2)}"
            )
        if config.train.rpo and c.rope:
            yield (
                "train.rpo=true: features of rotated keys are not relative, so a position offset "
                "changes the output; set train.rpo=false or model.linear.rope=false"
            )

    def keys_seen(self, model: ModelConfig) -> float:
        return 0

    def keys_computed(self, model: ModelConfig) -> float:
        return 0

    def flops(self, model: ModelConfig, computed: bool = False) -> float:
        return 2 * layer_weights(model) + _attention_flops(model)

    def softmax_matching_flops(self, model: ModelConfig, length: int) -> float:
        """Return the FLOPs of one token of a row of `length` while feature maps are trained.

        The forward pass computes both attentions. The backward pass computes only the gradient of
        phi: one product for each forward product of the feature maps and of phi(k) v^T, two for
        each product of phi(q) with S and z.
        """
        softmax = 2 * layer_weights(model) + attention_flops(model, length / 2)
        s = sizes(model)
        query_flops = 2 * s.h * num_features(model) * (s.e + 1)
        return softmax + 2 * _attention_flops(model) + query_flops

    def count_params(self, model: ModelConfig) -> int:
        return feature_map.count_params(model)

    def state_bytes(self, model: ModelConfig) -> int:
        s = sizes(model)
        return s.g * num_features(model) * (s.e + 1) * 4  # float32

    def max_attention_weights(self, config: Config) -> int:
        return 0

    def rope_off_setting(self, model: ModelConfig) -> str:
        return "" if model.linear.rope else "model.linear.rope=false"


def _attention_flops(model: ModelConfig) -> float:
    """Return the FLOPs of phi, of phi(k) v^T, and of the products of phi(q) with S and z."""
    s = sizes(model)
    k, vectors = num_features(model), feature_map.num_vectors(resolve_model(model))
    return 2 * ((s.h + s.g) * s.e * vectors + s.g * k * s.e + s.h * k * (s.e + 1))


def _add_offset(position: Array, offset: Array | None) -> Array:
    """Add an offset [b] to positions [t] or [b t]; None adds nothing."""
    return position if offset is None else position + offset[:, None]


def _relative_error(y: Array, target: Array) -> Array:
    """Return |y - target|^2 / |target|^2 by row: [b ...] twice -> [b], in float32 or wider."""
    y, target = map(at_least_float32, (y, target))
    axes = tuple(range(1, y.ndim))
    size = jnp.square(target).sum(axes)
    return jnp.square(y - target).sum(axes) / jnp.maximum(size, jnp.finfo(size.dtype).tiny)


def _merge_heads(y: Array) -> Array:
    """[... g r e] -> [... h e]."""
    return y.reshape(*y.shape[:-3], -1, y.shape[-1])
