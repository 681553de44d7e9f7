"""A scan over tokens that write a memory, with a custom VJP that defers weight gradients.

    y_i, m_i = token_fn(params, visible(history, i), x_i)         history = [old, m_0, ..., m_i-1]

In a Feedback Transformer each token attends to the memories of earlier tokens, so the forward pass
is sequential. But in the backward pass all memories are known, so that for each block of c tokens
it has a sequential part and one for all tokens at once (for the tapes see
`famjax.ops.einsum_tape`):

    def forward(params, history, xs):
        for i in range(t):
            y[i], m, outputs[i] = record(token_fn)(params, visible(history, i), xs[i])  # RecordTape
            history = append(history, m)
        return y, history                              # residuals: history, xs, outputs

    def backward(d_y, d_history):
        for block in reversed(blocks):
            current = history[block]
            for i in reversed(block):                  # ReplayTape: no forward products
                f = lambda current, x, probes: replay(token_fn, outputs[i], probes)(current, x)
                grads = vjp(f, current, xs[i], zeros)(d_y[i], d_history[i])
                d_current, d_x[i], d_outputs[i] = grads
                d_history[block] += d_current          # memories of the block's earlier tokens
            inputs = vmap(collect(token_fn, outputs[block]))(xs[block])     # CollectTape
            d_params += einsum(inputs, d_outputs[block])                 # one product per kernel
            d_history[before block] += einsum(inputs, d_outputs[block])  # one per history einsum
        return d_params, d_history[before the call], d_x

`params` here are `matmul_params`; the gradients of `other_params` are accumulated token by token.
Plain differentiation of the scan would save the visible memory for each token, and accumulate the
gradient of every kernel, and of the memory before the block, token by token.

Terms: the history has `span` entries from before the call, oldest first, then one for each token of
the call. A token sees the `span` entries before its block ("past"), constant within the block, and
the block's entries so far ("current"). Each array of a history may have its own span.

Related work: like selective rematerialization, the backward pass recomputes elementwise operations,
and only those products that involve `current`; for the split of the gradients see
`famjax.ops.einsum_tape`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Integer

from famjax.core.types import Array, at_least_float32
from famjax.ops.einsum_tape import (
    CollectTape,
    RecordTape,
    ReplayTape,
    WeightEinsum,
    use_tape,
    used_weights,
)
from famjax.ops.leading_size import leading_size

# the axis of the entries in the arrays of a history: [b g s e], and in [b s d]
ENTRY_AXIS = -2

# Pytrees. Xs, NonDiff and Ys are of one token, or stacked, [t ...], in the scan's arguments. The
# arrays of a History are [... s e], or [... e] for the entries of one token.
MatmulParams = TypeVar("MatmulParams")
OtherParams = TypeVar("OtherParams")
History = TypeVar("History")
Xs = TypeVar("Xs")
NonDiff = TypeVar("NonDiff")
Ys = TypeVar("Ys")


class Visible(NamedTuple, Generic[History]):
    """The part of the history that a token may attend to.

    Attributes:
      past: pytree of [... span e], the entries before the block.
      current: pytree of [... c e], the entries of the block. Those not yet written are zero in the
        forward pass, but known in the backward pass: the token function must mask them.
      index_in_block: scalar, the token's index in its block.
      index_in_call: scalar, the token's index in the call.
    """

    past: History
    current: History
    index_in_block: Integer[Array, ""]
    index_in_call: Integer[Array, ""]


# (matmul_params, other_params, visible, (x, non_diff)) -> (y, entries). `matmul_params` and
# `visible.past` are used only in `weight_einsum` and `history_einsum`; entries are appended to the
# history, a pytree of [... e].
TokenFn = Callable[
    [MatmulParams, OtherParams, Visible[History], tuple[Xs, NonDiff]], tuple[Ys, History]
]

# index in the call, x and non_diff: of one token, or of all tokens of a block, [c ...]
Tokens = tuple[Array, Xs, NonDiff]


class Residuals(NamedTuple, Generic[MatmulParams, OtherParams, History, Xs, NonDiff]):
    """What the backward pass needs.

    Attributes:
      history: the history after the call, [... span+t e].
      blocks: the tokens by block, [n c ...].
      outputs: recorded output of each einsum of the token function, [n c ...].
    """

    matmul_params: MatmulParams
    other_params: OtherParams
    history: History
    blocks: Tokens[Xs, NonDiff]
    outputs: list[Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def token_scan(
    token_fn: TokenFn[MatmulParams, OtherParams, History, Xs, NonDiff, Ys],
    block: int,
    matmul_params: MatmulParams,
    other_params: OtherParams,
    history: History,
    xs: Xs,
    non_diff: NonDiff,
) -> tuple[Ys, History]:
    """Scan a token function over tokens and a history; see the module's pseudocode.

    Args:
      token_fn: a function of the arrays; it may not close over traced values.
      block: c, tokens of a block, whose gradient of a kernel is one product; must divide t.
      matmul_params: kernels of `weight_einsum`; their gradients are accumulated by block.
      other_params: other parameters; their gradients are accumulated by token.
      history: pytree of [... span e], the entries from before the call.
      xs: pytree of [t ...].
      non_diff: pytree of [t ...] without gradients; the token function's x is (x, non_diff).

    Returns:
      ys, pytree of [t ...]; the history [... span+t e].

    Raises:
      ValueError: t is 0 or no multiple of the block, or a shape is not as above.
    """
    return _forward(token_fn, block, matmul_params, other_params, history, xs, non_diff)[0]


def _forward(
    token_fn: TokenFn[MatmulParams, OtherParams, History, Xs, NonDiff, Ys],
    block: int,
    matmul_params: MatmulParams,
    other_params: OtherParams,
    history: History,
    xs: Xs,
    non_diff: NonDiff,
) -> tuple[tuple[Ys, History], Residuals[MatmulParams, OtherParams, History, Xs, NonDiff]]:
    t = _check_shapes(block, history, xs, non_diff)
    history = jax.tree.map(lambda a: _extend(a, t), history)

    def scan_block(
        history: History, tokens: Tokens[Xs, NonDiff]
    ) -> tuple[History, tuple[Ys, list[Array]]]:
        (index, *_), _, _ = tokens
        past = _past_entries(history, index, t)
        current = jax.tree.map(lambda a: jnp.zeros_like(_entries(a, 0, block)), history)

        def scan_token(
            current: History, token: Tokens[Xs, NonDiff]
        ) -> tuple[History, tuple[Ys, list[Array]]]:
            index, x, non_diff = token
            index_in_block = index % block
            with use_tape(RecordTape()) as tape:
                visible = Visible(past, current, index_in_block, index)
                y, entries = token_fn(matmul_params, other_params, visible, (x, non_diff))
            return jax.tree.map(
                lambda a, s: _write_entry(a, s, index_in_block), current, entries
            ), (y, tape.outputs)

        current, out = jax.lax.scan(scan_token, current, tokens)
        history = jax.tree.map(
            lambda a, new: _update_entries(a, new, index + _span(a, t)), history, current
        )
        return history, out

    blocks = jax.tree.map(lambda a: _split_blocks(a, block), (jnp.arange(t), xs, non_diff))
    history, (ys, outputs) = jax.lax.scan(scan_block, history, blocks)
    ys = jax.tree.map(_join_blocks, ys)
    return (ys, history), Residuals(matmul_params, other_params, history, blocks, outputs)


def _check_shapes(block: int, history: History, xs: Xs, non_diff: NonDiff) -> int:
    """Return t after checking the shapes, which are generic, so that annotations cannot."""
    t = leading_size("token_scan", xs=xs, non_diff=non_diff)
    if not t:
        raise ValueError("token_scan: xs has no tokens; give it at least one block")
    if t % block:
        raise ValueError(f"token_scan: {t} tokens are not a multiple of block={block}; pad them")
    for path, array in jax.tree_util.tree_leaves_with_path(history):
        if array.ndim < -ENTRY_AXIS:
            name = jax.tree_util.keystr(path)
            raise ValueError(f"token_scan: history{name} is {[*array.shape]}, not [... span e]")
    return t


def _backward(
    token_fn: TokenFn[MatmulParams, OtherParams, History, Xs, NonDiff, Ys],
    block: int,
    residuals: Residuals[MatmulParams, OtherParams, History, Xs, NonDiff],
    grads: tuple[Ys, History],
) -> tuple[MatmulParams, OtherParams, History, Xs, None]:
    matmul_params, other_params, history, blocks, outputs = residuals
    d_ys, d_history = grads
    # gradients are accumulated in float32 or wider
    d_history = jax.tree.map(at_least_float32, d_history)
    t = jax.tree.leaves(d_ys)[0].shape[0]
    d_ys = jax.tree.map(lambda a: _split_blocks(a, block), d_ys)

    # the kernels are the same for all tokens, so the first token's are used
    first = jax.tree.map(lambda a: a[0, 0], (blocks, outputs))

    def apply_first_token(matmul_params: MatmulParams) -> None:
        (index, *x), _ = first
        current = jax.tree.map(lambda a: _entries(a, _span(a, t), block), history)
        visible = Visible(_past_entries(history, 0, t), current, index, index)
        token_fn(matmul_params, other_params, visible, tuple(x))

    einsums, params_vjp = used_weights(apply_first_token, first[1], matmul_params)
    transposed = [op.transposed() for op in einsums]

    def block_backward(
        carry: tuple[History, list[Array], OtherParams],
        xs: tuple[Tokens[Xs, NonDiff], list[Array], Ys],
    ) -> tuple[tuple[History, list[Array], OtherParams], Xs]:
        d_history, d_weights, d_other = carry
        tokens, outputs, d_y = xs
        indices, _, _ = tokens
        index = indices[0]
        past = _past_entries(history, index, t)
        current, d_current = (
            jax.tree.map(lambda a: _entries(a, index + _span(a, t), block), arrays)
            for arrays in (history, d_history)
        )
        constants = (matmul_params, other_params, past, current)
        d_other, d_x, d_outputs = _token_gradients(
            token_fn, constants, transposed, tokens, outputs, (d_current, d_other), d_y
        )
        d_weights_i, d_past = _block_gradients(token_fn, constants, tokens, outputs, d_outputs)
        d_weights = [a + b for a, b in zip(d_weights, d_weights_i, strict=True)]
        d_history = jax.tree.map(lambda a, new: _add_entries(a, new, index), d_history, d_past)
        return (d_history, d_weights, d_other), d_x

    zeros = (
        [op.zero_gradient() for op in einsums],
        jax.tree.map(lambda a: at_least_float32(jnp.zeros_like(a)), other_params),
    )
    (d_history, d_weights, d_other), d_xs = jax.lax.scan(
        block_backward, (d_history, *zeros), (blocks, outputs, d_ys), reverse=True
    )
    d_history = jax.tree.map(lambda a: _entries(a, 0, _span(a, t)), d_history)
    d_other, d_history = jax.tree.map(
        lambda a, b: a.astype(b.dtype), (d_other, d_history), (other_params, history)
    )
    return params_vjp(d_weights), d_other, d_history, jax.tree.map(_join_blocks, d_xs), None


token_scan.defvjp(_forward, _backward)


def _token_gradients(
    token_fn: TokenFn[MatmulParams, OtherParams, History, Xs, NonDiff, Ys],
    constants: tuple[MatmulParams, OtherParams, History, History],
    transposed: list[Array],
    tokens: Tokens[Xs, NonDiff],
    outputs: list[Array],
    later: tuple[History, OtherParams],
    d_y: Ys,
) -> tuple[OtherParams, Xs, list[Array]]:
    """Return the gradients that need the tokens of a block one by one, from the last to the first.

    Args:
      constants: matmul_params, other_params, past, current.
      transposed: the kernels of the weight einsums, as `ReplayTape` takes them.
      tokens, outputs: of the block, [c ...].
      later: gradients that later blocks and the result have added: of `current` and of
        `other_params`.
      d_y: gradients of the block's ys, [c ...].

    Returns:
      the gradients of `other_params`, with those of later blocks; of the xs, [c ...]; and of the
      outputs of each einsum, [c ...].
    """
    matmul_params, other_params, past, current = constants

    def token_backward(
        carry: tuple[History, OtherParams], xs: tuple[Tokens[Xs, NonDiff], list[Array], Ys]
    ) -> tuple[tuple[History, OtherParams], tuple[Xs, list[Array]]]:
        d_current, d_other = carry
        (index, x, non_diff), outputs, d_y = xs
        index_in_block = index % _block_len(current)

        def f(
            other_params: OtherParams, current: History, x: Xs, probes: list[Array]
        ) -> tuple[Ys, History]:
            with use_tape(ReplayTape(transposed, outputs, probes)):
                return token_fn(
                    matmul_params,
                    other_params,
                    Visible(past, current, index_in_block, index),
                    (x, non_diff),
                )

        probes = jax.tree.map(jnp.zeros_like, outputs)
        d_entries = jax.tree.map(
            lambda a, b: _read_entry(a, index_in_block).astype(b.dtype), d_current, current
        )
        _, vjp = jax.vjp(f, other_params, current, x, probes)
        d_other_i, d_current_i, d_x, d_outputs = vjp((d_y, d_entries))
        add = functools.partial(jax.tree.map, jnp.add)
        return (add(d_current, d_current_i), add(d_other, d_other_i)), (d_x, d_outputs)

    (_, d_other), (d_x, d_outputs) = jax.lax.scan(
        token_backward, later, (tokens, outputs, d_y), reverse=True
    )
    return d_other, d_x, d_outputs


def _block_gradients(
    token_fn: TokenFn[MatmulParams, OtherParams, History, Xs, NonDiff, Ys],
    constants: tuple[MatmulParams, OtherParams, History, History],
    tokens: Tokens[Xs, NonDiff],
    outputs: list[Array],
    d_outputs: list[Array],
) -> tuple[list[Array], History]:
    """Return the gradients of a block's kernels, one for each einsum, and of `past`.

    Args:
      constants: matmul_params, other_params, past, current.
    """
    matmul_params, other_params, past, current = constants
    used: list[WeightEinsum] = []

    def collect_block(past: History) -> tuple[list[Array], list[Array]]:
        def collect_token(
            token: Tokens[Xs, NonDiff], outputs: list[Array]
        ) -> tuple[list[Array], list[Array]]:
            index, x, non_diff = token
            index_in_block = index % _block_len(current)
            with use_tape(CollectTape(outputs)) as tape:
                token_fn(
                    matmul_params,
                    other_params,
                    Visible(past, current, index_in_block, index),
                    (x, non_diff),
                )
            used[:] = tape.used
            kernels = [op.kernel for op in tape.used if not op.is_weight]
            return kernels, [op.x for op in tape.used]

        # kernels do not depend on the token
        return jax.vmap(collect_token, out_axes=(None, 0))(tokens, outputs)

    kernels, past_vjp, inputs = jax.vjp(collect_block, past, has_aux=True)
    d_kernels = [op.gradient(x, y) for op, x, y in zip(used, inputs, d_outputs, strict=True)]
    d_entries = [a for op, a in zip(used, d_kernels, strict=True) if not op.is_weight]
    d_weights = [a for op, a in zip(used, d_kernels, strict=True) if op.is_weight]
    d_entries = [a.astype(k.dtype) for a, k in zip(d_entries, kernels, strict=True)]
    return d_weights, past_vjp(d_entries)[0]


def _extend(history: Array, t: int) -> Array:
    widths = [(0, 0)] * history.ndim
    widths[ENTRY_AXIS] = (0, t)
    return jnp.pad(history, widths)


def _entries(history: Array, start: Array | int, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(history, start, size, history.ndim + ENTRY_AXIS)


def _span(history: Array, t: int) -> int:
    """Return the number of entries from before the call."""
    return history.shape[ENTRY_AXIS] - t


def _block_len(current: History) -> int:
    """Return the number of tokens of a block, given its entries."""
    return jax.tree.leaves(current)[0].shape[ENTRY_AXIS]


def _past_entries(history: History, index: Array | int, t: int) -> History:
    """Return the entries before the block that starts at `index`."""
    return jax.tree.map(lambda a: _entries(a, index, _span(a, t)), history)


def _update_entries(history: Array, new: Array, start: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(history, new, start, history.ndim + ENTRY_AXIS)


def _add_entries(history: Array, new: Array, start: Array) -> Array:
    return _update_entries(history, _entries(history, start, new.shape[ENTRY_AXIS]) + new, start)


def _write_entry(history: Array, entry: Array, index_in_block: Array) -> Array:
    return _update_entries(
        history, jnp.expand_dims(entry.astype(history.dtype), ENTRY_AXIS), index_in_block
    )


def _read_entry(history: Array, index_in_block: Array) -> Array:
    return jnp.squeeze(_entries(history, index_in_block, 1), history.ndim + ENTRY_AXIS)


def _split_blocks(a: Array, block: int) -> Array:
    """[t ...] -> [n c ...]."""
    return a.reshape(-1, block, *a.shape[1:])


def _join_blocks(a: Array) -> Array:
    return a.reshape(-1, *a.shape[2:])
