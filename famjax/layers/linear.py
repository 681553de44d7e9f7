"""A linear map on named axes: one einsum and its kernel."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.schema import LoraConfig
from famjax.core.remat import tag_product
from famjax.core.types import Array
from famjax.layers.lora import Adapter, Lora
from famjax.ops.weight_einsum import weight_einsum

# parameters that are only used in matrix products
MATMUL_PARAMS = nnx.Any(nnx.PathContains("kernel"), Adapter)


class Linear(nnx.Module):
    """y = einsum(equation, x, kernel), plus a bias if there is one.

    Args:
      equation: einsum with an ellipsis for the leading axes, such as "...d,dhe->...he".
      shape: shape of the kernel.
      inputs: fan-in; the kernel is initialized as N(0, gain^2 / inputs).
      lora: config of its adapters, if any.
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
        bias: bool = False,
        lora: LoraConfig | None = None,
    ):
        self.equation = equation
        self.dtype = dtype
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), shape) * gain * inputs**-0.5)
        num_outputs = len(equation.partition("->")[2].removeprefix("..."))
        self.bias = nnx.Param(jnp.zeros(shape[-num_outputs:])) if bias else None
        make_lora = functools.partial(Lora, equation, shape, inputs, dtype=dtype, rngs=rngs)
        self.lora = make_lora(lora) if lora else None

    def __call__(self, x: Array, out_dtype: jnp.dtype | None = None) -> Array:
        """Return y, in `out_dtype`, or in the layer's dtype if it is None."""
        kernel = self.kernel[...].astype(self.dtype)
        y = tag_product(weight_einsum(self.equation, x.astype(self.dtype), kernel, out_dtype))
        if self.bias is not None:
            y = y + self.bias[...].astype(self.dtype)
        return y if self.lora is None else y + self.lora(x)
