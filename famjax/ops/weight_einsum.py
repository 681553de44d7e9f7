"""An einsum of activations and a kernel, with a custom VJP that is fast on CPU too.

The tapes of `famjax.ops.einsum_tape` handle two forms of einsum, which `is_weight_equation`
distinguishes by the equation alone:

    kernel     "...A,AB->...B"   `weight_einsum`: any leading dimensions; A is contracted with the
                                 kernel's first dimensions
    history    "X,Y->Z"          `famjax.ops.einsum_tape.history_einsum`: no "...", all dimensions
                                 are named, rows included; each occurs in at least two of X, Y and
                                 Z, so that gradients are einsums; the letter z is reserved for the
                                 tape's axis of tokens
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
from famjax.parallel.traced import target_device

# computes or replaces einsum(equation, x, kernel)
Tape = Callable[[str, Array, Array], Array]
# the tape of the scan body that is being traced, if any (`famjax.ops.einsum_tape`)
TAPE: ContextVar[Tape | None] = ContextVar("TAPE", default=None)


@functools.cache
def is_weight_equation(equation: str) -> bool:
    """Return whether an equation has the form of one with a kernel, else with the history.

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
    equation: str,
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
    out_dtype: jnp.dtype | None = None,
) -> Float[Array, "..."]:
    """Return einsum(equation, x, kernel), whose kernel gradient is one fast product.

    Within `famjax.ops.token_scan` or `deferred_scan` the scan's tape handles the einsum, and defers
    the kernel's gradient.

    Args:
      equation: such as "...ab,abcd->...cd", which contracts a and b.
      out_dtype: dtype of the result, in which products are summed; None is x's. Gradients are
        rounded to x's dtype. It must be None within a scan.

    Raises:
      ValueError: the equation does not have the form of one with a kernel (`is_weight_equation`),
        or `out_dtype` is given within a scan.
    """
    if not is_weight_equation(equation):
        raise ValueError(f"weight_einsum: {equation!r} is of the history; use history_einsum")
    tape = TAPE.get()
    if tape is None:
        return einsum_vjp(equation, out_dtype, x, kernel)
    if out_dtype is not None:
        raise ValueError("weight_einsum: out_dtype is not possible within a scan")
    return tape(equation, x, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def einsum_vjp(
    equation: str,
    out_dtype: jnp.dtype | None,
    x: Float[Array, "..."],
    kernel: Float[Array, "..."],
) -> Float[Array, "..."]:
    """Return einsum(equation, x, kernel), as `weight_einsum` computes it outside of a scan.

    The kernel's gradient is a product over all tokens. XLA on CPU writes out the transpose of its
    first factor, and JAX's own gradient puts the output's gradient first. In a feed-forward that is
    four times as wide as the input, and the copy took more time than the product. Here the narrower
    factor comes first, and `_materialize` keeps XLA from fusing it with its copy. The cost is that
    forward-mode differentiation (`jax.jvp`) is not supported.
    """
    return jnp.einsum(equation, x, kernel, preferred_element_type=out_dtype)


def _forward(
    equation: str, out_dtype: jnp.dtype | None, x: Array, kernel: Array
) -> tuple[Array, tuple[Array, Array]]:
    return einsum_vjp(equation, out_dtype, x, kernel), (x, kernel)


def _backward(
    equation: str, out_dtype: jnp.dtype | None, residuals: tuple[Array, Array], grad: Array
) -> tuple[Array, Array]:
    x, kernel = residuals
    grad = grad.astype(x.dtype)
    factors, output = equation.split("->")
    inputs, weights = factors.split(",")
    d_x = jnp.einsum(f"{output},{weights}->{inputs}", grad, kernel)
    contracted, outputs = inputs.removeprefix("..."), output.removeprefix("...")
    fan_in = math.prod(kernel.shape[: len(contracted)])
    if fan_in**2 <= kernel.size:
        return d_x, jnp.einsum(f"{inputs},{output}->{weights}", _materialize(x), grad)
    d_kernel = jnp.einsum(f"{output},{inputs}->{outputs}{contracted}", _materialize(grad), x)
    return d_x, jnp.einsum(f"{outputs}{contracted}->{weights}", d_kernel)


def _materialize(x: Array) -> Array:
    """Return x; on CPU, XLA does not fuse what computes it with the copy that transposes it.

    Such a fusion writes its elements one by one, far apart, which takes several times as long.
    """
    return jax.lax.optimization_barrier(x) if target_device().platform == "cpu" else x


einsum_vjp.defvjp(_forward, _backward)
