"""Who does the products of a loop, forward, backward, and for the gradients of weights behind it.

While a loop is traced, `famjax.ops.product.TAPE` has one of the tapes here, and every product of a
weight or of slots goes through it: one remembers what came out, one takes that as known and lets
gradients through, one collects what went in.
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
from famjax.ops.product import TAPE


def slot_product(equation: str, x: Array, slots: Array) -> Array:
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


class Recording:
    """The forward pass: does every product and remembers what came out."""

    def __init__(self) -> None:
        self.made: list[Array] = []

    def __call__(self, equation: str, x: Array, kernel: Array) -> Array:
        self.made.append(einsum(equation, x, kernel))
        return self.made[-1]


class Replaying:
    """The backward pass through one token: every product is known; probes take their gradients.

    Args:
      turned: matrices of the weights' products, [m n].
    """

    def __init__(self, turned: list[Array], made: list[Array], probes: list[Array]):
        self._turned = iter(turned)
        self._left = iter(zip(made, probes, strict=True))

    def __call__(self, equation: str, x: Array, kernel: Array) -> Array:
        back = next(self._turned) if equation.startswith("...") else kernel
        return _known(equation, x, back, *next(self._left))


class Collecting:
    """The kernels' gradients: what went into every product, and its kernel."""

    def __init__(self, made: list[Array]):
        self._left = iter(made)
        self.used: list[Product] = []

    def __call__(self, equation: str, x: Array, kernel: Array) -> Array:
        self.used.append(Product(equation, x, kernel))
        return next(self._left)


@contextmanager
def using(tape: Any) -> Iterator[Any]:
    """Let a tape do the products of what is traced inside."""
    token = TAPE.set(tape)
    try:
        yield tape
    finally:
        TAPE.reset(token)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _known(equation: str, x: Array, back: Array, made: Array, probe: Array) -> Array:
    """Return `made`, which is einsum(equation, x, kernel); the probe's gradient is its own.

    Args:
      back: the slots, or the weights turned.
    """
    return made


def _known_forward(equation: str, x: Array, back: Array, made: Array, probe: Array) -> Any:
    # of x the shape and the type alone, which no residual can be
    return made, (jnp.zeros((0, *x.shape), x.dtype), back)


def _known_backward(equation: str, saved: tuple[Array, Array], grad: Array) -> Any:
    like, back = saved
    if equation.startswith("..."):
        to_x = (grad.reshape(-1, len(back)) @ back).reshape(like.shape[1:])
    else:
        inputs, slots, output = _terms(equation)
        to_x = jnp.einsum(f"{output},{slots}->{inputs}", grad, back)
    return to_x.astype(like.dtype), None, None, grad


_known.defvjp(_known_forward, _known_backward)


# ---------------------------------------------------------------------------------------- products


class Product(NamedTuple):
    """An einsum, with slots or with weights.

    Weights "abcd" of "...ab,abcd->...cd" are seen as a matrix [ab cd] of n rows and m columns.
    """

    equation: str
    x: Array
    kernel: Array

    @property
    def of_weights(self) -> bool:
        return self.equation.startswith("...")

    @property
    def size(self) -> tuple[int, int]:
        """Return (n, m)."""
        shape, summed = self.kernel.shape, len(_terms(self.equation)[0].removeprefix("..."))
        return math.prod(shape[:summed]), math.prod(shape[summed:])

    def turned(self) -> Array:
        """Return the weights as [m n]."""
        return self.kernel.reshape(self.size).T

    def gradient(self, x: Array, grad: Array) -> Array:
        """Return the kernel's gradient from the tokens of a block: x and grad are [c ...].

        That of weights is turned, [m n], where n > m: the narrower factor is to be the first one,
        which XLA on CPU writes out transposed.
        """
        wide = jnp.promote_types(x.dtype, jnp.float32)
        if not self.of_weights:
            inputs, slots, output = _terms(self.equation)
            equation = f"z{inputs},z{output}->{slots}"
            return jnp.einsum(equation, x, grad, preferred_element_type=wide)
        n, m = self.size
        x, grad = x.reshape(-1, n), grad.reshape(-1, m)
        first, second = (x, grad) if n <= m else (grad, x)
        return jnp.einsum("ri,ro->io", first, second, preferred_element_type=wide)

    def no_gradient(self) -> Array:
        """Return 0 in the shape and type of `gradient`, of weights."""
        return jnp.zeros(sorted(self.size), jnp.promote_types(self.kernel.dtype, jnp.float32))

    def straight(self, grad: Array) -> Array:
        """Return the sum of gradients as the weights are shaped, in their type."""
        n, m = self.size
        grad = grad if n <= m else grad.T
        return grad.reshape(self.kernel.shape).astype(self.kernel.dtype)


def _terms(equation: str) -> tuple[str, str, str]:
    """Return "x", "y" and "z" of "x,y->z"."""
    factors, output = equation.split("->")
    inputs, kernel = factors.split(",")
    return inputs, kernel, output


def wide(a: Array) -> Array:
    """Return an array in float32, or in its own type if that is wider."""
    return a.astype(jnp.promote_types(a.dtype, jnp.float32))


def weights_used(
    f: Callable[[Any], Any], made: list[Array], heavy: Any
) -> tuple[list[Product], Callable[[list[Array]], Any]]:
    """Return the products with weights that f does, and how their gradients become `heavy`'s.

    Args:
      f: of `heavy`.
      made: what came out of its products.
    """
    used: list[Product] = []

    def kernels(heavy: Any) -> list[Array]:
        with using(Collecting(made)) as tape:
            f(heavy)
        used[:] = [each for each in tape.used if each.of_weights]
        return [each.kernel for each in used]

    weights, to_heavy = jax.vjp(kernels, heavy)
    products = [of._replace(kernel=each) for of, each in zip(used, weights, strict=True)]

    def back(grads: list[Array]) -> Any:
        straight = [of.straight(a) for of, a in zip(products, grads, strict=True)]
        return to_heavy(straight)[0]

    return products, back
