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
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from famjax.core.remat import keep_always
from famjax.core.types import Array
from famjax.ops.product import TAPE

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
def _using(tape: Any) -> Iterator[Any]:
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

    # a kernel is the same for all tokens: those of the first one are taken
    first = jax.tree.map(lambda a: a[0, 0], (cut, made))
    used: list[Product] = []

    def kernels(heavy: Any) -> list[Array]:
        (index, *x), made = first
        own = jax.tree.map(lambda a: _slots(a, _span(a, t), block), line)
        seen = Seen(_before(line, 0, t), own, index, index)
        with _using(Collecting(made)) as tape:
            token(heavy, light, seen, tuple(x))
        used[:] = [each for each in tape.used if each.of_weights]
        return [each.kernel for each in used]

    weights, to_heavy = jax.vjp(kernels, heavy)
    products = [of._replace(kernel=each) for of, each in zip(used, weights, strict=True)]
    turned = [of.turned() for of in products]

    def back(carry: Any, xs: Any) -> Any:
        to_line, to_weights, to_light = carry
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
                with _using(Replaying(turned, made, probes)):
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

        given = (heavy, light, before, own), (indices, x, rest), made, to_made
        weights_, before_ = _gradients(token, *given)
        to_weights = [a + b for a, b in zip(to_weights, weights_, strict=True)]
        to_line = jax.tree.map(lambda a, new: _added(a, new, index), to_line, before_)
        return (to_line, to_weights, to_light), to_x

    zeros = (
        [of.no_gradient() for of in products],
        jax.tree.map(lambda a: _wide(jnp.zeros_like(a)), light),
    )
    (to_line, to_weights, to_light), to_xs = jax.lax.scan(
        back, (to_line, *zeros), (cut, made, to_ys), reverse=True
    )
    (heavy_,) = to_heavy([of.straight(a) for of, a in zip(products, to_weights, strict=True)])
    to_line = jax.tree.map(lambda a: _slots(a, 0, _span(a, t)), to_line)
    found = jax.tree.map(lambda a, b: a.astype(b.dtype), (to_light, to_line), (light, line))
    return heavy_, *found, jax.tree.map(_joined, to_xs), None


loop.defvjp(_forward, _backward)


def _gradients(token: Token, given: Any, cut: Any, made: Any, to_made: Any) -> Any:
    """Return the gradients of the weights, one for each product, and of `before`, from a block."""
    heavy, light, before, own = given
    used: list[Product] = []

    def slots(before: Any) -> tuple[list[Array], list[Array]]:
        def products(xs: Any, made: Any) -> tuple[list[Array], list[Array]]:
            index, x, rest = xs
            place = index % jax.tree.leaves(own)[0].shape[SLOTS]
            with _using(Collecting(made)) as tape:
                token(heavy, light, Seen(before, own, place, index), (x, rest))
            used[:] = tape.used
            kernels = [each.kernel for each in tape.used if not each.of_weights]
            return kernels, [each.x for each in tape.used]

        # kernels depend on no token
        return jax.vmap(products, out_axes=(None, 0))(cut, made)

    kernels, to_before, inputs = jax.vjp(slots, before, has_aux=True)
    found = [of.gradient(x, y) for of, x, y in zip(used, inputs, to_made, strict=True)]
    of_slots = [a for of, a in zip(used, found, strict=True) if not of.of_weights]
    of_weights = [a for of, a in zip(used, found, strict=True) if of.of_weights]
    of_slots = [a.astype(k.dtype) for a, k in zip(of_slots, kernels, strict=True)]
    return of_weights, to_before(of_slots)[0]


# ------------------------------------------------------------------------------------------- turns

# (heavy, light, carry, (x, rest)) -> (carry, y): `heavy` is used in products of
# `famjax.ops.product` alone
Turn = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


def plain_turns(
    turn: Turn, heavy: Any, light: Any, carry: Any, xs: Any, rest: Any
) -> tuple[Any, Any]:
    """Return `jax.lax.scan` of a turn; see `turns`."""
    return jax.lax.scan(functools.partial(turn, heavy, light), carry, (xs, rest))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def turns(turn: Turn, heavy: Any, light: Any, carry: Any, xs: Any, rest: Any) -> tuple[Any, Any]:
    """Return `jax.lax.scan` of a turn whose backward pass knows what each turn began with.

    So all products are done again for all turns at once, and so are the gradients of weights: a
    weight is read once for either. From turn to turn goes the gradient of the carry alone.
    What is kept of the forward pass is kept where the layer is computed again too.

    Args:
      turn: of what the arrays are; it may not close over traced values.
      heavy: weights of products.
      light: weights of anything; their gradients are added up turn by turn.
      carry: small, of floating-point numbers.
      xs: pytree of [n ...], one for each turn.
      rest: pytree of [n ...] that has no gradient; a turn's x is (x, rest).

    Returns:
      the carry behind the last turn; ys, pytree of [n ...].
    """
    return _turns_forward(turn, heavy, light, carry, xs, rest)[0]


def _turns_forward(turn: Turn, heavy: Any, light: Any, carry: Any, xs: Any, rest: Any) -> Any:
    def one(carry: Any, x: Any) -> Any:
        new, y = turn(heavy, light, carry, x)
        return new, (y, carry)

    last, (ys, begun) = jax.lax.scan(one, carry, (xs, rest))
    last, ys, begun = jax.tree.map(keep_always, (last, ys, begun))
    return (last, ys), (heavy, light, begun, xs, rest)


def _turns_backward(turn: Turn, saved: Any, grads: Any) -> Any:
    heavy, light, begun, xs, rest = saved
    to_last, to_ys = grads

    def recorded(carry: Any, x: Any) -> list[Array]:
        with _using(Recording()) as tape:
            turn(heavy, light, carry, x)
        return tape.made

    made = jax.vmap(recorded)(begun, (xs, rest))
    used: list[Product] = []

    def kernels(heavy: Any) -> list[Array]:
        # a kernel is the same in all turns: those of the first one are taken
        carry, x, made_ = jax.tree.map(lambda a: a[0], (begun, (xs, rest), made))
        with _using(Collecting(made_)) as tape:
            turn(heavy, light, carry, x)
        used[:] = tape.used
        return [each.kernel for each in used]

    weights, to_heavy = jax.vjp(kernels, heavy)
    products = [of._replace(kernel=each) for of, each in zip(used, weights, strict=True)]
    turned = [of.turned() for of in products]

    def back(state: Any, of: Any) -> Any:
        to_carry, to_light = state
        carry, x, rest, made, to_y = of

        def f(light: Any, carry: Any, x: Any, probes: Any) -> Any:
            with _using(Replaying(turned, made, probes)):
                return turn(heavy, light, carry, (x, rest))

        probes = jax.tree.map(jnp.zeros_like, made)
        _, vjp = jax.vjp(f, light, carry, x, probes)
        light_, to_carry, to_x, to_made = vjp((to_carry, to_y))
        return (to_carry, jax.tree.map(jnp.add, to_light, light_)), (to_x, to_made)

    # sums over turns are wide, whatever the type of what they are gradients of
    zeros = jax.tree.map(lambda a: _wide(jnp.zeros_like(a)), light)
    (to_carry, to_light), (to_xs, to_made) = jax.lax.scan(
        back, (to_last, zeros), (begun, xs, rest, made, to_ys), reverse=True
    )

    def factors(carry: Any, x: Any, made: Any) -> list[Array]:
        with _using(Collecting(made)) as tape:
            turn(heavy, light, carry, x)
        return [each.x for each in tape.used]

    went_in = jax.vmap(factors)(begun, (xs, rest), made)
    found = [of.gradient(x, y) for of, x, y in zip(products, went_in, to_made, strict=True)]
    (heavy_,) = to_heavy([of.straight(a) for of, a in zip(products, found, strict=True)])
    light_ = jax.tree.map(lambda a, b: a.astype(b.dtype), to_light, light)
    return heavy_, light_, to_carry, to_xs, None


turns.defvjp(_turns_forward, _turns_backward)


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


def _before(line: Any, index: Any, t: int) -> Any:
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
