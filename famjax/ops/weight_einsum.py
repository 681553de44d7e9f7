"""One einsum of activations and a kernel, with a gradient that is fast on CPU too."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextvars import ContextVar

import jax
import jax.numpy as jnp

from famjax.core.types import Array

# what does the products of the loop that is being traced, if there is one
TAPE: ContextVar[Callable[[str, Array, Array], Array] | None] = ContextVar("TAPE", default=None)


def weight_einsum(equation: str, x: Array, kernel: Array) -> Array:
    """Return einsum(equation, x, kernel), where the gradient of the kernel is one fast product.

    Within a loop of `famjax.ops.token_scan` or `turns` that loop's tape does it, and takes the
    gradient behind the loop.

    Args:
      equation: "...ab,abcd->...cd": a, b of the input are summed.
    """
    tape = TAPE.get()
    return einsum_vjp(equation, x, kernel) if tape is None else tape(equation, x, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum_vjp(equation: str, x: Array, kernel: Array) -> Array:
    """Return what `weight_einsum` does outside of a loop.

    The kernel's gradient is a product over all tokens. XLA on CPU writes its first factor out
    transposed, and JAX puts the output's gradient first: four times as wide as the input in a
    feed-forward, where that copy took more time than the product. Here the narrower factor comes
    first. The price is that JAX's forward mode (`jax.jvp`) does not go through.
    """
    return jnp.einsum(equation, x, kernel)


def _forward(equation: str, x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return einsum_vjp(equation, x, kernel), (x, kernel)


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


einsum_vjp.defvjp(_forward, _backward)
