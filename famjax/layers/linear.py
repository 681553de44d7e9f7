"""A linear map on named axes: one einsum and its kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.core.types import Array


class Linear(nnx.Module):
    """y = einsum(equation, x, kernel), without bias.

    Args:
      equation: for example "btd,dhe->bthe" written with an ellipsis, "...d,dhe->...he".
      shape: of the kernel.
      inputs: number of summed elements; the kernel starts as N(0, gain^2 / inputs).
    """

    def __init__(
        self,
        equation: str,
        shape: tuple[int, ...],
        inputs: int,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        gain: float = 1.0,
    ):
        self.equation = equation
        self.dtype = dtype
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), shape) * gain * inputs**-0.5)

    def __call__(self, x: Array) -> Array:
        return jnp.einsum(self.equation, x.astype(self.dtype), self.kernel[...].astype(self.dtype))
