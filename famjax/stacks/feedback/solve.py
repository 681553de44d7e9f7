"""How a call's tokens are read: one after the other, all at once, or in sweeps over all of them.

Each returns

    y      [b t d]
    slots  keys and values that were written, [b g t e] twice for each set, rotated by their slot
    memory [j b t d]
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from famjax.core.remat import remat_with_policy
from famjax.core.sharding import row_shards, shard_map_rows
from famjax.core.types import Array
from famjax.layers.dropout import Drop
from famjax.ops import relative
from famjax.ops.token_scan import Visible, token_scan
from famjax.stacks.feedback.parts import Partitioned, Parts, Random, combine
from famjax.stacks.feedback.plan import Plan
from famjax.stacks.feedback.ring import Pair

Solution = tuple[Array, list[Pair], Array]

# tokens between two gradients of the weights, at most: with more, those products are larger, and so
# is the share of the attention whose gradient cannot wait for the block's end
BLOCK = 16


# one after the other -----------------------------------------------------------------------------


def sequential(
    plan: Plan,
    divided: Partitioned,
    x: Array,
    line: list[Pair],
    first: Array,
    random: Random | None,
) -> Solution:
    """Read tokens as Equation 1 says.

    Args:
      x: [b t d].
      line: slots from before the call, [b g n e] twice for each set.
      first: [b t], see `Reading`.
    """
    t = x.shape[1]
    block = min(BLOCK, t)
    # the last block is filled up with tokens that nobody sees
    x, first = _pad_to_blocks(x, block), _pad_to_blocks(first, block)
    count = x.shape[1]
    scatter_bias = functools.partial(jax.tree.map, lambda a: jnp.broadcast_to(a, (count, *a.shape)))
    parts = row_shards(x.shape[0])
    non_diff = (
        jnp.swapaxes(first, 0, 1),
        _by_token(random, count, parts),
        scatter_bias(divided.non_diff),
    )
    token = functools.partial(_token, plan, divided.graphs)
    axes: Any = (1, None)  # of the random numbers, the keys are each part's own
    of_rest = (1, None if random is None else Random(*axes), None)
    step = functools.partial(token_scan, token, block)
    read = shard_map_rows(step, x.shape[0], (None, None, 0, 1, of_rest), ((1, 2), 0))
    x = jnp.swapaxes(x, 0, 1)
    (y, memory), line = read(divided.matmul_params, divided.other_params, line, x, non_diff)
    slots = [
        (k[:, :, n : n + t], v[:, :, n : n + t]) for (k, v), n in zip(line, plan.spans, strict=True)
    ]
    return jnp.swapaxes(y[:t], 0, 1), slots, jnp.moveaxis(memory[:t], 0, 2)


def _token(
    plan: Plan, graphs: Any, matmul_params: Any, other_params: Any, seen: Visible, xs: Any
) -> Any:
    """Read one token: x [b d] -> ((y [b d], memory [j b d]), (k, v) [b g e] of each set)."""
    x, (first, random, others) = xs
    random = None if random is None else random._replace(key=random.key[0])
    parts = combine(graphs, matmul_params, other_params, others)
    states = [x]
    for i in range(len(parts.layers)):
        attend = functools.partial(_attend_window, plan, parts, i, seen, first)
        states.append(parts.layer(plan, i, states[-1], attend, random))
    memory = parts.memory(states)
    slot = (plan.span + seen.index_in_call)[None]
    pairs = [(plan.rotate(k[..., None, :], slot)[..., 0, :], v) for k, v in parts.remember(memory)]
    return (states[-1], memory), pairs


def _attend_window(
    plan: Plan, parts: Parts, i: int, seen: Visible, first: Array, q: Array, drop: Drop | None
) -> Array:
    """Attend to the slots of layer i's set with one token: [b h e] -> [b h e]."""
    s = i % plan.sets
    before, own = seen.past[s], seen.current[s]
    span = before[0].shape[-2]
    slots = span + own[0].shape[-2]
    bias = relative.scatter_bias(parts.bias(plan, i, q, span), seen.index_in_block, slots)
    # the window's first slot, as slots are counted in the line
    start = plan.span - span + seen.index_in_call - seen.index_in_block
    mask = relative.within_span(seen.index_in_block, span, slots) & (
        jnp.arange(slots) >= first[:, None] - start
    )
    q = plan.rotate(q, (plan.span + seen.index_in_call)[None])
    cap = parts.layers[i].qkv.cap
    return relative.attend_window(q, before, own, bias, mask, cap, drop)


def _pad_to_blocks(a: Array, block: int) -> Array:
    """Fill [b t ...] up to whole blocks."""
    return jnp.pad(a, [(0, 0), (0, -a.shape[1] % block)] + [(0, 0)] * (a.ndim - 2))


def _by_token(random: Random | None, count: int, parts: int) -> Random | None:
    """Return random numbers of each token, [t ...], keys [t parts] for each part of the rows.

    Layers are left out for a whole call. Dropout is another with another number of devices.
    """
    if random is None:
        return None
    every = jax.vmap(jax.random.fold_in, (None, 0))
    keys = every(random.key, jnp.arange(count * parts)).reshape(count, parts)
    return Random(keys, jnp.broadcast_to(random.layers, (count, *random.layers.shape)))


# all at once -------------------------------------------------------------------------------------


def at_once(
    plan: Plan,
    divided: Partitioned,
    x: Array,
    line: list[Pair],
    first: Array,
    random: Random | None,
) -> Solution:
    """Read tokens of a stack whose layers remember their own inputs: a Transformer."""
    parts = combine(*divided)

    def layer(i: int, x: Array) -> tuple[Array, Pair]:
        (pair,) = _slots(plan, parts.remember(x[None], i))
        return _layer(plan, parts, i, x, line[i], pair, first, random), pair

    states, slots = [x], []
    for i in range(len(parts.layers)):
        read = remat_with_policy(functools.partial(layer, i), plan.model.remat, scanned=False)
        x, pair = read(states[-1])
        states.append(x)
        slots.append(pair)
    return x, slots, jnp.stack(states[:-1])


def _layer(
    plan: Plan,
    parts: Parts,
    i: int,
    x: Array,
    before: Pair,
    new: Pair,
    first: Array,
    random: Random | None,
) -> Array:
    """Return what layer i makes of x [b t d], seeing the slots before the call and its own."""
    k, v = (jnp.concatenate(a, 2) for a in zip(before, new, strict=True))
    span, t = before[0].shape[2], x.shape[1]
    token = jnp.arange(t)
    slots = plan.span - span + jnp.arange(span + t)  # as they are counted in the line
    mask = relative.within_span(token, span, span + t) & (slots >= first[..., None])

    def attend(q: Array, drop: Drop | None) -> Array:
        bias = parts.bias(plan, i, q, span)
        by_head = jnp.moveaxis(bias, -3, -2) if bias.ndim > 2 else bias[:, None]
        bias = relative.relative_shift(
            jnp.broadcast_to(by_head, (*by_head.shape[:-2], t, span)), span + t
        )
        q = jnp.swapaxes(plan.rotate(jnp.swapaxes(q, 1, 2), plan.span + token), 1, 2)
        return relative.attend_line(q, k, v, bias, mask, parts.layers[i].qkv.cap, drop)

    return parts.layer(plan, i, x, attend, random)


def _slots(plan: Plan, pairs: list[Pair]) -> list[Pair]:
    """Return keys and values [b t g e] of a call's tokens as slots, [b g t e]."""
    swapped = [(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)) for k, v in pairs]
    return [(plan.rotate(k, plan.span + jnp.arange(k.shape[2])), v) for k, v in swapped]


# in sweeps ---------------------------------------------------------------------------------------


def fixed_point(
    plan: Plan,
    divided: Partitioned,
    x: Array,
    line: list[Pair],
    first: Array,
    random: Random | None,
) -> Solution:
    """Approach the memory by sweeps; read one by one if the last sweep still changed it much."""
    approached, change = sweep(plan, divided, x, line, first, random)
    return jax.lax.cond(
        change <= plan.config.tolerance,
        lambda: approached,
        lambda: sequential(plan, divided, x, line, first, random),
    )


def sweep(
    plan: Plan,
    divided: Partitioned,
    x: Array,
    line: list[Pair],
    first: Array,
    random: Random | None,
) -> tuple[Solution, Array]:
    """Return what `sweeps` sweeps give, and by how much of it the last one changed the memory.

    A memory depends on earlier ones alone: after n sweeps the first n tokens are exact.
    """
    parts = combine(*divided)

    @jax.checkpoint
    def once(memory: Array) -> Solution:
        slots = _slots(plan, parts.remember(memory))
        states = [x]
        for i in range(len(parts.layers)):
            s = i % plan.sets
            states.append(_layer(plan, parts, i, states[-1], line[s], slots[s], first, random))
        return states[-1], slots, parts.memory(states)

    memory = jnp.broadcast_to(x, (plan.memories, *x.shape))
    for _ in range(plan.config.sweeps):
        before = memory
        y, slots, memory = once(before)
    change = jnp.linalg.norm(memory - before) / jnp.linalg.norm(memory)
    return (y, slots, memory), jax.lax.stop_gradient(change)
