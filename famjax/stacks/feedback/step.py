"""Processes one token with the ring buffer, with the same results as a call."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from famjax.core.lanes import select_state
from famjax.core.types import Array, Context, DropoutFn, acc_dtype
from famjax.layers.dropout import apply_dropout
from famjax.ops import relative
from famjax.ops.attention import soft_cap
from famjax.stacks.feedback import ring
from famjax.stacks.feedback.parts import Parts
from famjax.stacks.feedback.ring import KV, FeedbackState
from famjax.stacks.feedback.spec import FeedbackSpec


def step(
    spec: FeedbackSpec, parts: Parts, x: Array, state: FeedbackState, ctx: Context
) -> tuple[Array, FeedbackState]:
    """Process one token per lane: [b 1 d] -> [b 1 d], and the state after it."""
    if ctx.reset is not None:
        reset = ctx.reset if ctx.valid is None else ctx.reset & ctx.valid
        fresh = ring.init_state(spec, x.shape[0])
        state = select_state(reset[:, 0], fresh, state, axis=1)
    write_index = state.place[0]
    rings = ring_kv(spec, parts, state)
    views = [
        RingView.from_state(spec, pair, n, state) for pair, n in zip(rings, spec.spans, strict=True)
    ]
    states = [x[:, 0]]
    for i in range(len(parts.layers)):
        attend = functools.partial(_attend, spec, parts, i, views[i % spec.sets], write_index)
        states.append(parts.apply_layer(spec, i, states[-1], attend, source=ctx.source))
    memory = parts.mix_memory(states)
    new: tuple[Array, ...] = (memory,)
    if not spec.caches_memory:
        pairs = parts.project_memory(memory)
        keys, values = (jnp.stack(arrays) for arrays in zip(*pairs, strict=True))
        rotated = spec.rotate(keys[..., None, :], write_index[:, None, None])
        new = (rotated[..., 0, :], values)
    return states[-1][:, None], ring.append_entry(spec, state, new, ctx)


def ring_kv(spec: FeedbackSpec, parts: Parts, state: FeedbackState) -> list[KV]:
    """Return keys and values of the ring buffer, [b g span e], rotated, for each set."""
    if not spec.caches_memory:
        return list(zip(*state.slots, strict=True))
    indices = jnp.arange(spec.span)
    swapped = [
        (jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))
        for k, v in parts.project_memory(state.slots[0])
    ]
    return [(spec.rotate(k, indices), v) for k, v in swapped]


class RingView(NamedTuple):
    """The entries of one set that a token attends to: the whole ring, or its newest s entries.

    Attributes:
      k, v: [b g s e], in the ring's order if it is the whole ring, else oldest first.
      indices: [b s], the entries' indices in the ring.
      mask: [b s], which entries are filled.
      shift: [b], by how much a bias by distance, farthest first, must be rolled to align with the
        entries.
    """

    k: Array
    v: Array
    indices: Array
    mask: Array
    shift: Array

    @classmethod
    def from_state(cls, spec: FeedbackSpec, kv: KV, n: int, state: FeedbackState) -> RingView:
        write_index, filled = state.place[0][:, None], state.filled[0][:, None]
        if n == spec.span:
            indices = jnp.broadcast_to(jnp.arange(n), (write_index.shape[0], n))
            # distance - 1: 0 for the entry before the write index, increasing backwards
            mask = (write_index - 1 - indices) % n < filled
            return cls(*kv, indices, mask, state.place[0])
        newest = jnp.arange(n)
        indices = (write_index - n + newest) % spec.span
        k, v = (jnp.take_along_axis(a, indices[:, None, :, None], 2) for a in kv)
        return cls(k, v, indices, newest >= n - filled, jnp.zeros_like(state.place[0]))


def _attend(
    spec: FeedbackSpec,
    parts: Parts,
    i: int,
    view: RingView,
    write_index: Array,
    q: Array,
    drop: DropoutFn | None,
) -> Array:
    """Attend with one token, at `write_index` [b]: [b h e] -> [b h e]."""
    b, h, e = q.shape
    n = view.indices.shape[-1]
    bias = jnp.broadcast_to(parts.distance_bias(spec, i, q, n), (b, h, n))
    bias = jax.vmap(_roll_bias)(bias, view.shift)
    scores = soft_cap(_scores(spec, q, view, write_index), parts.layers[i].qkv.cap) + bias
    mask, some = relative.unmask_empty_rows(view.mask)
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    weights = apply_dropout(weights * some[:, None, None], drop).astype(view.v.dtype)
    out = jnp.einsum("bgrs,bgse->bgre", weights.reshape(b, view.k.shape[1], -1, n), view.v)
    return out.reshape(b, h, e)


def _roll_bias(reversed_bias: Array, shift: Array) -> Array:
    """Roll a bias by distance, farthest first, by `shift`, to align it with the ring: [h s]."""
    # one slice of two periods is faster than a gather
    n = reversed_bias.shape[-1]
    twice = jnp.concatenate([reversed_bias, reversed_bias], -1)
    return jax.lax.dynamic_slice_in_dim(twice, n - shift, n, -1)


def _scores(spec: FeedbackSpec, q: Array, view: RingView, write_index: Array) -> Array:
    """Return q k / sqrt(e): [b h e] -> [b h s].

    Entries at the write index and after it were written in the previous pass over the ring, so for
    them the query is rotated further by the ring's length.
    """
    b, h, e = q.shape

    def scores(write_index: Array) -> Array:
        rotated = spec.rotate(q, write_index[:, None]).reshape(b, view.k.shape[1], -1, e)
        products = jnp.einsum(
            "bgre,bgse->bgrs", rotated, view.k, preferred_element_type=acc_dtype(q)
        )
        return products.reshape(b, h, -1) * e**-0.5

    if spec.config.positions == "learned":
        return scores(write_index)
    earlier = view.indices < write_index[:, None]
    return jnp.where(earlier[:, None], scores(write_index), scores(write_index + spec.span))
