"""RMSNorm and LayerNorm over the width, computed in float32."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from flax import nnx

from famjax.config.schema import ArchConfig
from famjax.core.types import Array, at_least_float32


class Norm(nnx.Module):
    """Normalize [... d] by its root mean square, or by its mean and variance."""

    def __init__(self, kind: Literal["rmsnorm", "layernorm"], width: int, arch: ArchConfig):
        self.eps = arch.norm_eps
        self.plus = 1.0 if arch.norm_plus_one and kind == "rmsnorm" else 0.0
        self.scale = nnx.Param(jnp.zeros((width,)) if self.plus else jnp.ones((width,)))
        self.bias = nnx.Param(jnp.zeros((width,))) if kind == "layernorm" else None

    def __call__(self, x: Array, dtype: jnp.dtype) -> Array:
        x32 = at_least_float32(x)
        if self.bias is not None:
            x32 = x32 - x32.mean(-1, keepdims=True)
        y = x32 * jnp.reciprocal(jnp.sqrt(jnp.square(x32).mean(-1, keepdims=True) + self.eps))
        y = y * (self.scale[...] + self.plus)
        if self.bias is not None:
            y = y + self.bias[...]
        return y.astype(dtype)
