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
from famjax.ops.einsum_tape import (
    CollectTape,
    RecordTape,
    ReplayTape,
    WeightEinsum,
    at_least_float32,
    use_tape,
    used_weights,
)

# the axis of the slots in the arrays of a line: [b g n e], and in [b n d]
ENTRY_AXIS = -2


class Visible(NamedTuple):
    """What a token sees of the line.

    Attributes:
      before: pytree of [... span e], the slots before the block.
      own: pytree of [... c e], the slots of the block; those that are not written yet are zero in
        the forward pass, and known in the backward pass: the token must not look at them.
      place: scalar, the token's place in its block.
      at: scalar, the token's place in the call.
    """

    past: Any
    current: Any
    index_in_block: Array
    index_in_call: Array


# (matmul_params, other_params, visible, x) -> (y, entries). `matmul_params` and `visible.past` are
# used only in products (`weight_einsum` and `slot_einsum`); entries are written to the history, a
# pytree of [... e].
TokenFn = Callable[[Any, Any, Visible, Any], tuple[Any, Any]]


# -------------------------------------------------------------------------------------------- loop


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def token_scan(
    token_fn: TokenFn,
    block: int,
    matmul_params: Any,
    other_params: Any,
    history: Any,
    xs: Any,
    non_diff: Any,
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
    return _forward(token_fn, block, matmul_params, other_params, history, xs, non_diff)[0]


def _forward(
    token_fn: TokenFn,
    block: int,
    matmul_params: Any,
    other_params: Any,
    history: Any,
    xs: Any,
    non_diff: Any,
) -> Any:
    t = jax.tree.leaves(xs)[0].shape[0]
    history = jax.tree.map(lambda a: _extend(a, t), history)

    def scan_block(history: Any, xs: Any) -> Any:
        (index, *_), _, _ = xs
        past = _past_entries(history, index, t)
        current = jax.tree.map(lambda a: jnp.zeros_like(_entries(a, 0, block)), history)

        def scan_token(current: Any, xs: Any) -> Any:
            index, x, non_diff = xs
            index_in_block = index % block
            with use_tape(RecordTape()) as tape:
                seen = Visible(past, current, index_in_block, index)
                y, entries = token_fn(matmul_params, other_params, seen, (x, non_diff))
            return jax.tree.map(
                lambda a, s: _write_entry(a, s, index_in_block), current, entries
            ), (y, tape.outputs)

        current, out = jax.lax.scan(scan_token, current, xs)
        history = jax.tree.map(
            lambda a, new: _update_entries(a, new, index + _span(a, t)), history, current
        )
        return history, out

    cut = jax.tree.map(lambda a: _split_blocks(a, block), (jnp.arange(t), xs, non_diff))
    history, (ys, outputs) = jax.lax.scan(scan_block, history, cut)
    ys = jax.tree.map(_join_blocks, ys)
    return (ys, history), (matmul_params, other_params, history, cut, outputs)


def _backward(token_fn: TokenFn, block: int, saved: Any, grads: Any) -> Any:
    matmul_params, other_params, history, cut, outputs = saved
    to_ys, to_history = grads
    # sums over tokens and blocks are wide, whatever the type of what they are gradients of
    to_history = jax.tree.map(at_least_float32, to_history)
    t = jax.tree.leaves(to_ys)[0].shape[0]
    to_ys = jax.tree.map(lambda a: _split_blocks(a, block), to_ys)

    # a kernel is the same for all tokens: those of the first one are taken
    first = jax.tree.map(lambda a: a[0, 0], (cut, outputs))

    def run(matmul_params: Any) -> None:
        (index, *x), _ = first
        current = jax.tree.map(lambda a: _entries(a, _span(a, t), block), history)
        seen = Visible(_past_entries(history, 0, t), current, index, index)
        token_fn(matmul_params, other_params, seen, tuple(x))

    products, to_heavy = used_weights(run, first[1], matmul_params)
    transposed = [of.transposed() for of in products]

    def block_backward(carry: Any, xs: Any) -> Any:
        to_history, to_weights, to_light = carry
        (indices, x, non_diff), outputs, to_y = xs
        index = indices[0]
        past = _past_entries(history, index, t)
        current, to_current = (
            jax.tree.map(lambda a: _entries(a, index + _span(a, t), block), of)
            for of in (history, to_history)
        )

        def scan_token(carry: Any, xs: Any) -> Any:
            to_current, to_light = carry
            (index, x, non_diff), outputs, to_y = xs
            index_in_block = index % block

            def f(other_params: Any, current: Any, x: Any, probes: Any) -> Any:
                with use_tape(ReplayTape(transposed, outputs, probes)):
                    return token_fn(
                        matmul_params,
                        other_params,
                        Visible(past, current, index_in_block, index),
                        (x, non_diff),
                    )

            probes = jax.tree.map(jnp.zeros_like, outputs)
            to_entries = jax.tree.map(
                lambda a, b: _read_entry(a, index_in_block).astype(b.dtype), to_current, current
            )
            _, vjp = jax.vjp(f, other_params, current, x, probes)
            light_, to_current_, to_x, to_outputs = vjp((to_y, to_entries))
            add = functools.partial(jax.tree.map, jnp.add)
            return (add(to_current, to_current_), add(to_light, light_)), (to_x, to_outputs)

        (_, to_light), (to_x, to_outputs) = jax.lax.scan(
            scan_token,
            (to_current, to_light),
            ((indices, x, non_diff), outputs, to_y),
            reverse=True,
        )

        given = (
            (matmul_params, other_params, past, current),
            (indices, x, non_diff),
            outputs,
            to_outputs,
        )
        weights_, to_past = _gradients(token_fn, *given)
        to_weights = [a + b for a, b in zip(to_weights, weights_, strict=True)]
        to_history = jax.tree.map(lambda a, new: _add_entries(a, new, index), to_history, to_past)
        return (to_history, to_weights, to_light), to_x

    zeros = (
        [of.zero_gradient() for of in products],
        jax.tree.map(lambda a: at_least_float32(jnp.zeros_like(a)), other_params),
    )
    (to_history, to_weights, to_light), to_xs = jax.lax.scan(
        block_backward, (to_history, *zeros), (cut, outputs, to_ys), reverse=True
    )
    to_history = jax.tree.map(lambda a: _entries(a, 0, _span(a, t)), to_history)
    found = jax.tree.map(
        lambda a, b: a.astype(b.dtype), (to_light, to_history), (other_params, history)
    )
    return to_heavy(to_weights), *found, jax.tree.map(_join_blocks, to_xs), None


token_scan.defvjp(_forward, _backward)


def _gradients(token_fn: TokenFn, given: Any, cut: Any, outputs: Any, to_outputs: Any) -> Any:
    """Return the gradients of the weights, one for each product, and of `past`, from a block."""
    matmul_params, other_params, past, current = given
    used: list[WeightEinsum] = []

    def entries(past: Any) -> tuple[list[Array], list[Array]]:
        def products(xs: Any, outputs: Any) -> tuple[list[Array], list[Array]]:
            index, x, non_diff = xs
            index_in_block = index % jax.tree.leaves(current)[0].shape[ENTRY_AXIS]
            with use_tape(CollectTape(outputs)) as tape:
                token_fn(
                    matmul_params,
                    other_params,
                    Visible(past, current, index_in_block, index),
                    (x, non_diff),
                )
            used[:] = tape.used
            kernels = [each.kernel for each in tape.used if not each.is_weight]
            return kernels, [each.x for each in tape.used]

        # kernels depend on no token
        return jax.vmap(products, out_axes=(None, 0))(cut, outputs)

    kernels, to_before, inputs = jax.vjp(entries, past, has_aux=True)
    found = [of.gradient(x, y) for of, x, y in zip(used, inputs, to_outputs, strict=True)]
    of_slots = [a for of, a in zip(used, found, strict=True) if not of.is_weight]
    of_weights = [a for of, a in zip(used, found, strict=True) if of.is_weight]
    of_slots = [a.astype(k.dtype) for a, k in zip(of_slots, kernels, strict=True)]
    return of_weights, to_before(of_slots)[0]


# ------------------------------------------------------------------------------------------- slots


def _extend(history: Array, t: int) -> Array:
    widths = [(0, 0)] * history.ndim
    widths[ENTRY_AXIS] = (0, t)
    return jnp.pad(history, widths)


def _entries(history: Array, start: Any, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(history, start, size, history.ndim + ENTRY_AXIS)


def _span(history: Array, t: int) -> int:
    """Return the slots of a line that are from before the call."""
    return history.shape[ENTRY_AXIS] - t


def _past_entries(history: Any, index: Any, t: int) -> Any:
    """Return what a block at `index` sees of the slots before it."""
    return jax.tree.map(lambda a: _entries(a, index, _span(a, t)), history)


def _update_entries(history: Array, new: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(history, new, start, history.ndim + ENTRY_AXIS)


def _add_entries(history: Array, new: Array, start: Array) -> Array:
    return _update_entries(history, _entries(history, start, new.shape[ENTRY_AXIS]) + new, start)


def _write_entry(history: Array, slot: Array, index_in_block: Array) -> Array:
    return _update_entries(
        history, jnp.expand_dims(slot.astype(history.dtype), ENTRY_AXIS), index_in_block
    )


def _read_entry(history: Array, index_in_block: Array) -> Array:
    return jnp.squeeze(_entries(history, index_in_block, 1), history.ndim + ENTRY_AXIS)


def _split_blocks(a: Array, block: int) -> Array:
    """[t ...] -> [n c ...]."""
    return a.reshape(-1, block, *a.shape[1:])


def _join_blocks(a: Array) -> Array:
    return a.reshape(-1, *a.shape[2:])
