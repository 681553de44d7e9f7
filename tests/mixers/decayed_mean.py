"""A user-defined mixer: each token sees a decayed mean of its document's values.

    s_t = a s_{t-1} + v_t          z_t = a z_{t-1} + 1          out_t = s_t / z_t

a = sigmoid(decay), one learned number per head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.resolved import sizes
from famjax.config.schema import Config, ModelConfig
from famjax.core.lanes import select_rows, select_state
from famjax.core.types import Array, Context, param_dtype
from famjax.layers.mlp import FeedForward
from famjax.layers.qkv import QKV
from famjax.mixers.mixer import Mixer, MixerSpec, layer_weights
from famjax.parallel.sharding import register_parameter_axes

register_parameter_axes((r"mixer/decay$", ("kv_heads",)))


class MeanState(NamedTuple):
    """s [b g e] and z [b g], float32."""

    s: Array
    z: Array


class DecayedMean(Mixer):
    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.qkv = QKV(config, rngs=rngs)
        self.decay = nnx.Param(jnp.full(self.qkv.kv_heads, 2.0))
        self.block_len = 1

    def init_state(self, batch: int, prompt: Array | None = None) -> MeanState:
        g, e = self.qkv.kv_heads, self.qkv.head_dim
        return MeanState(jnp.zeros((batch, g, e), param_dtype()), jnp.zeros((batch, g)))

    def state_axes(self) -> MeanState:
        s: Any = ("batch", "kv_heads", None)
        z: Any = ("batch", "kv_heads")
        return MeanState(s, z)

    def __call__(
        self, x: Array, state: MeanState, ctx: Context, mlp: FeedForward
    ) -> tuple[Array, MeanState]:
        b, t, _ = x.shape
        q, _, v = self.qkv.project(x)
        decay = jax.nn.sigmoid(self.decay[...])
        reset = jnp.zeros((b, t), bool) if ctx.reset is None else ctx.reset
        valid = jnp.ones((b, t), bool) if ctx.valid is None else ctx.valid

        def token(state: MeanState, xs: tuple[Array, Array, Array]) -> tuple[MeanState, Array]:
            v, reset, valid = xs
            old = jax.tree.map(lambda a: select_rows(reset & valid, 0, a), state)
            new = MeanState(decay[:, None] * old.s + v, decay * old.z + 1)
            new = select_state(valid, new, state)
            return new, new.s / jnp.maximum(new.z, 1)[..., None]

        xs = (jnp.moveaxis(v.astype(state.s.dtype), 1, 0), reset.T, valid.T)
        state, y = jax.lax.scan(token, state, xs)
        y = jnp.repeat(jnp.moveaxis(y, 0, 1), q.shape[2] // v.shape[2], 2)
        return self.qkv.output_projection(y.astype(q.dtype), x, ctx.key), state

    step = __call__


class DecayedMeanSpec(MixerSpec):
    title = "a decayed mean"
    is_blockwise = False
    has_attention_weights = False
    keys = ("model.window",)

    def make(self, config: ModelConfig, rngs: nnx.Rngs) -> DecayedMean:
        return DecayedMean(config, rngs=rngs)

    def check(self, config: Config) -> Iterator[str]:
        if config.model.arch.qk_norm:
            yield "model.arch.qk_norm=true: a decayed mean has no scores; set it to false"

    def keys_seen(self, model: ModelConfig) -> float:
        return 0

    def keys_computed(self, model: ModelConfig) -> float:
        return 0

    def flops(self, model: ModelConfig, computed: bool = False) -> float:
        return 2 * layer_weights(model)

    def count_params(self, model: ModelConfig) -> int:
        return sizes(model).g

    def state_bytes(self, model: ModelConfig) -> int:
        s = sizes(model)
        return s.g * (s.e + 1) * 4

    def max_attention_weights(self, config: Config) -> int:
        return 0

    def rope_off_setting(self, model: ModelConfig) -> str:
        return "model.mixer=decayed_mean"
