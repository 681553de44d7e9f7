"""A loop over blocks whose backward pass does all products of all turns at once.

As `famjax.ops.hindsight` does it for tokens. A turn has a carry, and no memory that grows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from famjax.core.remat import keep_always
from famjax.core.types import Array
from famjax.ops.tape import Collecting, Recording, Replaying, using, weights_used, wide

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
    return _forward(turn, heavy, light, carry, xs, rest)[0]


def _forward(turn: Turn, heavy: Any, light: Any, carry: Any, xs: Any, rest: Any) -> Any:
    def one(carry: Any, x: Any) -> Any:
        new, y = turn(heavy, light, carry, x)
        return new, (y, carry)

    last, (ys, begun) = jax.lax.scan(one, carry, (xs, rest))
    last, ys, begun = jax.tree.map(keep_always, (last, ys, begun))
    return (last, ys), (heavy, light, begun, xs, rest)


def _backward(turn: Turn, saved: Any, grads: Any) -> Any:
    heavy, light, begun, xs, rest = saved
    to_last, to_ys = grads

    def recorded(carry: Any, x: Any) -> list[Array]:
        with using(Recording()) as tape:
            turn(heavy, light, carry, x)
        return tape.made

    made = jax.vmap(recorded)(begun, (xs, rest))
    # a kernel is the same in all turns: those of the first one are taken
    first = jax.tree.map(lambda a: a[0], (begun, (xs, rest), made))
    products, to_heavy = weights_used(lambda w: turn(w, light, *first[:2]), first[2], heavy)
    turned = [of.turned() for of in products]

    def back(state: Any, of: Any) -> Any:
        to_carry, to_light = state
        carry, x, rest, made, to_y = of

        def f(light: Any, carry: Any, x: Any, probes: Any) -> Any:
            with using(Replaying(turned, made, probes)):
                return turn(heavy, light, carry, (x, rest))

        probes = jax.tree.map(jnp.zeros_like, made)
        _, vjp = jax.vjp(f, light, carry, x, probes)
        light_, to_carry, to_x, to_made = vjp((to_carry, to_y))
        return (to_carry, jax.tree.map(jnp.add, to_light, light_)), (to_x, to_made)

    # sums over turns are wide, whatever the type of what they are gradients of
    zeros = jax.tree.map(lambda a: wide(jnp.zeros_like(a)), light)
    (to_carry, to_light), (to_xs, to_made) = jax.lax.scan(
        back, (to_last, zeros), (begun, xs, rest, made, to_ys), reverse=True
    )

    def factors(carry: Any, x: Any, made: Any) -> list[Array]:
        with using(Collecting(made)) as tape:
            turn(heavy, light, carry, x)
        return [each.x for each in tape.used]

    went_in = jax.vmap(factors)(begun, (xs, rest), made)
    found = [of.gradient(x, y) for of, x, y in zip(products, went_in, to_made, strict=True)]
    light_ = jax.tree.map(lambda a, b: a.astype(b.dtype), to_light, light)
    return to_heavy(found), light_, to_carry, to_xs, None


turns.defvjp(_forward, _backward)
