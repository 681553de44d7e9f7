"""Who does the products of a loop, forward, backward, and for the gradients of weights behind it.

While a loop is traced, `famjax.ops.weight_einsum.TAPE` has one of the tapes here, and every product
of a weight or of slots goes through it: one records its output, one replays that output and lets
gradients through, one collects its input.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from famjax.core.types import Array
from famjax.ops.weight_einsum import TAPE


def slot_einsum(equation: str, x: Array, slots: Array) -> Array:
    """Return einsum(equation, x, slots) of one token and the slots before its block.

    In float32 or wider.
    """
    tape = TAPE.get()
    return einsum(equation, x, slots) if tape is None else tape(equation, x, slots)


def einsum(equation: str, x: Array, kernel: Array) -> Array:
    """Return the einsum; products with slots come out wide, those with weights as they went in."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    kind = x.dtype if equation.startswith("...") else wide
    return jnp.einsum(equation, x, kernel, preferred_element_type=kind)


class RecordTape:
    """The forward pass: does every product and remembers what came out."""

    def __init__(self) -> None:
        self.outputs: list[Array] = []

    def __call__(self, equation: str, x: Array, kernel: Array) -> Array:
        self.outputs.append(einsum(equation, x, kernel))
        return self.outputs[-1]


class ReplayTape:
    """The backward pass through one token: every product is known; probes take their gradients.

    Args:
      turned: matrices of the weights' products, [m n].
    """

    def __init__(self, transposed: list[Array], outputs: list[Array], probes: list[Array]):
        self._turned = iter(transposed)
        self._left = iter(zip(outputs, probes, strict=True))

    def __call__(self, equation: str, x: Array, kernel: Array) -> Array:
        back = next(self._turned) if equation.startswith("...") else kernel
        return _replayed(equation, x, back, *next(self._left))


class CollectTape:
    """The kernels' gradients: what went into every product, and its kernel."""

    def __init__(self, outputs: list[Array]):
        self._left = iter(outputs)
        self.used: list[WeightEinsum] = []

    def __call__(self, equation: str, x: Array, kernel: Array) -> Array:
        self.used.append(WeightEinsum(equation, x, kernel))
        return next(self._left)


@contextmanager
def use_tape(tape: Any) -> Iterator[Any]:
    """Let a tape do the products of what is traced inside."""
    token = TAPE.set(tape)
    try:
        yield tape
    finally:
        TAPE.reset(token)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _replayed(equation: str, x: Array, back: Array, outputs: Array, probe: Array) -> Array:
    """Return `outputs`, which is einsum(equation, x, kernel); the probe's gradient is its own.

    Args:
      back: the slots, or the weights turned.
    """
    return outputs


def _replayed_forward(equation: str, x: Array, back: Array, outputs: Array, probe: Array) -> Any:
    # of x the shape and the type alone, which no residual can be
    return outputs, (jnp.zeros((0, *x.shape), x.dtype), back)


def _replayed_backward(equation: str, saved: tuple[Array, Array], grad: Array) -> Any:
    like, back = saved
    if equation.startswith("..."):
        to_x = (grad.reshape(-1, len(back)) @ back).reshape(like.shape[1:])
    else:
        inputs, slots, output = _subscripts(equation)
        to_x = jnp.einsum(f"{output},{slots}->{inputs}", grad, back)
    return to_x.astype(like.dtype), None, None, grad


_replayed.defvjp(_replayed_forward, _replayed_backward)


# ---------------------------------------------------------------------------------------- products


class WeightEinsum(NamedTuple):
    """An einsum, with slots or with weights.

    Weights "abcd" of "...ab,abcd->...cd" are seen as a matrix [ab cd] of n rows and m columns.
    """

    equation: str
    x: Array
    kernel: Array

    @property
    def is_weight(self) -> bool:
        return self.equation.startswith("...")

    @property
    def size(self) -> tuple[int, int]:
        """Return (n, m)."""
        shape, summed = self.kernel.shape, len(_subscripts(self.equation)[0].removeprefix("..."))
        return math.prod(shape[:summed]), math.prod(shape[summed:])

    def transposed(self) -> Array:
        """Return the weights as [m n]."""
        return self.kernel.reshape(self.size).T

    def gradient(self, x: Array, grad: Array) -> Array:
        """Return the kernel's gradient from the tokens of a block: x and grad are [c ...].

        That of weights is turned, [m n], where n > m: the narrower factor is to be the first one,
        which XLA on CPU writes out transposed.
        """
        wide = jnp.promote_types(x.dtype, jnp.float32)
        if not self.is_weight:
            inputs, slots, output = _subscripts(self.equation)
            equation = f"z{inputs},z{output}->{slots}"
            return jnp.einsum(equation, x, grad, preferred_element_type=wide)
        n, m = self.size
        x, grad = x.reshape(-1, n), grad.reshape(-1, m)
        first, second = (x, grad) if n <= m else (grad, x)
        return jnp.einsum("ri,ro->io", first, second, preferred_element_type=wide)

    def zero_gradient(self) -> Array:
        """Return 0 in the shape and type of `gradient`, of weights."""
        return jnp.zeros(sorted(self.size), jnp.promote_types(self.kernel.dtype, jnp.float32))

    def untransposed(self, grad: Array) -> Array:
        """Return the sum of gradients as the weights are shaped, in their type."""
        n, m = self.size
        grad = grad if n <= m else grad.T
        return grad.reshape(self.kernel.shape).astype(self.kernel.dtype)


def _subscripts(equation: str) -> tuple[str, str, str]:
    """Return "x", "y" and "z" of "x,y->z"."""
    factors, output = equation.split("->")
    inputs, kernel = factors.split(",")
    return inputs, kernel, output


def at_least_float32(a: Array) -> Array:
    """Return an array in float32, or in its own type if that is wider."""
    return a.astype(jnp.promote_types(a.dtype, jnp.float32))


def used_weights(
    f: Callable[[Any], Any], outputs: list[Array], matmul_params: Any
) -> tuple[list[WeightEinsum], Callable[[list[Array]], Any]]:
    """Return f's products with weights, and the map from their gradients to those of the weights.

    Args:
      f: of `matmul_params`.
      made: what came out of its products.
    """
    used: list[WeightEinsum] = []

    def kernels(matmul_params: Any) -> list[Array]:
        with use_tape(CollectTape(outputs)) as tape:
            f(matmul_params)
        used[:] = [each for each in tape.used if each.is_weight]
        return [each.kernel for each in used]

    weights, to_heavy = jax.vjp(kernels, matmul_params)
    products = [of._replace(kernel=each) for of, each in zip(used, weights, strict=True)]

    def back(grads: list[Array]) -> Any:
        untransposed = [of.untransposed(a) for of, a in zip(products, grads, strict=True)]
        return to_heavy(untransposed)[0]

    return products, back
