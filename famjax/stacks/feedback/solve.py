"""Solvers of a call's recurrence: sequential, parallel, or by fixed-point iteration.

Each returns

    y        [b t d], the last layer's outputs
    entries  keys and values of the tokens' memories, [b g t e] twice for each set, with keys
             rotated by their index
    memory   [j b t d], the tokens' memories
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from famjax.core.remat import remat_with_policy
from famjax.core.types import Array, DropoutFn, Params
from famjax.layers.cross_attention import EncodedSource
from famjax.ops import relative
from famjax.ops.token_scan import Visible, token_scan
from famjax.parallel.traced import row_shards, shard_map_rows
from famjax.stacks.feedback.parts import DropoutRng, Partitioned, Parts, combine
from famjax.stacks.feedback.ring import KV
from famjax.stacks.feedback.spec import FeedbackSpec

Solution = tuple[Array, list[KV], Array]

# maximum tokens per block of `token_scan`: larger blocks make larger weight-gradient products, but
# more of the attention's gradient is sequential
BLOCK = 16


def sequential(
    spec: FeedbackSpec,
    arrays: Partitioned,
    x: Array,
    history: list[KV],
    first: Array,
    rng: DropoutRng | None,
    source: EncodedSource | None,
) -> Solution:
    """Compute Equation 1 token by token.

    Args:
      x: [b t d].
      history: entries from before the call, [b g s e] twice for each set.
      first: [b t], see `CallIndices`.
      source: what layers with cross attention attend to, with keys and values [l b s ..]; or None.
    """
    t = x.shape[1]
    block = min(BLOCK, t)
    # the last block is padded with tokens that no token attends to
    x, first = _pad_to_blocks(x, block), _pad_to_blocks(first, block)
    count = x.shape[1]
    broadcast_tokens = functools.partial(
        jax.tree.map, lambda a: jnp.broadcast_to(a, (count, *a.shape))
    )
    shards = row_shards(x.shape[0])
    non_diff = (
        jnp.swapaxes(first, 0, 1),
        _per_token_rng(rng, count, shards),
        broadcast_tokens(arrays.non_diff),
        None if source is None else _token_masks(source.mask, t, block),
    )
    token_fn = functools.partial(_token_fn, spec, arrays.graphs)
    axes: Any = (1, None)  # of `DropoutRng`: only keys are sharded
    mask_axes = None if source is None else 1
    non_diff_axes = (1, None if rng is None else DropoutRng(*axes), None, mask_axes)
    scan = functools.partial(token_scan, token_fn, block)
    # the source's gradient is accumulated token by token, like that of a parameter
    source_kv, kv_axes = (None, None) if source is None else (source.kv, 1)
    in_axes = (None, (None, kv_axes), 0, 1, non_diff_axes)
    sharded_scan = shard_map_rows(scan, x.shape[0], in_axes, ((1, 2), 0))
    x = jnp.swapaxes(x, 0, 1)
    (y, memory), history = sharded_scan(
        arrays.matmul_params, (arrays.other_params, source_kv), history, x, non_diff
    )
    entries = [
        (k[:, :, n : n + t], v[:, :, n : n + t])
        for (k, v), n in zip(history, spec.spans, strict=True)
    ]
    return jnp.swapaxes(y[:t], 0, 1), entries, jnp.moveaxis(memory[:t], 0, 2)


def _token_fn(
    spec: FeedbackSpec,
    graphs: Any,
    matmul_params: Params,
    other_params: Params,
    visible: Visible,
    xs: Any,
) -> Any:
    """Process one token: x [b d] -> ((y [b d], memory [j b d]), (k, v) [b g e] for each set)."""
    x, (first, rng, non_diff, mask) = xs
    rng = None if rng is None else rng._replace(key=rng.key[0])
    other_params, source_kv = other_params
    source = None if mask is None else EncodedSource(source_kv, mask[:, None])
    parts = combine(graphs, matmul_params, other_params, non_diff)
    states = [x]
    for i in range(len(parts.layers)):
        attend = functools.partial(_attend_window, spec, parts, i, visible, first)
        states.append(parts.apply_layer(spec, i, states[-1], attend, rng, source))
    memory = parts.mix_memory(states)
    index = (spec.span + visible.index_in_call)[None]
    pairs = [
        (spec.rotate(k[..., None, :], index)[..., 0, :], v) for k, v in parts.project_memory(memory)
    ]
    return (states[-1], memory), pairs


def _attend_window(
    spec: FeedbackSpec,
    parts: Parts,
    i: int,
    visible: Visible,
    first: Array,
    q: Array,
    drop: DropoutFn | None,
) -> Array:
    """Attend to layer i's set of entries with one token: [b h e] -> [b h e]."""
    s = i % spec.sets
    past, current = visible.past[s], visible.current[s]
    span = past[0].shape[-2]
    entries = span + current[0].shape[-2]
    bias = relative.scatter_bias(
        parts.distance_bias(spec, i, q, span), visible.index_in_block, entries
    )
    # index in the history of the first visible entry
    start = spec.span - span + visible.index_in_call - visible.index_in_block
    mask = relative.span_mask(visible.index_in_block, span, entries) & (
        jnp.arange(entries) >= first[:, None] - start
    )
    q = spec.rotate(q, (spec.span + visible.index_in_call)[None])
    cap = parts.layers[i].qkv.cap
    return relative.attend_window(q, past, current, bias, mask, cap, drop)


def _pad_to_blocks(a: Array, block: int) -> Array:
    """Pad [b t ...] to whole blocks."""
    return jnp.pad(a, [(0, 0), (0, -a.shape[1] % block)] + [(0, 0)] * (a.ndim - 2))


def _token_masks(mask: Array, t: int, block: int) -> Array:
    """Return each token's mask of the source, [t b s]; padding of the last block sees all."""
    b, _, s = mask.shape
    unseen = _pad_to_blocks(jnp.broadcast_to(~mask, (b, t, s)), block)
    return jnp.swapaxes(~unseen, 0, 1)


def _per_token_rng(rng: DropoutRng | None, count: int, shards: int) -> DropoutRng | None:
    """Return PRNG keys of each token and row shard, [t shards], and LayerDrop masks, [t l].

    Layers are dropped for a whole call. Dropout masks depend on the number of devices.
    """
    if rng is None:
        return None
    fold_in = jax.vmap(jax.random.fold_in, (None, 0))
    keys = fold_in(rng.key, jnp.arange(count * shards)).reshape(count, shards)
    return DropoutRng(keys, jnp.broadcast_to(rng.layers, (count, *rng.layers.shape)))


def parallel(
    spec: FeedbackSpec,
    arrays: Partitioned,
    x: Array,
    history: list[KV],
    first: Array,
    rng: DropoutRng | None,
    source: EncodedSource | None,
) -> Solution:
    """Compute a stack whose layers' memories are their own inputs: a Transformer."""
    parts = combine(*arrays)

    def apply_layer(i: int, x: Array) -> tuple[Array, KV]:
        (pair,) = _to_entries(spec, parts.project_memory(x[None], i))
        return _attend_layer(spec, parts, i, x, history[i], pair, first, rng, source), pair

    states, entries = [x], []
    for i in range(len(parts.layers)):
        remat_layer = remat_with_policy(
            functools.partial(apply_layer, i), spec.model.remat, scanned=False
        )
        x, pair = remat_layer(states[-1])
        states.append(x)
        entries.append(pair)
    return x, entries, jnp.stack(states[:-1])


def _attend_layer(
    spec: FeedbackSpec,
    parts: Parts,
    i: int,
    x: Array,
    old: KV,
    new: KV,
    first: Array,
    rng: DropoutRng | None,
    source: EncodedSource | None,
) -> Array:
    """Apply layer i to x [b t d], with the entries before the call and those of the call."""
    k, v = (jnp.concatenate(a, 2) for a in zip(old, new, strict=True))
    span, t = old[0].shape[2], x.shape[1]
    token = jnp.arange(t)
    entries = spec.span - span + jnp.arange(span + t)  # indices in the history
    mask = relative.span_mask(token, span, span + t) & (entries >= first[..., None])

    def attend(q: Array, drop: DropoutFn | None) -> Array:
        bias = parts.distance_bias(spec, i, q, span)
        by_head = jnp.moveaxis(bias, -3, -2) if bias.ndim > 2 else bias[:, None]
        bias = relative.relative_shift(
            jnp.broadcast_to(by_head, (*by_head.shape[:-2], t, span)), span + t
        )
        q = jnp.swapaxes(spec.rotate(jnp.swapaxes(q, 1, 2), spec.span + token), 1, 2)
        return relative.attend_history(q, k, v, bias, mask, parts.layers[i].qkv.cap, drop)

    return parts.apply_layer(spec, i, x, attend, rng, source)


def _to_entries(spec: FeedbackSpec, pairs: list[KV]) -> list[KV]:
    """Return keys and values [b t g e] of a call's tokens as entries, [b g t e]."""
    swapped = [(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)) for k, v in pairs]
    return [(spec.rotate(k, spec.span + jnp.arange(k.shape[2])), v) for k, v in swapped]


def fixed_point(
    spec: FeedbackSpec,
    arrays: Partitioned,
    x: Array,
    history: list[KV],
    first: Array,
    rng: DropoutRng | None,
    source: EncodedSource | None,
) -> Solution:
    """Compute the memory by sweeps, or sequentially if the last sweep changed it too much."""
    args = (spec, arrays, x, history, first, rng, source)
    approximation, change = sweep(*args)
    return jax.lax.cond(
        change <= spec.config.tolerance,
        lambda: approximation,
        lambda: sequential(*args),
    )


def sweep(
    spec: FeedbackSpec,
    arrays: Partitioned,
    x: Array,
    history: list[KV],
    first: Array,
    rng: DropoutRng | None,
    source: EncodedSource | None,
) -> tuple[Solution, Array]:
    """Return the result of `sweeps` sweeps, and `relative_change` of the memory in the last one.

    A sweep computes the memories of all tokens in parallel from those of the last sweep (Jacobi
    iteration). Since a memory depends only on earlier ones, the first n tokens are exact after n
    sweeps.
    """
    parts = combine(*arrays)

    @jax.checkpoint
    def sweep_once(memory: Array) -> Solution:
        entries = _to_entries(spec, parts.project_memory(memory))
        states = [x]
        for i in range(len(parts.layers)):
            s = i % spec.sets
            pairs = history[s], entries[s]
            states.append(_attend_layer(spec, parts, i, states[-1], *pairs, first, rng, source))
        return states[-1], entries, parts.mix_memory(states)

    memory = jnp.broadcast_to(x, (spec.memories, *x.shape))
    for _ in range(spec.config.sweeps):
        old_memory = memory
        y, entries, memory = sweep_once(old_memory)
    change = relative_change(memory, old_memory)
    return (y, entries, memory), jax.lax.stop_gradient(change)


def relative_change(new: Array, old: Array) -> Array:
    """Return by how much the memory [j b t d] of a row has changed, relative to its norm, at most.

    Each row by itself, so that one that has not converged is not hidden by others that have.
    """
    change, size = (jnp.square(a).sum((0, 2, 3)) for a in (new - old, new))
    return jnp.sqrt(change / size).max()
