"""What all softmax mixers share: PreLN, the projections, and the way back to the stream."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax.numpy as jnp
from flax import nnx

from famjax.core.config import ModelConfig
from famjax.core.types import Array, compute_dtype
from famjax.layers.linear import Linear
from famjax.layers.lora import adapted
from famjax.layers.norm import Norm
from famjax.ops import rotary
from famjax.ops.attention import attend


class QKV(nnx.Module):
    """QKV(PreLN(x)) and the output projection, with rotary positions.

    Args:
      local: of a layer that sees a token window, which has frequencies of its own in some families.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, local: bool = False):
        d, h, arch = config.width, config.heads, config.arch
        e = config.head_dim or d // h
        g = config.kv_heads or h
        self.dtype = compute_dtype(config.dtype)
        self.kv_heads, self.head_dim = g, e
        base = config.rope_base
        if local and arch.local_rope_base:
            base, arch = arch.local_rope_base, replace(arch, rope_scaling="none")
        self.frequencies = functools.partial(rotary.frequencies, e, base, arch)
        self.cap = arch.attention_cap
        # attention divides by the root of e
        self.query_gain = (e / arch.query_scale) ** 0.5 if arch.query_scale else 1.0
        self.norm = Norm(config.norm, d, arch)
        linear = functools.partial(Linear, dtype=self.dtype, rngs=rngs)
        on = functools.partial(adapted, config.lora)
        kv = ("...d,dge->...ge", (d, g, e), d)
        self.q = linear("...d,dhe->...he", (d, h, e), d, bias=arch.qkv_bias, lora=on("attention.q"))
        self.k = linear(*kv, bias=arch.qkv_bias, lora=on("attention.k"))
        self.v = linear(*kv, bias=arch.qkv_bias, lora=on("attention.v"))
        self.q_norm = Norm("rmsnorm", e, arch) if arch.qk_norm else None
        self.k_norm = Norm("rmsnorm", e, arch) if arch.qk_norm else None
        gain = (2 * config.layers) ** -0.5
        out = ("...he,hed->...d", (h, e, d), h * e)
        self.out = linear(*out, gain=gain, bias=arch.out_bias, lora=on("attention.out"))
        self.post = Norm(config.norm, d, arch) if arch.post_norm else None

    def project(self, x: Array) -> tuple[Array, Array, Array]:
        """[... d] -> q [... h e], k [... g e], v [... g e], not yet rotated."""
        x = self.norm(x, self.dtype)
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, self.dtype), self.k_norm(k, self.dtype)
        return q if self.query_gain == 1 else q * self.query_gain, k, v

    def rotate(self, x: Array, positions: Array) -> Array:
        """Rotate [... t h e] to positions [... t], in tokens."""
        return rotary.rotate(x, rotary.angles(positions, self.frequencies())[..., None, :])

    def attend(self, q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        """SelfAttention(q, k, v) with this family's cap of the scores."""
        return attend(q, k, v, mask, self.cap)

    def merge(self, attended: Array, residual: Array) -> Array:
        """Project [... h e] back and add it to the residual [... d], in the residual's type."""
        y = self.out(attended)
        if self.post is not None:
            y = self.post(y, self.dtype)
        return y.astype(residual.dtype) + residual

    def encode_prompt(self, prompt: Array) -> Array:
        """Full attention among the f tokens of the FAM prompt (B.1): [f d] -> [f d].

        They stand at the last positions before the stream, -f to -1.
        """
        q, k, v = self.project(prompt)
        positions = jnp.arange(-prompt.shape[0], 0)
        attended = self.attend(self.rotate(q, positions), self.rotate(k, positions), v)
        return self.merge(attended, prompt)
