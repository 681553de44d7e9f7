"""A loop over tokens whose gradient knows in hindsight what the loop has written.

A Feedback Transformer reads a token, writes its memory, and reads the next one: forward nothing is
parallel. But once the forward pass is done, all keys and values are known. So the backward pass

1. goes through the tokens in reverse, a token's products taken from the forward pass as they came
   out, and carries the gradient of the memory alone;
2. takes the gradient of all weights, block by block, in single products over the block's tokens.

Plain differentiation of the loop would keep the memory once a token, and add up the gradient of
every weight once a token.

Terms: the line is what is remembered, oldest first: `span` slots from before the call, then one for
each of its tokens. A token of a block sees a window of the line: the `span` slots before the block,
which lie still while the block is read ("before"), and those of the block so far ("own"). Each
array of a line may have a span of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from famjax.core.types import Array
from famjax.ops.product import TAPE, fast_product

# the axis of the slots in the arrays of a line: [b g n e], and in [b n d]
SLOTS = -2


class Seen(NamedTuple):
    """What a token sees of the line.

    Attributes:
      before: pytree of [... span e], the slots before the block.
      own: pytree of [... c e], the slots of the block; those that are not written yet are zero in
        the forward pass, and known in the backward pass: the token must not look at them.
      place: scalar, the token's place in its block.
      at: scalar, the token's place in the call.
    """

    before: Any
    own: Any
    place: Array
    at: Array


# (heavy, light, seen, x) -> (y, slots): `heavy` and `seen.before` are used in products alone (those
# of `famjax.ops.product`, and of `slot_product`); slots are what is written, pytree of [... e]
Token = Callable[[Any, Any, Seen, Any], tuple[Any, Any]]


def slot_product(equation: str, x: Array, slots: Array) -> Array:
    """Return einsum(equation, x, slots) of one token and the slots before its block.

    In float32 or wider.
    """
    tape = TAPE.get()
    return _einsum(equation, x, slots) if tape is None else tape(equation, x, slots)


def _einsum(equation: str, x: Array, kernel: Array) -> Array:
    """Return the einsum; products with slots come out wide, those with weights as they went in."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    kind = x.dtype if equation.startswith("...") else wide
    return jnp.einsum(equation, x, kernel, preferred_element_type=kind)


# ------------------------------------------------------------------------------------------- tapes


class Recording:
    """The forward pass: does every product and remembers what came out."""

    def __init__(self) -> None:
        self.made: list[Array] = []

    def __call__(self, equation: str, x: Array, kernel: Array) -> Array:
        self.made.append(_einsum(equation, x, kernel))
        return self.made[-1]


class Replaying:
    """The backward pass through one token: every product is known; probes take their gradients."""

    def __init__(self, made: list[Array], probes: list[Array]):
        self._left = iter(zip(made, probes, strict=True))

    def __call__(self, equation: str, x: Array, kernel: Array) -> Array:
        made, probe = next(self._left)
        return _known(equation, x, kernel, made, probe)


class Collecting:
    """The weights' gradients: what went into every product, and its kernel."""

    def __init__(self, made: list[Array]):
        self._left = iter(made)
        self.equations: list[str] = []
        self.inputs: list[Array] = []
        self.kernels: list[Array] = []

    def __call__(self, equation: str, x: Array, kernel: Array) -> Array:
        self.equations.append(equation)
        self.inputs.append(x)
        self.kernels.append(kernel)
        return next(self._left)


@contextmanager
def _using(tape: Any) -> Iterator[Any]:
    token = TAPE.set(tape)
    try:
        yield tape
    finally:
        TAPE.reset(token)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _known(equation: str, x: Array, kernel: Array, made: Array, probe: Array) -> Array:
    """Return `made`, which is einsum(equation, x, kernel); the probe's gradient is its own."""
    return made


def _known_forward(equation: str, x: Array, kernel: Array, made: Array, probe: Array) -> Any:
    return made, (jnp.zeros((), x.dtype), kernel)


def _known_backward(equation: str, saved: tuple[Array, Array], grad: Array) -> Any:
    like, kernel = saved
    factors, output = equation.split("->")
    inputs, weights = factors.split(",")
    to_x = jnp.einsum(f"{output},{weights}->{inputs}", grad, kernel)
    return to_x.astype(like.dtype), None, None, grad


_known.defvjp(_known_forward, _known_backward)


# -------------------------------------------------------------------------------------------- loop


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def loop(
    token: Token, block: int, heavy: Any, light: Any, line: Any, xs: Any, rest: Any
) -> tuple[Any, Any]:
    """Read tokens one by one.

    Args:
      token: of what the arrays are; it may not close over traced values.
      block: tokens between two gradients of the weights; divides t.
      heavy: weights of products, whose gradients are taken block by block.
      light: weights of anything; their gradients are added up token by token.
      line: pytree of [... span e], the slots from before the call.
      xs: pytree of [t ...], one for each token.
      rest: pytree of [t ...] that has no gradient; a token's x is (x, rest).

    Returns:
      ys, pytree of [t ...]; the line [... span+t e].
    """
    return _forward(token, block, heavy, light, line, xs, rest)[0]


def _forward(
    token: Token, block: int, heavy: Any, light: Any, line: Any, xs: Any, rest: Any
) -> Any:
    t = jax.tree.leaves(xs)[0].shape[0]
    line = jax.tree.map(lambda a: _longer(a, t), line)

    def read(line: Any, xs: Any) -> Any:
        (index, *_), _, _ = xs
        before = _before(line, index, t)
        own = jax.tree.map(lambda a: jnp.zeros_like(_slots(a, 0, block)), line)

        def one(own: Any, xs: Any) -> Any:
            index, x, rest = xs
            place = index % block
            with _using(Recording()) as tape:
                seen = Seen(before, own, place, index)
                y, slots = token(heavy, light, seen, (x, rest))
            return jax.tree.map(lambda a, s: _written(a, s, place), own, slots), (y, tape.made)

        own, out = jax.lax.scan(one, own, xs)
        line = jax.tree.map(lambda a, new: _put(a, new, index + _span(a, t)), line, own)
        return line, out

    cut = jax.tree.map(lambda a: _blocks(a, block), (jnp.arange(t), xs, rest))
    line, (ys, made) = jax.lax.scan(read, line, cut)
    ys = jax.tree.map(_joined, ys)
    return (ys, line), (heavy, light, line, cut, made)


def _backward(token: Token, block: int, saved: Any, grads: Any) -> Any:
    heavy, light, line, cut, made = saved
    to_ys, to_line = grads
    # sums over tokens and blocks are wide, whatever the type of what they are gradients of
    to_line = jax.tree.map(_wide, to_line)
    t = jax.tree.leaves(to_ys)[0].shape[0]
    to_ys = jax.tree.map(lambda a: _blocks(a, block), to_ys)

    def back(carry: Any, xs: Any) -> Any:
        to_line, to_heavy, to_light = carry
        (indices, x, rest), made, to_y = xs
        index = indices[0]
        before = _before(line, index, t)
        own, to_own = (
            jax.tree.map(lambda a: _slots(a, index + _span(a, t), block), of)
            for of in (line, to_line)
        )

        def one(carry: Any, xs: Any) -> Any:
            to_own, to_light = carry
            (index, x, rest), made, to_y = xs
            place = index % block

            def f(light: Any, own: Any, x: Any, probes: Any) -> Any:
                with _using(Replaying(made, probes)):
                    return token(heavy, light, Seen(before, own, place, index), (x, rest))

            probes = jax.tree.map(jnp.zeros_like, made)
            to_slots = jax.tree.map(lambda a, b: _read(a, place).astype(b.dtype), to_own, own)
            _, vjp = jax.vjp(f, light, own, x, probes)
            light_, own_, to_x, to_made = vjp((to_y, to_slots))
            add = functools.partial(jax.tree.map, jnp.add)
            return (add(to_own, own_), add(to_light, light_)), (to_x, to_made)

        (_, to_light), (to_x, to_made) = jax.lax.scan(
            one, (to_own, to_light), ((indices, x, rest), made, to_y), reverse=True
        )

        def products(heavy: Any, before: Any) -> Array:
            return _weighted(token, (heavy, light, before, own), (indices, x, rest), made, to_made)

        heavy_, before_ = jax.grad(products, argnums=(0, 1))(heavy, before)
        to_heavy = jax.tree.map(jnp.add, to_heavy, heavy_)
        to_line = jax.tree.map(lambda a, new: _added(a, new, index), to_line, before_)
        return (to_line, to_heavy, to_light), to_x

    zeros = jax.tree.map(lambda a: _wide(jnp.zeros_like(a)), (heavy, light))
    (to_line, to_heavy, to_light), to_xs = jax.lax.scan(
        back, (to_line, *zeros), (cut, made, to_ys), reverse=True
    )
    to_line = jax.tree.map(lambda a: _slots(a, 0, _span(a, t)), to_line)
    found = (to_heavy, to_light, to_line)
    found = jax.tree.map(lambda a, b: a.astype(b.dtype), found, (heavy, light, line))
    return *found, jax.tree.map(_joined, to_xs), None


loop.defvjp(_forward, _backward)


def _weighted(token: Token, given: Any, cut: Any, made: Any, to_made: Any) -> Array:
    """Return the sum over a block's products of <gradient of the result, result>.

    Its gradient with respect to a kernel is that kernel's.
    """
    heavy, light, before, own = given
    kernels: list[Array] = []
    equations: list[str] = []

    def inputs(xs: Any, made: Any) -> list[Array]:
        index, x, rest = xs
        place = index % jax.tree.leaves(own)[0].shape[SLOTS]
        with _using(Collecting(made)) as tape:
            token(heavy, light, Seen(before, own, place, index), (x, rest))
        # what depends on no token is not mapped over
        kernels[:], equations[:] = tape.kernels, tape.equations
        return tape.inputs

    read = jax.lax.stop_gradient(jax.vmap(inputs)(cut, made))
    total = jnp.zeros(())
    for equation, x, kernel, to_y in zip(equations, read, kernels, to_made, strict=True):
        if equation.startswith("..."):
            y = fast_product(equation, x, kernel)
        else:
            y = jax.vmap(functools.partial(_einsum, equation), (0, None))(x, kernel)
        total = total + (y * to_y).sum(dtype=total.dtype)
    return total


# ------------------------------------------------------------------------------------------- slots


def _wide(a: Array) -> Array:
    return a.astype(jnp.promote_types(a.dtype, jnp.float32))


def _longer(line: Array, t: int) -> Array:
    widths = [(0, 0)] * line.ndim
    widths[SLOTS] = (0, t)
    return jnp.pad(line, widths)


def _slots(line: Array, start: Any, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(line, start, size, line.ndim + SLOTS)


def _span(line: Array, t: int) -> int:
    """Return the slots of a line that are from before the call."""
    return line.shape[SLOTS] - t


def _before(line: Any, index: Array, t: int) -> Any:
    """Return what a block at `index` sees of the slots before it."""
    return jax.tree.map(lambda a: _slots(a, index, _span(a, t)), line)


def _put(line: Array, new: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(line, new, start, line.ndim + SLOTS)


def _added(line: Array, new: Array, start: Array) -> Array:
    return _put(line, _slots(line, start, new.shape[SLOTS]) + new, start)


def _written(line: Array, slot: Array, place: Array) -> Array:
    return _put(line, jnp.expand_dims(slot.astype(line.dtype), SLOTS), place)


def _read(line: Array, place: Array) -> Array:
    return jnp.squeeze(_slots(line, place, 1), line.ndim + SLOTS)


def _blocks(a: Array, block: int) -> Array:
    """[t ...] -> [n c ...]."""
    return a.reshape(-1, block, *a.shape[1:])


def _joined(a: Array) -> Array:
    return a.reshape(-1, *a.shape[2:])
