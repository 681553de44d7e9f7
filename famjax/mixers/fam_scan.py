"""The scan of a call's blocks, which updates the FAM (`famjax.mixers.fam`).

Only the f memory tokens are processed block by block. The scan needs the keys and values of each
block, and returns those of the FAM that each block then attends to.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.core.lanes import select_rows
from famjax.core.types import Array, Context
from famjax.layers.dropout import FEEDBACK, split_key
from famjax.layers.linear import MATMUL_PARAMS
from famjax.layers.mlp import FeedForward
from famjax.mixers.blocks import (
    BlockInputs,
    ExtraKV,
    from_block_major,
    memory_resets,
    to_block_major,
)
from famjax.ops.deferred_scan import deferred_scan, plain_scan
from famjax.parallel import sequence_parallel
from famjax.parallel.traced import sequence_shards, shard_map_rows

if TYPE_CHECKING:
    from famjax.mixers.fam import Fam, FamState


class BlockFams(NamedTuple):
    """The FAM before each block, which the block attends to, and the last one.

    Attributes:
      k, v: [b n f g e], its keys and values.
      updates: [b n] int32, its number of updates, see `FamState`.
      last: [b f d], F after the call.
      last_updates: [b] int32, its number of updates.
      before, after: [b n f d], F before and after each block; None unless `scan_memory` kept them.
    """

    k: Array
    v: Array
    updates: Array
    last: Array
    last_updates: Array
    before: Array | None = None
    after: Array | None = None


def scan_call(
    mixer: Fam, x: Array, state: FamState, ctx: Context, mlp: FeedForward, keep: bool = False
) -> tuple[BlockInputs, BlockFams, ExtraKV]:
    """Project all blocks of a call, [b n*w d], and update the FAM with them.

    Args:
      keep: return the FAMs before and after each block too, not only their keys and values.

    Returns:
      the blocks' inputs; their FAMs; the keys and values of the FAMs that they attend to.
    """
    # at a reset the FAM is set to its initial value, so there must be one
    assert ctx.reset is None or mixer.first_memory(ctx.prompt) is not None
    inputs = mixer.window.project_blocks(x, state.window, ctx)
    fams = scan_memory(mixer, inputs, state, ctx, mlp, keep)
    return inputs, fams, memory_kv(mixer, state, fams)


def scan_memory(
    mixer: Fam, inputs: BlockInputs, state: FamState, ctx: Context, mlp: FeedForward, keep: bool
) -> BlockFams:
    """Scan the blocks, updating the memory tokens; arguments as for `scan_call`."""
    k, v, blocks = inputs.seen_k, inputs.v, inputs.blocks
    b, n = k.shape[:2]
    reset = memory_resets(blocks, ctx, mixer.block_len)
    full = blocks.valid == mixer.block_len
    before, updates = count_updates(mixer, state.updates, reset, full)
    keys = split_key(ctx.key, FEEDBACK, n)
    offset = ctx.offset
    if offset is not None:
        offset = jnp.broadcast_to(offset, (n, *offset.shape))
    xs = to_block_major((k, v))
    non_diff = (*to_block_major((reset, full, before)), keys, offset)
    graph, matmul_params, other_params, dropout_keys = cast(
        Any, nnx.split(nnx.List([mixer, mlp]), MATMUL_PARAMS, nnx.Param, ...)
    )
    shared = (matmul_params, (other_params, ctx.prompt))

    def body(shared: Any, fam: Array, x: Any) -> Any:
        matmul_params, (other_params, prompt), *dropout_keys = shared
        layer, mlp = cast(
            "tuple[Fam, FeedForward]",
            nnx.merge(graph, matmul_params, other_params, *dropout_keys),
        )
        return scan_body(layer, mlp, prompt, fam, x, keep)

    # dropout masks, also those of adapters, are drawn for the whole batch, not for its shards
    if keys is not None or dropout_keys or sequence_shards(n) > 1:
        fam, ys = sequence_parallel.ring_scan(
            body, (*shared, dropout_keys), state.fam, (xs, non_diff)
        )
    else:
        scan = deferred_scan if mixer.defer_weight_gradients else plain_scan
        scan_rows = functools.partial(
            scan, lambda *args: body((*args[:2], dropout_keys), *args[2:])
        )
        # with an offset each row has its own prompt
        other_axes = (None, None if offset is None else 0)
        sharded_scan = shard_map_rows(scan_rows, b, (None, other_axes, 0, 1, 1), (0, 1))
        fam, ys = sharded_scan(*shared, state.fam, xs, non_diff)
    fam_k, fam_v, *kept = from_block_major(ys)
    return BlockFams(fam_k, fam_v, before, fam, updates, *kept)


def count_updates(mixer: Fam, updates: Array, reset: Array, full: Array) -> tuple[Array, Array]:
    """Return the number of updates before each block [b n], and after the last one [b].

    Args:
      updates: [b], number of updates before the call.
      reset, full: [b n] bool, whether the memory is reset before the block, and whether the block
        updates it.
    """

    def body(updates: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        reset, full = x
        updates = jnp.where(reset, 0, updates)
        return jnp.minimum(updates + full, mixer.max_updates), updates

    updates, before = jax.lax.scan(body, updates, (reset.T, full.T))
    return before.T, updates


def scan_body(
    mixer: Fam, mlp: FeedForward, prompt: Array | None, fam: Array, x: Any, keep: bool
) -> tuple[Array, tuple[Array, ...]]:
    """Update the FAM with one block: the body of `scan_memory`.

    Returns:
      the FAM after the block; the keys and values of the FAM before it, which the block attends to,
      and with `keep` also both FAMs.
    """
    (k, v), (reset, full, updates, key, offset) = x
    prompt = mixer.first_memory(prompt)
    # without one there is no reset
    if prompt is not None:
        fam = select_rows(reset, jnp.broadcast_to(prompt, fam.shape).astype(fam.dtype), fam)
    projected = mixer.project(fam, updates)
    new = mixer.update_memory(fam, projected, updates, k, v, mlp, key, offset, prompt)
    new = select_rows(full, new, fam)
    return new, (*projected[1:], fam, new) if keep else projected[1:]


def memory_kv(mixer: Fam, state: FamState, fams: BlockFams) -> ExtraKV:
    """Return the keys and values of the last p FAMs, which each block attends to: p*f each."""
    b, n, f, g, e = fams.k.shape
    p, w = mixer.previous, mixer.block_len
    distance = jnp.arange(p - 1, -1, -1)

    def last(old: Array, new: Array) -> Array:
        newest = new[:, :, None]
        if p == 1:
            return newest
        older = sequence_parallel.halo_exchange(old[:, :-1].astype(new.dtype), new)
        return jnp.concatenate([older, newest], 2)

    past_k, past_v = last(state.k, fams.k), last(state.v, fams.v)
    if p > 1:
        past_k = mixer.qkv.rotate(past_k, -w * distance[:, None])
    visible = jnp.repeat(fams.updates[..., None] >= distance, f, axis=-1)
    shape = (b, n, p * f, g, e)
    return ExtraKV(past_k.reshape(shape), past_v.reshape(shape), visible)
