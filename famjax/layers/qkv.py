"""What all softmax mixers share: PreLN, the projections, and the way back to the stream."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from famjax.core.config import ModelConfig
from famjax.core.types import Array, compute_dtype
from famjax.layers.linear import Linear
from famjax.layers.norm import Norm
from famjax.ops import rotary
from famjax.ops.attention import attend


class QKV(nnx.Module):
    """QKV(PreLN(x)) and the output projection, with rotary positions."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        d, h = config.width, config.heads
        e = config.head_dim or d // h
        g = config.kv_heads or h
        self.dtype = compute_dtype(config.dtype)
        self.kv_heads, self.head_dim, self.rope_base = g, e, config.rope_base
        self.norm = Norm(config.norm, d)
        self.q = Linear("...d,dhe->...he", (d, h, e), d, dtype=self.dtype, rngs=rngs)
        self.k = Linear("...d,dge->...ge", (d, g, e), d, dtype=self.dtype, rngs=rngs)
        self.v = Linear("...d,dge->...ge", (d, g, e), d, dtype=self.dtype, rngs=rngs)
        gain = (2 * config.layers) ** -0.5
        self.out = Linear(
            "...he,hed->...d", (h, e, d), h * e, dtype=self.dtype, rngs=rngs, gain=gain
        )

    def project(self, x: Array) -> tuple[Array, Array, Array]:
        """[... d] -> q [... h e], k [... g e], v [... g e], not yet rotated."""
        x = self.norm(x, self.dtype)
        return self.q(x), self.k(x), self.v(x)

    def rotate(self, x: Array, positions: Array) -> Array:
        """Rotate [... t h e] to positions [... t], in tokens."""
        return rotary.rotate(
            x, rotary.angles(positions, self.head_dim, self.rope_base)[..., None, :]
        )

    def merge(self, attended: Array, residual: Array) -> Array:
        """Project [... h e] back and add it to the residual [... d], in the residual's type."""
        return self.out(attended).astype(residual.dtype) + residual

    def encode_prompt(self, prompt: Array) -> Array:
        """Full attention among the f tokens of the FAM prompt (B.1): [f d] -> [f d].

        They stand at the last positions before the stream, -f to -1.
        """
        q, k, v = self.project(prompt)
        positions = jnp.arange(-prompt.shape[0], 0)
        attended = attend(self.rotate(q, positions), self.rotate(k, positions), v)
        return self.merge(attended, prompt)
