"""What all softmax mixers share: PreLN, the projections, and the way back to the stream."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.core.config import ModelConfig
from famjax.core.remat import tag_attention
from famjax.core.types import Array, compute_dtype
from famjax.layers.dropout import ATTENDED, ATTENTION, apply_dropout, make_dropout
from famjax.layers.linear import Linear
from famjax.layers.lora import adapter_config
from famjax.layers.norm import Norm
from famjax.ops import rotary
from famjax.ops.attention import attend, attend_dropping, attention_weights


class Keys(nnx.Module):
    """Keys and values of what is remembered, not yet rotated.

    Args:
      norm: what is remembered is normed before, unless norms stand behind the sums.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        d, arch = config.width, config.arch
        e, g = head_dim(config), config.kv_heads or config.heads
        self.dtype = compute_dtype(config.dtype)
        self.norm = Norm(config.norm, d, arch) if arch.pre_norm else None
        self.k, self.v = _keys_values(config, d, g, e, rngs)
        self.k_norm = Norm("rmsnorm", e, arch) if arch.qk_norm else None

    def __call__(self, x: Array) -> tuple[Array, Array]:
        """[... d] -> k [... g e], v [... g e]."""
        x = x.astype(self.dtype) if self.norm is None else self.norm(x, self.dtype)
        k = self.k(x)
        return k if self.k_norm is None else self.k_norm(k, self.dtype), self.v(x)


def head_dim(config: ModelConfig) -> int:
    """Return e."""
    return config.head_dim or config.width // config.heads


def _keys_values(
    config: ModelConfig, d: int, g: int, e: int, rngs: nnx.Rngs
) -> tuple[Linear, Linear]:
    linear = functools.partial(Linear, dtype=compute_dtype(config.dtype), rngs=rngs)
    kv = ("...d,dge->...ge", (d, g, e), d)
    bias = config.arch.qkv_bias
    on = functools.partial(adapter_config, config.lora)
    return (
        linear(*kv, bias=bias, lora=on("attention.k")),
        linear(*kv, bias=bias, lora=on("attention.v")),
    )


class QKV(nnx.Module):
    """QKV(PreLN(x)) and the output projection, with rotary positions.

    With `arch.pre_norm` false the norm stands behind the residual sum, LN(x + Attention(x)).

    Args:
      local: of a layer that sees a token window, which has frequencies of its own in some families.
      keys: it has keys and values of its own.
    """

    def __init__(
        self, config: ModelConfig, *, rngs: nnx.Rngs, local: bool = False, keys: bool = True
    ):
        d, h, arch = config.width, config.heads, config.arch
        e, g = head_dim(config), config.kv_heads or h
        self.dtype = compute_dtype(config.dtype)
        self.kv_heads, self.head_dim = g, e
        self.rates = config.dropout
        base = config.rope_base
        if local and arch.local_rope_base:
            base, arch = arch.local_rope_base, replace(arch, rope_scaling="none")
        self.frequencies = functools.partial(rotary.frequencies, e, base, arch)
        self.cap = arch.attention_cap
        # attention divides by the root of e
        self.query_gain = (e / arch.query_scale) ** 0.5 if arch.query_scale else 1.0
        self.norm = Norm(config.norm, d, arch)
        linear = functools.partial(Linear, dtype=self.dtype, rngs=rngs)
        on = functools.partial(adapter_config, config.lora)
        self.q = linear("...d,dhe->...he", (d, h, e), d, bias=arch.qkv_bias, lora=on("attention.q"))
        own = _keys_values(config, d, g, e, rngs) if keys else (None, None)
        self.k: Linear | None = own[0]
        self.v: Linear | None = own[1]
        self.q_norm = Norm("rmsnorm", e, arch) if arch.qk_norm else None
        self.k_norm = Norm("rmsnorm", e, arch) if arch.qk_norm and keys else None
        self.pre_norm = arch.pre_norm
        gain = (2 * config.layers) ** -0.5 if arch.pre_norm else 1.0
        out = ("...he,hed->...d", (h, e, d), h * e)
        self.out = linear(*out, gain=gain, bias=arch.out_bias, lora=on("attention.out"))
        self.post = Norm(config.norm, d, arch) if arch.post_norm else None

    def project(self, x: Array) -> tuple[Array, Array, Array]:
        """[... d] -> q [... h e], k [... g e], v [... g e], not yet rotated."""
        x = self.normalize(x)
        return self.project_query(x), *self.project_kv(x)

    def normalize(self, x: Array) -> Array:
        """Return what queries, keys and values are projected from."""
        return self.norm(x, self.dtype) if self.pre_norm else x.astype(self.dtype)

    def project_query(self, x: Array) -> Array:
        """[... d], of `normalize` -> [... h e], not yet rotated."""
        q = self.q(x)
        q = q if self.q_norm is None else self.q_norm(q, self.dtype)
        return q if self.query_gain == 1 else q * self.query_gain

    def project_kv(self, x: Array) -> tuple[Array, Array]:
        """[... d], of `normalize` -> k [... g e], v [... g e], not yet rotated."""
        if self.k is None or self.v is None:
            raise ValueError("this layer has no keys of its own")
        k = self.k(x)
        return k if self.k_norm is None else self.k_norm(k, self.dtype), self.v(x)

    def rotate(self, x: Array, positions: Array, *, far: bool = False) -> Array:
        """Rotate [... t h e] to positions [... t], in tokens.

        Args:
          far: they are whole, and may be any number of tokens from 0.
        """
        if far:
            angle = rotary.far_angles(positions, self.frequencies(xp=np))
        else:
            angle = rotary.angles(positions, self.frequencies())
        return rotary.rotate(x, angle[..., None, :])

    def attend(
        self,
        q: Array,
        k: Array,
        v: Array,
        mask: Array | None = None,
        key: Array | None = None,
    ) -> Array:
        """SelfAttention(q, k, v) with this family's cap of the scores; `key` is of dropout."""
        drop = make_dropout(self.rates.attention, key, ATTENTION)
        if drop is None:
            return attend(q, k, v, mask, self.cap)
        return attend_dropping(q, k, v, mask, self.cap, None, drop)

    def shift(self, x: Array, offset: Array | None) -> Array:
        """Add an offset [b] to the positions of [b ... h e], each row's own; None adds nothing."""
        if offset is None:
            return x
        return self.rotate(x, offset.reshape(-1, *(1,) * (x.ndim - 3)))

    def attend_causally(self, q: Array, k: Array, v: Array, position: Array) -> Array:
        """Attend to a document's tokens up to one's own; q and k as projected, at [t] or [b t]."""
        mask = position[..., :, None] >= position[..., None, :]
        return self.attend(self.rotate(q, position), self.rotate(k, position), v, mask)

    def weights(self, q: Array, k: Array, mask: Array) -> Array:
        """Return what `attend` gives each value: [... t h e], [... s g e] -> [... h t s]."""
        weights = attention_weights(q, k, mask, self.cap)
        *leading, g, r, t, s = weights.shape
        return weights.reshape(*leading, g * r, t, s)

    def output_projection(
        self, attended: Array, residual: Array, key: Array | None = None
    ) -> Array:
        """Project [... h e] back and add it to the residual [... d], in the residual's type.

        `key` is of dropout, see `Context`.
        """
        y = self.out(tag_attention(attended))
        if self.post is not None:
            y = self.post(y, self.dtype)
        drop = make_dropout(self.rates.residual, key, ATTENDED)
        y = apply_dropout(y.astype(residual.dtype), drop) + residual
        return y if self.pre_norm else self.norm(y, y.dtype)

    def encode_memory_prompt(self, prompt: Array, offset: Array | None = None) -> Array:
        """Full attention among the f tokens of the FAM prompt (B.1): [f d] -> [f d].

        They stand at the last positions before the stream, -f to -1. With an offset [b] each row
        has a prompt of its own, [b f d].
        """
        q, k, v = self.project(prompt)
        positions = jnp.arange(-prompt.shape[-2], 0)
        q, k = (self.shift(self.rotate(a, positions), offset) for a in (q, k))
        attended = self.attend(q, k, v)
        return self.output_projection(attended, prompt)
