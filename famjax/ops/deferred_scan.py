"""A loop over blocks whose backward pass does all products of all turns at once.

As `famjax.ops.token_scan` does it for tokens. A turn has a carry, and no memory that grows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from famjax.core.remat import tag_small
from famjax.core.types import Array
from famjax.ops.einsum_tape import (
    CollectTape,
    RecordTape,
    ReplayTape,
    at_least_float32,
    use_tape,
    used_weights,
)

# (heavy, light, carry, (x, rest)) -> (carry, y): `matmul_params` is used in products of
# `famjax.ops.weight_einsum` alone
Body = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


def plain_scan(
    body: Body, matmul_params: Any, other_params: Any, carry: Any, xs: Any, non_diff: Any
) -> tuple[Any, Any]:
    """Return `jax.lax.scan` of a turn; see `deferred_scan`."""
    return jax.lax.scan(functools.partial(body, matmul_params, other_params), carry, (xs, non_diff))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def deferred_scan(
    body: Body, matmul_params: Any, other_params: Any, carry: Any, xs: Any, non_diff: Any
) -> tuple[Any, Any]:
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
    return _forward(body, matmul_params, other_params, carry, xs, non_diff)[0]


def _forward(
    body: Body, matmul_params: Any, other_params: Any, carry: Any, xs: Any, non_diff: Any
) -> Any:
    def one(carry: Any, x: Any) -> Any:
        new, y = body(matmul_params, other_params, carry, x)
        return new, (y, carry)

    last, (ys, carries) = jax.lax.scan(one, carry, (xs, non_diff))
    last, ys, carries = jax.tree.map(tag_small, (last, ys, carries))
    return (last, ys), (matmul_params, other_params, carries, xs, non_diff)


def _backward(body: Body, saved: Any, grads: Any) -> Any:
    matmul_params, other_params, carries, xs, non_diff = saved
    to_last, to_ys = grads

    def record_outputs(carry: Any, x: Any) -> list[Array]:
        with use_tape(RecordTape()) as tape:
            body(matmul_params, other_params, carry, x)
        return tape.outputs

    outputs = jax.vmap(record_outputs)(carries, (xs, non_diff))
    # a kernel is the same in all turns: those of the first one are taken
    first = jax.tree.map(lambda a: a[0], (carries, (xs, non_diff), outputs))
    products, to_heavy = used_weights(
        lambda w: body(w, other_params, *first[:2]), first[2], matmul_params
    )
    transposed = [of.transposed() for of in products]

    def body_backward(state: Any, of: Any) -> Any:
        to_carry, to_light = state
        carry, x, non_diff, outputs, to_y = of

        def f(other_params: Any, carry: Any, x: Any, probes: Any) -> Any:
            with use_tape(ReplayTape(transposed, outputs, probes)):
                return body(matmul_params, other_params, carry, (x, non_diff))

        probes = jax.tree.map(jnp.zeros_like, outputs)
        _, vjp = jax.vjp(f, other_params, carry, x, probes)
        light_, to_carry, to_x, to_outputs = vjp((to_carry, to_y))
        return (to_carry, jax.tree.map(jnp.add, to_light, light_)), (to_x, to_outputs)

    # sums over turns are wide, whatever the type of what they are gradients of
    zeros = jax.tree.map(lambda a: at_least_float32(jnp.zeros_like(a)), other_params)
    (to_carry, to_light), (to_xs, to_outputs) = jax.lax.scan(
        body_backward, (to_last, zeros), (carries, xs, non_diff, outputs, to_ys), reverse=True
    )

    def collect_inputs(carry: Any, x: Any, outputs: Any) -> list[Array]:
        with use_tape(CollectTape(outputs)) as tape:
            body(matmul_params, other_params, carry, x)
        return [each.x for each in tape.used]

    inputs = jax.vmap(collect_inputs)(carries, (xs, non_diff), outputs)
    found = [of.gradient(x, y) for of, x, y in zip(products, inputs, to_outputs, strict=True)]
    light_ = jax.tree.map(lambda a, b: a.astype(b.dtype), to_light, other_params)
    return to_heavy(found), light_, to_carry, to_xs, None


deferred_scan.defvjp(_forward, _backward)
