"""An einsum of activations and a kernel, with a custom VJP that is fast on CPU too.

Two forms of einsum are known to the tapes of `famjax.ops.einsum_tape`, and `is_weight_equation`
tells one from the other by the equation alone:

    kernel     "...A,AB->...B"   any leading dimensions, A contracted against the kernel's first
                                 dimensions; `weight_einsum`
    history    "X,Y->Z"          no "...": all dimensions are named, that of the rows too, and each
                                 is in two of the factors and the output, so that gradients are
                                 einsums; z is the tape's own axis of tokens;
                                 `famjax.ops.einsum_tape.history_einsum`
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jaxtyping import Float

from famjax.core.types import Array

# computes or replaces einsum(equation, x, kernel)
Tape = Callable[[str, Array, Array], Array]
# the tape of the scan body that is being traced, if any (`famjax.ops.einsum_tape`)
TAPE: ContextVar[Tape | None] = ContextVar("TAPE", default=None)


@functools.cache
def is_weight_equation(equation: str) -> bool:
    """Return whether an equation is of a kernel; otherwise it is of the history.

    Raises:
      ValueError: it has neither form; see the module.
    """
    if match := re.fullmatch(r"\.\.\.([a-zA-Z]+),([a-zA-Z]+)->\.\.\.([a-zA-Z]+)", equation):
        x, kernel, output = match.groups()
        if kernel == x + output and len({*kernel}) == len(kernel):
            return True
    elif match := re.fullmatch(r"([a-yA-Z]+),([a-yA-Z]+)->([a-yA-Z]+)", equation):
        x, entries, output = (frozenset(letters) for letters in match.groups())
        if x <= entries | output and entries <= x | output and output <= x | entries:
            return False
    raise ValueError(
        f"einsum {equation!r}: is neither of a kernel ('...A,AB->...B') nor of the history "
        "('X,Y->Z' without '...' and z)"
    )


def weight_einsum(
    equation: str, x: Float[Array, "..."], kernel: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Return einsum(equation, x, kernel), whose kernel gradient is one fast product.

    Within `famjax.ops.token_scan` or `deferred_scan` the scan's tape handles it, and defers the
    kernel's gradient.

    Args:
      equation: "...ab,abcd->...cd": a and b of the input are contracted.

    Raises:
      ValueError: the equation is not of a kernel (`is_weight_equation`).
    """
    if not is_weight_equation(equation):
        raise ValueError(f"weight_einsum: {equation!r} is of the history; use history_einsum")
    tape = TAPE.get()
    return einsum_vjp(equation, x, kernel) if tape is None else tape(equation, x, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def einsum_vjp(
    equation: str, x: Float[Array, "..."], kernel: Float[Array, "..."]
) -> Float[Array, "..."]:
    """Return `weight_einsum` outside of a scan.

    The kernel's gradient is a product over all tokens. XLA on CPU writes its first factor out
    transposed, and JAX puts the output's gradient first: four times as wide as the input in a
    feed-forward, where that copy took more time than the product. Here the narrower factor comes
    first. The cost: no forward-mode differentiation (`jax.jvp`).
    """
    return jnp.einsum(equation, x, kernel)


def _forward(equation: str, x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return einsum_vjp(equation, x, kernel), (x, kernel)


def _backward(equation: str, residuals: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    factors, output = equation.split("->")
    inputs, weights = factors.split(",")
    d_x = jnp.einsum(f"{output},{weights}->{inputs}", grad, kernel)
    contracted, outputs = inputs.removeprefix("..."), output.removeprefix("...")
    fan_in = math.prod(kernel.shape[: len(contracted)])
    if fan_in**2 <= kernel.size:
        return d_x, jnp.einsum(f"{inputs},{output}->{weights}", x, grad)
    d_kernel = jnp.einsum(f"{output},{inputs}->{outputs}{contracted}", grad, x)
    return d_x, jnp.einsum(f"{outputs}{contracted}->{weights}", d_kernel)


einsum_vjp.defvjp(_forward, _backward)
