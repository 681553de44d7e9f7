"""One token, from the ring: the same mathematics as a call's."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from famjax.core.types import Array, Context
from famjax.layers.dropout import Drop, apply_dropout
from famjax.ops import relative
from famjax.ops.attention import soft_cap
from famjax.stacks.feedback import ring
from famjax.stacks.feedback.parts import Parts
from famjax.stacks.feedback.plan import Plan
from famjax.stacks.feedback.ring import FeedbackState, Pair


def step(
    plan: Plan, parts: Parts, x: Array, state: FeedbackState, ctx: Context
) -> tuple[Array, FeedbackState]:
    """[b 1 d] -> [b 1 d]."""
    if ctx.reset is not None:
        begins = ctx.reset if ctx.valid is None else ctx.reset & ctx.valid
        state = _reset(plan, state, begins[:, 0])
    place = state.place[0]
    rings = slots_of(plan, parts, state)
    seen = [Visible.of(plan, pair, n, state) for pair, n in zip(rings, plan.spans, strict=True)]
    states = [x[:, 0]]
    for i in range(len(parts.layers)):
        attend = functools.partial(_attend, plan, parts, i, seen[i % plan.sets], place)
        states.append(parts.layer(plan, i, states[-1], attend))
    memory = parts.memory(states)
    new: tuple[Array, ...] = (memory,)
    if not plan.remembers_states:
        pairs = parts.remember(memory)
        keys, values = (jnp.stack(of) for of in zip(*pairs, strict=True))
        turned = plan.rotate(keys[..., None, :], place[:, None, None])
        new = (turned[..., 0, :], values)
    return states[-1][:, None], ring.append_slot(plan, state, new, ctx)


def slots_of(plan: Plan, parts: Parts, state: FeedbackState) -> list[Pair]:
    """Return keys and values of the ring, [b g span e], keys rotated by their slot, of each set."""
    if not plan.remembers_states:
        return list(zip(*state.slots, strict=True))
    places = jnp.arange(plan.span)
    swapped = [
        (jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)) for k, v in parts.remember(state.slots[0])
    ]
    return [(plan.rotate(k, places), v) for k, v in swapped]


class Visible(NamedTuple):
    """What a token looks at of a set of keys and values: the whole ring, or its newest n slots.

    Attributes:
      k, v: [b g n e], in the ring's order, or oldest first.
      slots: [b n], where in the ring they lie.
      mask: [b n], which hold something.
      turn: [b], by how much weights by distance, far first, are rolled to lie over them.
    """

    k: Array
    v: Array
    slots: Array
    mask: Array
    turn: Array

    @classmethod
    def of(cls, plan: Plan, ring: Pair, n: int, state: FeedbackState) -> Visible:
        place, filled = state.place[0][:, None], state.filled[0][:, None]
        if n == plan.span:
            slots = jnp.broadcast_to(jnp.arange(n), (place.shape[0], n))
            # distances less one, from the slot before the token's around to the token's own
            mask = (place - 1 - slots) % n < filled
            return cls(*ring, slots, mask, state.place[0])
        newest = jnp.arange(n)
        slots = (place - n + newest) % plan.span
        k, v = (jnp.take_along_axis(a, slots[:, None, :, None], 2) for a in ring)
        return cls(k, v, slots, newest >= n - filled, jnp.zeros_like(state.place[0]))


def _attend(
    plan: Plan, parts: Parts, i: int, seen: Visible, place: Array, q: Array, drop: Drop | None
) -> Array:
    """Attend with one token, whose slot is `place` [b]: [b h e] -> [b h e]."""
    b, h, e = q.shape
    n = seen.slots.shape[-1]
    bias = jnp.broadcast_to(parts.bias(plan, i, q, n), (b, h, n))
    bias = jax.vmap(_roll)(bias, seen.turn)
    scores = soft_cap(_scores(plan, q, seen, place), parts.layers[i].qkv.cap) + bias
    mask, some = relative.visible_or_all(seen.mask)
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    weights = apply_dropout(weights * some[:, None, None], drop).astype(seen.v.dtype)
    found = jnp.einsum("bgrs,bgse->bgre", weights.reshape(b, seen.k.shape[1], -1, n), seen.v)
    return found.reshape(b, h, e)


def _roll(far_first: Array, place: Array) -> Array:
    """Lay weights by distance over a ring whose next slot is `place`: [h n] -> [h n]."""
    # one slice of two turns, which is read faster than slot by slot
    n = far_first.shape[-1]
    twice = jnp.concatenate([far_first, far_first], -1)
    return jax.lax.dynamic_slice_in_dim(twice, n - place, n, -1)


def _scores(plan: Plan, q: Array, seen: Visible, place: Array) -> Array:
    """Return q k / sqrt(e): [b h e] -> [b h n].

    Slots from the token's own on were written a turn of the ring ago.
    """
    b, h, e = q.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)

    def scores(place: Array) -> Array:
        turned = plan.rotate(q, place[:, None]).reshape(b, seen.k.shape[1], -1, e)
        found = jnp.einsum("bgre,bgse->bgrs", turned, seen.k, preferred_element_type=wide)
        return found.reshape(b, h, -1) * e**-0.5

    if plan.config.positions == "learned":
        return scores(place)
    earlier = seen.slots < place[:, None]
    return jnp.where(earlier[:, None], scores(place), scores(place + plan.span))


def _reset(plan: Plan, state: FeedbackState, lanes: Array) -> FeedbackState:
    """Return the state with lanes [b] that have read nothing."""

    def fresh(a: Array) -> Array:
        return jnp.where(lanes.reshape(1, -1, *(1,) * (a.ndim - 2)), jnp.zeros_like(a), a)

    return jax.tree.map(fresh, state)
