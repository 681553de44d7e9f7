"""The carried state: a ring buffer of the last `span` tokens' entries, unrolled within a call.

In the ring buffer a token overwrites the entry of the token that is `span` tokens before it, so
that `step` writes one entry. Within a call, the entries are a history, oldest first, followed by
the call's own entries: token i has index span + i. In both layouts, rotary keys are rotated by
their index.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from famjax.core.lanes import select_state
from famjax.core.types import Array, Context
from famjax.ops.positions import document_positions
from famjax.stacks.feedback.spec import FeedbackSpec

KV = tuple[Array, Array]


class FeedbackState(NamedTuple):
    """A ring buffer. Checkpoints contain the field names.

    Attributes:
      slots: the entries: keys and values, each [sets b g span e]; or only memories, [j b span d].
      place: [1 b] int32, the write index, which is the index of the document's next token.
      filled: [1 b] int32, the number of filled entries; the others are zero.
    """

    slots: tuple[Array, ...]
    place: Array
    filled: Array


class CallIndices(NamedTuple):
    """Indices of a call's tokens in the history.

    Attributes:
      first: [b t], index of the first entry of the token's document.
      end: [b], number of the call's tokens up to the last valid one.
      write_index, filled: [b], write index and number of filled entries after the call.
    """

    first: Array
    end: Array
    write_index: Array
    filled: Array

    @classmethod
    def from_context(
        cls, spec: FeedbackSpec, state: FeedbackState, ctx: Context, tokens: int
    ) -> CallIndices:
        start, _, after = document_positions(state.place[0], ctx, tokens)
        carried = start[:, -1] < 0
        count = after - jnp.where(carried, state.place[0], 0)
        filled = jnp.where(carried, state.filled[0], 0) + count
        return cls(
            jnp.where(start < 0, spec.span - state.filled[0][:, None], spec.span + start),
            jnp.maximum(start[:, -1], 0) + count,
            after % spec.span,
            jnp.minimum(filled, spec.span),
        )


def init_state(spec: FeedbackSpec, batch: int) -> FeedbackState:
    """Return the initial state."""
    if spec.caches_memory:
        shape: tuple[int, ...] = (spec.memories, batch, spec.span, spec.model.width)
    else:
        shape = (spec.sets, batch, spec.kv_heads, spec.span, spec.head_dim)
    entries = (jnp.zeros(shape, spec.dtype),) * (1 if spec.caches_memory else 2)
    zero = jnp.zeros((1, batch), jnp.int32)
    return FeedbackState(entries, zero, zero)


def state_axes(spec: FeedbackSpec) -> FeedbackState:
    """Return the logical axes of a state."""
    memory: Any = ((None, "batch", None, None),)
    keys: Any = ((None, "batch", "kv_heads", None, None),) * 2
    lanes: Any = (None, "batch")
    return FeedbackState(memory if spec.caches_memory else keys, lanes, lanes)


def unroll_ring(spec: FeedbackSpec, state: FeedbackState) -> tuple[Array, ...]:
    """Return the entries oldest first, keys rotated by their index in the history."""
    entries = [_roll(a, -state.place[0]) for a in state.slots]
    if not spec.caches_memory:
        new_index = jnp.arange(spec.span)
        old_index = (state.place[0][:, None] + new_index) % spec.span
        entries[0] = spec.rotate(entries[0], (new_index - old_index)[:, None])
    return tuple(entries)


def final_state(
    spec: FeedbackSpec, state: FeedbackState, new: tuple[Array, ...], indices: CallIndices
) -> FeedbackState:
    """Return the state after a call whose tokens have the entries `new`, [... t e] each."""
    positions = jnp.arange(spec.span)
    occupied = positions >= spec.span - indices.filled[:, None]
    entries = []
    for old, a in zip(unroll_ring(spec, state), new, strict=True):
        joined = jnp.concatenate([old, a.astype(old.dtype)], -2)
        last = _slice_lanes(joined, indices.end, spec.span)
        lanes = (1, occupied.shape[0], *(1,) * (last.ndim - 4), spec.span, 1)
        entries.append(jnp.where(occupied.reshape(lanes), last, 0))
    if not spec.caches_memory:
        old_index = indices.end[:, None] + positions
        new_index = (indices.write_index[:, None] + positions) % spec.span
        entries[0] = spec.rotate(entries[0], (new_index - old_index)[:, None])
    ring = tuple(_roll(a, indices.write_index) for a in entries)
    new_state = FeedbackState(ring, indices.write_index[None], indices.filled[None])
    all_padding = indices.end == 0
    return select_state(all_padding, state, new_state, axis=1)


def append_entry(
    spec: FeedbackSpec, state: FeedbackState, new: tuple[Array, ...], ctx: Context
) -> FeedbackState:
    """Return the state after one token with entries `new`: [sets b g e] twice, or [j b d]."""
    write_index = state.place[0]
    valid = jnp.ones_like(write_index) if ctx.valid is None else ctx.valid[:, 0].astype(jnp.int32)
    lanes, all_sets = jnp.arange(write_index.shape[0]), slice(None)
    # padding is written out of bounds, where it is dropped
    index = jnp.where(valid > 0, write_index, spec.span)

    def write(entries: Array, new: Array) -> Array:
        # indexed so that it is in place: with vmap over lanes, XLA would transpose a ring of
        # several sets twice per token
        middle = (all_sets,) * (entries.ndim - 4)
        if middle:
            new = jnp.swapaxes(new, 0, 1)
        where = (all_sets, lanes, *middle, index)
        return (
            jnp.asarray(entries)
            .at[where]
            .set(new.astype(entries.dtype), mode="drop", unique_indices=True)
        )

    entries = tuple(write(a, b) for a, b in zip(state.slots, new, strict=True))
    filled = jnp.minimum(state.filled + valid, spec.span)
    return FeedbackState(entries, (state.place + valid) % spec.span, filled)


def _roll(entries: Array, by: Array) -> Array:
    """Roll the entries [sets b ... entries e] of each lane by `by` [b]."""
    return jax.vmap(lambda a, n: jnp.roll(a, n, axis=-2), (1, 0), 1)(entries, by)


def _slice_lanes(entries: Array, start: Array, size: int) -> Array:
    """Return `size` entries of each lane from index `start` [b]: [sets b ... size e].

    Args:
      entries: [sets b ... entries e].
    """

    def lane(a: Array, start: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(a, start, size, a.ndim - 2)

    return jax.vmap(lane, (1, 0), 1)(entries, start)
