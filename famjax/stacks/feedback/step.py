"""One token, from the ring: the same mathematics as a call's."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from famjax.core.types import Array, Context
from famjax.layers.dropout import Drop, dropped
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
    # distances less one of the slots, from the one before the token's around to the token's own
    behind = (place[:, None] - 1 - jnp.arange(plan.span)) % plan.span
    mask = behind < state.filled[0][:, None]
    states = [x[:, 0]]
    for i in range(len(parts.layers)):
        attend = functools.partial(
            _attend, plan, parts, i, rings[i % plan.sets], place, behind, mask
        )
        states.append(parts.layer(plan, i, states[-1], attend))
    memory = parts.memory(states)
    new: tuple[Array, ...] = (memory,)
    if not plan.remembers_states:
        pairs = parts.remember(memory)
        keys, values = (jnp.stack(of) for of in zip(*pairs, strict=True))
        turned = plan.rotate(keys[..., None, :], place[:, None, None])
        new = (turned[..., 0, :], values)
    return states[-1][:, None], ring.written(plan, state, new, ctx)


def slots_of(plan: Plan, parts: Parts, state: FeedbackState) -> list[Pair]:
    """Return keys and values of the ring, [b g span e], keys rotated by their slot, of each set."""
    if not plan.remembers_states:
        return list(zip(*state.slots, strict=True))
    places = jnp.arange(plan.span)
    swapped = [
        (jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)) for k, v in parts.remember(state.slots[0])
    ]
    return [(plan.rotate(k, places), v) for k, v in swapped]


def _attend(
    plan: Plan,
    parts: Parts,
    i: int,
    slots: Pair,
    place: Array,
    behind: Array,
    mask: Array,
    q: Array,
    drop: Drop | None,
) -> Array:
    """Attend with one token to a ring: [b h e] -> [b h e].

    Args:
      place: [b], the token's slot.
      behind: [b span], distance less one of each slot.
      mask: [b span], slots that hold something.
    """
    (k, v), (b, h, e), span = slots, q.shape, plan.span
    bias = jnp.broadcast_to(parts.bias(plan, i, q, span), (b, h, span))
    bias = jax.vmap(_rolled)(bias, place)
    scores = soft_cap(_scores(plan, q, k, place), parts.layers[i].qkv.cap) + bias
    mask, some = relative.visible_or_all(mask)
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    weights = dropped(weights * some[:, None, None], drop).astype(v.dtype)
    found = jnp.einsum("bgrs,bgse->bgre", weights.reshape(b, k.shape[1], -1, span), v)
    return found.reshape(b, h, e)


def _rolled(far_first: Array, place: Array) -> Array:
    """Lay weights by distance over a ring whose next slot is `place`: [h span] -> [h span]."""
    # one slice of two turns, which is read faster than slot by slot
    span = far_first.shape[-1]
    twice = jnp.concatenate([far_first, far_first], -1)
    return jax.lax.dynamic_slice_in_dim(twice, span - place, span, -1)


def _scores(plan: Plan, q: Array, k: Array, place: Array) -> Array:
    """Return q k / sqrt(e): [b h e], [b g span e] -> [b h span].

    Slots from the token's own on were written a turn of the ring ago.
    """
    b, h, e = q.shape
    wide = jnp.promote_types(q.dtype, jnp.float32)

    def scores(place: Array) -> Array:
        turned = plan.rotate(q, place[:, None]).reshape(b, k.shape[1], -1, e)
        found = jnp.einsum("bgre,bgse->bgrs", turned, k, preferred_element_type=wide)
        return found.reshape(b, h, -1) * e**-0.5

    if plan.config.positions == "learned":
        return scores(place)
    earlier = jnp.arange(plan.span) < place[:, None]
    return jnp.where(earlier[:, None], scores(place), scores(place + plan.span))


def _reset(plan: Plan, state: FeedbackState, lanes: Array) -> FeedbackState:
    """Return the state with lanes [b] that have read nothing."""

    def fresh(a: Array) -> Array:
        return jnp.where(lanes.reshape(1, -1, *(1,) * (a.ndim - 2)), jnp.zeros_like(a), a)

    return jax.tree.map(fresh, state)
