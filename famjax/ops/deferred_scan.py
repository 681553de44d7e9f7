"""`jax.lax.scan` with a custom VJP that defers weight gradients to one product over all iterations.

    carry_{i+1}, y_i = body(params, carry_i, x_i)

The forward pass saves only the small carries. Given them, the iterations are independent: the
backward pass recomputes the einsums of all iterations by `jax.vmap`, and only the cotangent of the
carry is sequential (`famjax.ops.einsum_tape` has the tapes):

    def backward(params, carries, xs, d_last, d_ys):
        outputs = vmap(record(body))(carries, xs)       # RecordTape: all einsums, batched
        d_carry = d_last
        for i in reversed(range(n)):                    # ReplayTape with cotangent probes
            f = lambda carry, x, probes: replay(body, outputs[i], probes)(carry, x)
            d_carry, d_xs[i], d_outputs[i] = vjp(f, carries[i], xs[i], zeros)(d_carry, d_ys[i])
        inputs = vmap(collect(body, outputs))(carries, xs)  # CollectTape
        d_params = einsum(inputs, d_outputs)            # one product for each kernel
        return d_params, d_carry, d_xs

A kernel is read once for the recomputation and written once for its gradient, instead of once in
each iteration. `famjax.ops.token_scan` does the same for tokens that also write a growing memory.
Related work: see `famjax.ops.einsum_tape`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from famjax.core.remat import tag_small
from famjax.core.types import Array, at_least_float32
from famjax.ops.einsum_tape import (
    CollectTape,
    RecordTape,
    ReplayTape,
    use_tape,
    used_weights,
)
from famjax.ops.leading_size import leading_size

# Pytrees. Xs, NonDiff and Ys are of one iteration, or stacked, [n ...], in the scan's arguments.
MatmulParams = TypeVar("MatmulParams")
OtherParams = TypeVar("OtherParams")
Carry = TypeVar("Carry")
Xs = TypeVar("Xs")
NonDiff = TypeVar("NonDiff")
Ys = TypeVar("Ys")

# (matmul_params, other_params, carry, (x, non_diff)) -> (carry, y): `matmul_params` is used only in
# `famjax.ops.weight_einsum`
Body = Callable[[MatmulParams, OtherParams, Carry, tuple[Xs, NonDiff]], tuple[Carry, Ys]]


class Residuals(NamedTuple, Generic[MatmulParams, OtherParams, Carry, Xs, NonDiff]):
    """What the backward pass needs. carries: pytree of [n ...], the carry before each iteration."""

    matmul_params: MatmulParams
    other_params: OtherParams
    carries: Carry
    xs: Xs
    non_diff: NonDiff


def plain_scan(
    body: Body[MatmulParams, OtherParams, Carry, Xs, NonDiff, Ys],
    matmul_params: MatmulParams,
    other_params: OtherParams,
    carry: Carry,
    xs: Xs,
    non_diff: NonDiff,
) -> tuple[Carry, Ys]:
    """Return `jax.lax.scan` of the body, differentiated by JAX; arguments as in `deferred_scan`."""
    leading_size("plain_scan", xs=xs, non_diff=non_diff)
    return jax.lax.scan(functools.partial(body, matmul_params, other_params), carry, (xs, non_diff))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def deferred_scan(
    body: Body[MatmulParams, OtherParams, Carry, Xs, NonDiff, Ys],
    matmul_params: MatmulParams,
    other_params: OtherParams,
    carry: Carry,
    xs: Xs,
    non_diff: NonDiff,
) -> tuple[Carry, Ys]:
    """Return `jax.lax.scan` of the body, with deferred weight gradients; see the module.

    The residuals are tagged by `tag_small`, so that rematerialization saves them too.

    Args:
      body: a function of the arrays; it may not close over traced values.
      matmul_params: kernels of `weight_einsum`.
      other_params: other parameters; their gradients are accumulated in each iteration.
      carry: the initial carry, a small pytree of floating-point arrays.
      xs: pytree of [n ...].
      non_diff: pytree of [n ...] without gradients; the body's x is (x, non_diff).

    Returns:
      the final carry; ys, pytree of [n ...]. n may be 0 if there is no backward pass.

    Raises:
      ValueError: n is 0 in the backward pass, or the arrays' n differ.
    """
    return _forward(body, matmul_params, other_params, carry, xs, non_diff)[0]


def _forward(
    body: Body[MatmulParams, OtherParams, Carry, Xs, NonDiff, Ys],
    matmul_params: MatmulParams,
    other_params: OtherParams,
    carry: Carry,
    xs: Xs,
    non_diff: NonDiff,
) -> tuple[tuple[Carry, Ys], Residuals[MatmulParams, OtherParams, Carry, Xs, NonDiff]]:
    leading_size("deferred_scan", xs=xs, non_diff=non_diff)

    def save_carry(carry: Carry, x: tuple[Xs, NonDiff]) -> tuple[Carry, tuple[Ys, Carry]]:
        new, y = body(matmul_params, other_params, carry, x)
        return new, (y, carry)

    last, (ys, carries) = jax.lax.scan(save_carry, carry, (xs, non_diff))
    last, ys, carries = jax.tree.map(tag_small, (last, ys, carries))
    return (last, ys), Residuals(matmul_params, other_params, carries, xs, non_diff)


def _backward(
    body: Body[MatmulParams, OtherParams, Carry, Xs, NonDiff, Ys],
    residuals: Residuals[MatmulParams, OtherParams, Carry, Xs, NonDiff],
    grads: tuple[Carry, Ys],
) -> tuple[MatmulParams, OtherParams, Carry, Xs, None]:
    matmul_params, other_params, carries, xs, non_diff = residuals
    d_last, d_ys = grads
    if not len(jax.tree.leaves(xs)[0]):
        raise ValueError("deferred_scan: xs has no iterations, and so no gradients; give it one")

    def record_outputs(carry: Carry, x: tuple[Xs, NonDiff]) -> list[Array]:
        with use_tape(RecordTape()) as tape:
            body(matmul_params, other_params, carry, x)
        return tape.outputs

    outputs = jax.vmap(record_outputs)(carries, (xs, non_diff))
    # the kernels are the same in all iterations, so the first iteration's are used
    first = jax.tree.map(lambda a: a[0], (carries, (xs, non_diff), outputs))
    einsums, params_vjp = used_weights(
        lambda w: body(w, other_params, *first[:2]), first[2], matmul_params
    )
    transposed = [op.transposed() for op in einsums]

    def body_backward(
        cotangents: tuple[Carry, OtherParams], iteration: tuple[Carry, Xs, NonDiff, list[Array], Ys]
    ) -> tuple[tuple[Carry, OtherParams], tuple[Xs, list[Array]]]:
        d_carry, d_other = cotangents
        carry, x, non_diff, outputs, d_y = iteration

        def f(
            other_params: OtherParams, carry: Carry, x: Xs, probes: list[Array]
        ) -> tuple[Carry, Ys]:
            with use_tape(ReplayTape(transposed, outputs, probes)):
                return body(matmul_params, other_params, carry, (x, non_diff))

        probes = jax.tree.map(jnp.zeros_like, outputs)
        _, vjp = jax.vjp(f, other_params, carry, x, probes)
        d_other_i, d_carry, d_x, d_outputs = vjp((d_carry, d_y))
        return (d_carry, jax.tree.map(jnp.add, d_other, d_other_i)), (d_x, d_outputs)

    # gradients are accumulated in float32 or wider
    zeros = jax.tree.map(lambda a: at_least_float32(jnp.zeros_like(a)), other_params)
    (d_carry, d_other), (d_xs, d_outputs) = jax.lax.scan(
        body_backward, (d_last, zeros), (carries, xs, non_diff, outputs, d_ys), reverse=True
    )

    def collect_inputs(carry: Carry, x: tuple[Xs, NonDiff], outputs: list[Array]) -> list[Array]:
        with use_tape(CollectTape(outputs)) as tape:
            body(matmul_params, other_params, carry, x)
        return [op.x for op in tape.used]

    inputs = jax.vmap(collect_inputs)(carries, (xs, non_diff), outputs)
    d_weights = [op.gradient(x, y) for op, x, y in zip(einsums, inputs, d_outputs, strict=True)]
    d_other = jax.tree.map(lambda a, b: a.astype(b.dtype), d_other, other_params)
    return params_vjp(d_weights), d_other, d_carry, d_xs, None


deferred_scan.defvjp(_forward, _backward)
