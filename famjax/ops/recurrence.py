"""A scan whose backward pass carries nothing but the gradient of what the scan carries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

Body = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


def recur(body: Body, params: Any, carry: Any, xs: Any, flags: Any) -> tuple[Any, Any]:
    """Run `carry, y = body(params, carry, x, flag)` over the leading axis of `xs` and `flags`.

    The values and gradients are those of `jax.lax.scan`. That would, step by step backwards, make
    a gradient of all the parameters and add it up: products with few rows, and an accumulator as
    large as the parameters read and written at every step. But once the gradients of the carries
    are known nothing is sequential any more. So the reverse scan makes only these, from the
    carries that the forward scan kept, and one parallel pass over all steps makes the rest.

    Args:
      body: a pure function that closes over no array to be differentiated.
      params: tree of arrays, the same in every step.
      carry: tree of floating arrays.
      xs: tree of floating arrays [n ...].
      flags: tree of arrays [n ...] that are not differentiated, such as masks.

    Returns:
      The last carry, and the ys [n ...], floating.
    """
    return _recur(body, params, carry, xs, flags)


def _forward(body: Body, params: Any, carry: Any, xs: Any, flags: Any) -> tuple[Any, Any]:
    def step(carry: Any, given: Any) -> tuple[Any, Any]:
        after, y = body(params, carry, *given)
        return after, (y, carry)

    last, (ys, carries) = jax.lax.scan(step, carry, (xs, flags))
    return (last, ys), (params, carries, xs, flags)


def _backward(body: Body, kept: Any, grads: Any) -> tuple[Any, Any, Any, None]:
    params, carries, xs, flags = kept

    def step(grad: Any, given: Any) -> tuple[Any, Any]:
        carry, x, flag, grad_y = given
        _, pull = jax.vjp(lambda carry: body(params, carry, x, flag), carry)
        return pull((grad, grad_y))[0], grad

    last, grad_ys = grads
    first, after = jax.lax.scan(step, last, (carries, xs, flags, grad_ys), reverse=True)

    def all_steps(params: Any, xs: Any) -> tuple[Any, Any]:
        return jax.vmap(body, in_axes=(None, 0, 0, 0))(params, carries, xs, flags)

    _, pull = jax.vjp(all_steps, params, xs)
    grad_params, grad_xs = pull((after, grad_ys))
    return grad_params, first, grad_xs, None


_recur = jax.custom_vjp(lambda *args: _forward(*args)[0], nondiff_argnums=(0,))
_recur.defvjp(_forward, _backward)
