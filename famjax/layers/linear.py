"""A linear map on named axes: one einsum and its kernel."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.core.config import LoraConfig
from famjax.core.remat import keep
from famjax.core.types import Array
from famjax.layers.lora import Lora


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(equation: str, x: Array, kernel: Array) -> Array:
    """Return einsum(equation, x, kernel), where the gradient of the kernel is one fast product.

    That gradient is a product over all tokens. XLA on CPU writes its first factor out transposed,
    and JAX puts the output's gradient first: four times as wide as the input in a feed-forward,
    where that copy took more time than the product. Here the narrower factor comes first. The price
    is that JAX's forward mode (`jax.jvp`) does not go through.

    Args:
      equation: "...ab,abcd->...cd": a, b of the input are summed.
    """
    return jnp.einsum(equation, x, kernel)


def _forward(equation: str, x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return product(equation, x, kernel), (x, kernel)


def _backward(equation: str, saved: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, kernel = saved
    factors, output = equation.split("->")
    inputs, weights = factors.split(",")
    to_input = jnp.einsum(f"{output},{weights}->{inputs}", grad, kernel)
    summed, made = inputs.removeprefix("..."), output.removeprefix("...")
    into = math.prod(kernel.shape[: len(summed)])
    if into**2 <= kernel.size:
        return to_input, jnp.einsum(f"{inputs},{output}->{weights}", x, grad)
    to_kernel = jnp.einsum(f"{output},{inputs}->{made}{summed}", grad, x)
    return to_input, jnp.einsum(f"{made}{summed}->{weights}", to_kernel)


product.defvjp(_forward, _backward)


class Linear(nnx.Module):
    """y = einsum(equation, x, kernel), plus a bias if there is one.

    Args:
      equation: for example "btd,dhe->bthe" written with an ellipsis, "...d,dhe->...he".
      shape: of the kernel.
      inputs: number of summed elements; the kernel starts as N(0, gain^2 / inputs).
      lora: of adapters beside it, if it has them.
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
        made = len(equation.partition("->")[2].removeprefix("..."))
        self.bias = nnx.Param(jnp.zeros(shape[-made:])) if bias else None
        beside = functools.partial(Lora, equation, shape, inputs, dtype=dtype, rngs=rngs)
        self.lora = beside(lora) if lora else None

    def __call__(self, x: Array) -> Array:
        kernel = self.kernel[...].astype(self.dtype)
        y = keep(product(self.equation, x.astype(self.dtype), kernel))
        if self.bias is not None:
            y = y + self.bias[...].astype(self.dtype)
        return y if self.lora is None else y + self.lora(x)
