"""The projections of an attention layer: PreLN, queries, keys, values, and the output."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig
from famjax.core.remat import tag_attention
from famjax.core.types import Array, compute_dtype
from famjax.layers.dropout import ATTENTION_OUTPUT, ATTENTION_WEIGHTS, apply_dropout, make_dropout
from famjax.layers.linear import Linear
from famjax.layers.lora import adapter_config
from famjax.layers.norm import Norm
from famjax.ops import rotary
from famjax.ops.attention import attend, attend_blocks, attend_with_dropout, attention_weights


class KVProjection(nnx.Module):
    """Projects memories to keys and values, not yet rotated.

    Memories are normalized first (`norm`), unless the model is post-norm.
    """

    def __init__(self, config: ResolvedModelConfig, *, rngs: nnx.Rngs):
        arch = config.arch
        self.dtype = compute_dtype(config.dtype)
        self.norm = Norm(config.norm, config.width, arch) if arch.pre_norm else None
        self.k, self.v = _make_kv(config, rngs)
        self.k_norm = Norm("rmsnorm", config.head_dim, arch) if arch.qk_norm else None

    def __call__(self, x: Array) -> tuple[Array, Array]:
        """Project memories to keys and values: [... d] -> k [... g e], v [... g e]."""
        x = x.astype(self.dtype) if self.norm is None else self.norm(x, self.dtype)
        k = self.k(x)
        return k if self.k_norm is None else self.k_norm(k, self.dtype), self.v(x)


def _make_kv(config: ResolvedModelConfig, rngs: nnx.Rngs) -> tuple[Linear, Linear]:
    d, g, e = config.width, config.kv_heads, config.head_dim
    linear = functools.partial(Linear, dtype=compute_dtype(config.dtype), rngs=rngs)
    kv = ("...d,dge->...ge", (d, g, e), d)
    bias = config.arch.qkv_bias
    lora_for = functools.partial(adapter_config, config.lora)
    return (
        linear(*kv, bias=bias, lora=lora_for("attention.k")),
        linear(*kv, bias=bias, lora=lora_for("attention.v")),
    )


class QKV(nnx.Module):
    """QKV(PreLN(x)) and the output projection, with rotary positions.

    With `arch.pre_norm` false the norm follows the residual sum, LN(x + Attention(x)).

    Args:
      local: the layer attends to a token window, with its own RoPE base in some families.
      keys: the layer has its own key and value projections.
    """

    def __init__(
        self, config: ResolvedModelConfig, *, rngs: nnx.Rngs, local: bool = False, keys: bool = True
    ):
        d, h, arch = config.width, config.heads, config.arch
        e, g = config.head_dim, config.kv_heads
        self.dtype = compute_dtype(config.dtype)
        self.kv_heads, self.head_dim = g, e
        self.rates = config.dropout
        base = config.rope_base
        if local and arch.local_rope_base:
            base, arch = arch.local_rope_base, replace(arch, rope_scaling="none")
        self.frequencies = functools.partial(rotary.frequencies, e, base, arch)
        self.cap = arch.attention_cap
        # attention divides by sqrt(e)
        self.query_gain = (e / arch.query_scale) ** 0.5
        self.norm = Norm(config.norm, d, arch)
        linear = functools.partial(Linear, dtype=self.dtype, rngs=rngs)
        lora_for = functools.partial(adapter_config, config.lora)
        self.q = linear(
            "...d,dhe->...he", (d, h, e), d, bias=arch.qkv_bias, lora=lora_for("attention.q")
        )
        kv_layers = _make_kv(config, rngs) if keys else (None, None)
        self.k: Linear | None = kv_layers[0]
        self.v: Linear | None = kv_layers[1]
        self.q_norm = Norm("rmsnorm", e, arch) if arch.qk_norm else None
        self.k_norm = Norm("rmsnorm", e, arch) if arch.qk_norm and keys else None
        self.pre_norm = arch.pre_norm
        gain = (2 * config.layers) ** -0.5 if arch.pre_norm else 1.0
        out = ("...he,hed->...d", (h, e, d), h * e)
        self.out = linear(*out, gain=gain, bias=arch.out_bias, lora=lora_for("attention.out"))
        self.post = Norm(config.norm, d, arch) if arch.post_norm else None

    def project(self, x: Array) -> tuple[Array, Array, Array]:
        """Normalize and project: [... d] -> q [... h e], k and v [... g e], not yet rotated."""
        x = self.normalize(x)
        return self.project_query(x), *self.project_kv(x)

    def normalize(self, x: Array) -> Array:
        """Return the input of the projections."""
        return self.norm(x, self.dtype) if self.pre_norm else x.astype(self.dtype)

    def project_query(self, x: Array) -> Array:
        """Project the output of `normalize`: [... d] -> [... h e], unrotated."""
        q = self.q(x)
        q = q if self.q_norm is None else self.q_norm(q, self.dtype)
        return q if self.query_gain == 1 else q * self.query_gain

    def project_kv(self, x: Array) -> tuple[Array, Array]:
        """Project the output of `normalize`: [... d] -> k [... g e], v [... g e], unrotated."""
        if self.k is None or self.v is None:
            raise ValueError("this layer has no key projection")
        k = self.k(x)
        return k if self.k_norm is None else self.k_norm(k, self.dtype), self.v(x)

    def rotate(self, x: Array, positions: Array, *, long_range: bool = False) -> Array:
        """Rotate [... t h e] to positions [... t], in tokens, which are broadcast.

        Args:
          long_range: positions are integers of any size, see `rotary.long_range_angles`.
        """
        if long_range:
            angle = rotary.long_range_angles(positions, self.frequencies(xp=np))
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
        """Return SelfAttention(q, k, v), with the soft-capping of scores that some families have.

        `key` is for dropout, see `Context`.
        """
        drop = make_dropout(self.rates.attention, key, ATTENTION_WEIGHTS)
        if drop is None:
            return attend(q, k, v, mask, self.cap)
        return attend_with_dropout(q, k, v, mask, self.cap, bias=None, drop=drop)

    def attend_blocks(
        self, q: Array, k: Array, v: Array, mask: Array, dropout_keys: Array | None = None
    ) -> Array:
        """Apply `attend` to each of n blocks.

        Args:
          q: [b n w h e].
          k, v: [b n s g e].
          mask: [b n w s].
          dropout_keys: [n], a PRNG key for each block; None for no dropout.

        Returns:
          [b n w h e].
        """
        if dropout_keys is None:
            return attend_blocks(q, k, v, mask, self.cap)
        attend_each = jax.vmap(self.attend, in_axes=(1, 1, 1, 1, 0), out_axes=1)
        return attend_each(q, k, v, mask, dropout_keys)

    def shift(self, x: Array, offset: Array | None) -> Array:
        """Shift the positions of each row of [b ... h e] by an offset [b]; None changes nothing."""
        if offset is None:
            return x
        return self.rotate(x, offset.reshape(-1, *(1,) * (x.ndim - 3)))

    def attend_causally(self, q: Array, k: Array, v: Array, position: Array) -> Array:
        """Return causal attention within a document.

        Args:
          q, k: queries and keys, unrotated.
          position: [t] or [b t].
        """
        mask = position[..., :, None] >= position[..., None, :]
        return self.attend(self.rotate(q, position), self.rotate(k, position), v, mask)

    def weights(self, q: Array, k: Array, mask: Array | None) -> Array:
        """Return the weights of `attend`: [... t h e], [... s g e] -> [... h t s]."""
        weights = attention_weights(q, k, mask, self.cap)
        *leading, g, r, t, s = weights.shape
        return weights.reshape(*leading, g * r, t, s)

    def output_projection(
        self, attended: Array, residual: Array, key: Array | None = None
    ) -> Array:
        """Project [... h e] to [... d] and add the residual, in its dtype.

        `key` is for dropout, see `Context`.
        """
        y = self.out(tag_attention(attended))
        if self.post is not None:
            y = self.post(y, self.dtype)
        drop = make_dropout(self.rates.residual, key, ATTENTION_OUTPUT)
        y = apply_dropout(y.astype(residual.dtype), drop) + residual
        return y if self.pre_norm else self.norm(y, y.dtype)

    def encode_memory_prompt(self, prompt: Array, offset: Array | None = None) -> Array:
        """Return the FAM prompt after full attention among its f tokens (B.1).

        Their positions are the last ones before the stream, -f to -1.

        Args:
          prompt: [f d], or with an offset [b], [b f d]; the result has the same shape.
        """
        q, k, v = self.project(prompt)
        positions = jnp.arange(-prompt.shape[-2], 0)
        q, k = (self.shift(self.rotate(a, positions), offset) for a in (q, k))
        attended = self.attend(q, k, v)
        return self.output_projection(attended, prompt)
