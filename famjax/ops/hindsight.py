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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from famjax.core.types import Array
from famjax.ops.tape import Collecting, Product, Recording, Replaying, using, weights_used, wide

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
            with using(Recording()) as tape:
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
    to_line = jax.tree.map(wide, to_line)
    t = jax.tree.leaves(to_ys)[0].shape[0]
    to_ys = jax.tree.map(lambda a: _blocks(a, block), to_ys)

    # a kernel is the same for all tokens: those of the first one are taken
    first = jax.tree.map(lambda a: a[0, 0], (cut, made))

    def run(heavy: Any) -> None:
        (index, *x), _ = first
        own = jax.tree.map(lambda a: _slots(a, _span(a, t), block), line)
        seen = Seen(_before(line, 0, t), own, index, index)
        token(heavy, light, seen, tuple(x))

    products, to_heavy = weights_used(run, first[1], heavy)
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
                with using(Replaying(turned, made, probes)):
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
        jax.tree.map(lambda a: wide(jnp.zeros_like(a)), light),
    )
    (to_line, to_weights, to_light), to_xs = jax.lax.scan(
        back, (to_line, *zeros), (cut, made, to_ys), reverse=True
    )
    to_line = jax.tree.map(lambda a: _slots(a, 0, _span(a, t)), to_line)
    found = jax.tree.map(lambda a, b: a.astype(b.dtype), (to_light, to_line), (light, line))
    return to_heavy(to_weights), *found, jax.tree.map(_joined, to_xs), None


loop.defvjp(_forward, _backward)


def _gradients(token: Token, given: Any, cut: Any, made: Any, to_made: Any) -> Any:
    """Return the gradients of the weights, one for each product, and of `before`, from a block."""
    heavy, light, before, own = given
    used: list[Product] = []

    def slots(before: Any) -> tuple[list[Array], list[Array]]:
        def products(xs: Any, made: Any) -> tuple[list[Array], list[Array]]:
            index, x, rest = xs
            place = index % jax.tree.leaves(own)[0].shape[SLOTS]
            with using(Collecting(made)) as tape:
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


# ------------------------------------------------------------------------------------------- slots


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
