"""The carried state: what the last `span` tokens left, as a ring, and as a line in a call.

In a ring a token overwrites the one that stood `span` tokens before it, so that it costs the
writing of one slot. In a call the slots lie on a line, oldest first, those of the call behind them:
the call's token i has slot span + i. Keys with rotary positions are rotated by their slot in both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from famjax.core.types import Array, Context
from famjax.ops.positions import in_document
from famjax.stacks.feedback.plan import Plan

Pair = tuple[Array, Array]


class FeedbackState(NamedTuple):
    """A ring of slots.

    Attributes:
      slots: keys and values, each [s b g span e]; or the memory they are made of, [j b span d].
      place: [1 b] int32, the slot of the document's next token.
      filled: [1 b] int32, slots that hold something; the others are zero.
    """

    slots: tuple[Array, ...]
    place: Array
    filled: Array


class Reading(NamedTuple):
    """Where the tokens of one call stand.

    Attributes:
      first: [b t], the first slot of the line that the token's document has.
      end: [b], the call's tokens up to the last valid one.
      place, filled: [b], of the state behind the call.
    """

    first: Array
    end: Array
    place: Array
    filled: Array

    @classmethod
    def of(cls, plan: Plan, state: FeedbackState, ctx: Context, tokens: int) -> Reading:
        start, _, after = in_document(state.place[0], ctx, tokens)
        carried = start[:, -1] < 0
        count = after - jnp.where(carried, state.place[0], 0)
        filled = jnp.where(carried, state.filled[0], 0) + count
        return cls(
            jnp.where(start < 0, plan.span - state.filled[0][:, None], plan.span + start),
            jnp.maximum(start[:, -1], 0) + count,
            after % plan.span,
            jnp.minimum(filled, plan.span),
        )


def empty(plan: Plan, batch: int) -> FeedbackState:
    """Return the state of lanes that have read nothing."""
    if plan.remembers_states:
        shape: tuple[int, ...] = (plan.memories, batch, plan.span, plan.model.width)
    else:
        shape = (plan.sets, batch, plan.kv_heads, plan.span, plan.head_dim)
    slots = (jnp.zeros(shape, plan.dtype),) * (1 if plan.remembers_states else 2)
    zero = jnp.zeros((1, batch), jnp.int32)
    return FeedbackState(slots, zero, zero)


def axes(plan: Plan) -> FeedbackState:
    """Return the logical axes of a state."""
    memory: Any = ((None, "batch", None, None),)
    keys: Any = ((None, "batch", "kv_heads", None, None),) * 2
    lanes: Any = (None, "batch")
    return FeedbackState(memory if plan.remembers_states else keys, lanes, lanes)


def line(plan: Plan, state: FeedbackState) -> tuple[Array, ...]:
    """Return the slots oldest first, keys rotated by their slot of the line."""
    slots = [_roll(a, -state.place[0]) for a in state.slots]
    if not plan.remembers_states:
        now = jnp.arange(plan.span)
        was = (state.place[0][:, None] + now) % plan.span
        slots[0] = plan.rotate(slots[0], (now - was)[:, None])
    return tuple(slots)


def final_state(
    plan: Plan, state: FeedbackState, new: tuple[Array, ...], reading: Reading
) -> FeedbackState:
    """Return the state behind a call that has written the slots `new`, [... t e] each."""
    places = jnp.arange(plan.span)
    holds = places >= plan.span - reading.filled[:, None]
    slots = []
    for old, a in zip(line(plan, state), new, strict=True):
        both = jnp.concatenate([old, a.astype(old.dtype)], -2)
        last = _from(both, reading.end, plan.span)
        lanes = (1, holds.shape[0], *(1,) * (last.ndim - 4), plan.span, 1)
        slots.append(jnp.where(holds.reshape(lanes), last, 0))
    if not plan.remembers_states:
        was = reading.end[:, None] + places
        now = (reading.place[:, None] + places) % plan.span
        slots[0] = plan.rotate(slots[0], (now - was)[:, None])
    idle = reading.end == 0

    def kept(new: Array, old: Array) -> Array:
        return jnp.where(idle.reshape(1, -1, *(1,) * (new.ndim - 2)), old, new).astype(old.dtype)

    ring = tuple(_roll(a, reading.place) for a in slots)
    made = FeedbackState(ring, reading.place[None], reading.filled[None])
    return jax.tree.map(kept, made, state)


def append_slot(
    plan: Plan, state: FeedbackState, new: tuple[Array, ...], ctx: Context
) -> FeedbackState:
    """Return the state behind one token that has left `new`: [s b g e] twice, or [j b d]."""
    place = state.place[0]
    valid = jnp.ones_like(place) if ctx.valid is None else ctx.valid[:, 0].astype(jnp.int32)
    lanes, everything = jnp.arange(place.shape[0]), slice(None)
    # what is not valid is written outside of the ring, where it is dropped
    at = jnp.where(valid > 0, place, plan.span)

    def write(slots: Array, new: Array) -> Array:
        # in place: mapped over lanes, a ring of several sets would be transposed twice a token
        between = (everything,) * (slots.ndim - 4)
        if between:
            new = jnp.swapaxes(new, 0, 1)
        where = (everything, lanes, *between, at)
        return (
            jnp.asarray(slots)
            .at[where]
            .set(new.astype(slots.dtype), mode="drop", unique_indices=True)
        )

    slots = tuple(write(a, b) for a, b in zip(state.slots, new, strict=True))
    filled = jnp.minimum(state.filled + valid, plan.span)
    return FeedbackState(slots, (state.place + valid) % plan.span, filled)


def _roll(slots: Array, by: Array) -> Array:
    """Roll the slots of every lane: [s b ... n e], by [b]."""
    return jax.vmap(lambda a, n: jnp.roll(a, n, axis=-2), (1, 0), 1)(slots, by)


def _from(slots: Array, start: Array, size: int) -> Array:
    """Return `size` slots of every lane, from slot `start` on: [s b ... n e], [b]."""

    def lane(a: Array, start: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(a, start, size, a.ndim - 2)

    return jax.vmap(lane, (1, 0), 1)(slots, start)
