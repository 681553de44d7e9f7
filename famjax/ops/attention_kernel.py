"""A Pallas kernel of softmax attention with any mask, for GPUs (FlashAttention-2, Dao 2023,
arXiv 2307.08691).

XLA writes the scores of all pairs to main memory, forward and backward, and reads them several
times: a third of the time of a training step of BSWA 1B on an H200 (docs/gpu.md). The kernels keep
a tile of scores on the chip. For a query i and tiles of keys j,

    x_ij = q_i k_j / sqrt(e)       l_i = log sum_j exp(x_ij)       out_i = sum_j exp(x_ij - l_i) v_j

and the backward pass, which gets out and l, recomputes p_ij = exp(x_ij - l_i):

    dx_ij = p_ij (d_out_i v_j - D_i)        D_i = out_i d_out_i
    dq_i = sum_j dx_ij k_j / sqrt(e)        dk_j = sum_i dx_ij q_i / sqrt(e)
    dv_j = sum_i p_ij d_out_i

The mask [b t s] is an array, since masks depend on documents, windows and padding. Products are in
the dtype of q, k and v and accumulated in float32, as for XLA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from famjax.core.types import Array, Axes
from famjax.ops.kernels import kernel_platform, kernel_precision
from famjax.parallel.traced import local_rows, shard_map_axes, shards_tokens

# maximum bytes of a row of a tile's scores, in the dtype of the keys, and of its queries or keys.
# Compiled by Triton 3.9 for sm_80, kernels take at most 98 KB of shared memory (the limit of
# some GPUs is 99), and spill at most 0.3 KB of registers per thread
_ROW_BYTES, _TILE_BYTES = 128, 2**14
# offsets in the mask, the largest array, are 32-bit integers
_MAX_PAIRS = 2**31 - 1
# Triton's products have sides of at least 16; smaller tiles than 32 are left to XLA
_MIN_SIDE, _MIN_TILE = 16, 32
# score of a masked pair: exp(x) is 0 for it, as long as a query sees a key
_MASKED = -1e30


class Tiles(NamedTuple):
    """Tokens of a tile: of queries and of keys."""

    t: int
    s: int


def choose_tiles(q: Array, k: Array, v: Array) -> Tiles | None:
    """Return the tiles for [b t h e] and [b s g e]; None if the kernel does not support the call.

    It needs sides that are powers of 2, of which that of queries divides their number, and one
    dtype, float32 or bfloat16. Keys are padded to whole tiles.
    """
    if not all(isinstance(n, int) for a in (q, k) for n in a.shape):
        return None  # an exported program has a batch of any size
    if {a.dtype for a in (q, k, v)} not in ({jnp.dtype("float32")}, {jnp.dtype("bfloat16")}):
        return None
    e, size = q.shape[-1], q.dtype.itemsize
    max_tile = min(_ROW_BYTES, _TILE_BYTES // e) // size
    if e & (e - 1) or e < _MIN_SIDE or max_tile < _MIN_TILE:
        return None
    t, s = q.shape[1], k.shape[1]
    # the largest power of 2 that divides t; few keys are padded by less
    tiles = Tiles(
        min(t & -t, max_tile), max_tile if s % max_tile == 0 or s >= 4 * max_tile else _MIN_TILE
    )
    return tiles if min(tiles.t, s) >= _MIN_TILE else None


def supports(q: Array, k: Array, v: Array) -> bool:
    """Return whether a call [b t h e], [b s g e] that is traced now uses the kernel on GPUs."""
    if kernel_platform() != "gpu" or choose_tiles(q, k, v) is None:
        return False
    # a kernel for all tokens would be computed by each of the devices that share them
    if shards_tokens() or _shard(lambda *a: a, q, k, 1, (_TOKENS,)) is None:
        return False
    return local_rows(len(q)) * q.shape[1] * k.shape[1] <= _MAX_PAIRS


def forward(
    q: Array, k: Array, v: Array, mask: Array, interpret: bool = False
) -> tuple[Array, ...]:
    """Return the output [b t h e], and l [b h t] in float32.

    Args:
      q: [b t h e].
      k, v: [b s g e]; query head i uses key head i // (h / g).
      mask: [b t s] bool, or [1 t s] for all rows.
    """
    f = functools.partial(_forward, interpret=interpret)
    return _run(f, (q, k, v), mask, (), (_TOKENS, _STATISTICS))


def backward(
    q: Array,
    k: Array,
    v: Array,
    mask: Array,
    out: Array,
    log_sum: Array,
    d_out: Array,
    interpret: bool = False,
) -> tuple[Array, ...]:
    """Return the gradients of q, k and v; `out` and `log_sum` are the results of `forward`."""
    product = out.astype(jnp.float32) * d_out.astype(jnp.float32)
    delta = product.sum(-1).swapaxes(1, 2)  # D in FlashAttention-2, Algorithm 2: [b h t]
    f = functools.partial(_backward, interpret=interpret)
    d_q, d_k, d_v = _run(f, (q, k, v, d_out), mask, (log_sum, delta), (_TOKENS,) * 3)
    s = k.shape[1]
    return d_q, d_k[:, :s], d_v[:, :s]


# of queries, keys and values [b t h e], and of a number for each query and head [b h t]
_TOKENS: Axes = ("batch", None, "kv_heads")
_STATISTICS: Axes = ("batch", "kv_heads")


def _run(
    f: Callable[..., Any],
    tokens: Sequence[Array],
    mask: Array,
    statistics: Sequence[Array],
    out_axes: tuple[Axes, ...],
) -> tuple[Array, ...]:
    """Run a kernel on each device's rows and heads, with keys [b s g e] padded to whole tiles.

    The gradients of k and v are those of the padded keys.
    """
    q, k, v, *others = tokens
    tiles = choose_tiles(q, k, v)
    sharded = _shard(f, q, k, len(tokens), out_axes, len(mask), len(statistics))
    assert sharded is not None  # see `supports`
    assert tiles
    padding = -k.shape[1] % tiles.s
    k, v = (jnp.pad(a, ((0, 0), (0, padding), (0, 0), (0, 0))) for a in (k, v))
    mask = jnp.pad(mask.astype(jnp.int8), ((0, 0), (0, 0), (0, padding)))
    return tuple(sharded(q, k, v, *others, mask, *statistics))


def _shard(
    f: Callable[..., Any],
    q: Array,
    k: Array,
    tokens: int,
    out_axes: tuple[Axes, ...],
    mask_rows: int = 1,
    statistics: int = 0,
) -> Callable[..., Any] | None:
    of_mask: Axes = ("batch",) if mask_rows > 1 else ()
    axes = (*(_TOKENS,) * tokens, of_mask, *(_STATISTICS,) * statistics)
    return shard_map_axes(f, {"batch": q.shape[0], "kv_heads": k.shape[2]}, axes, out_axes)


def _forward(q: Array, k: Array, v: Array, mask: Array, interpret: bool) -> tuple[Array, ...]:
    tiles = choose_tiles(q, k, v)
    assert tiles
    b, t, h, e = q.shape
    s, r = k.shape[1], h // k.shape[2]

    def kernel(q_ref: Any, k_ref: Any, v_ref: Any, mask_ref: Any, out_ref: Any, l_ref: Any) -> None:
        q = q_ref[...]

        def step(j: Array, carry: Any) -> Any:
            out, greatest, total = carry
            keys = pl.ds(j * tiles.s, tiles.s)
            x = _scores(q, k_ref[keys, :], mask_ref[:, keys])
            new = jnp.maximum(greatest, x.max(1))
            p, shrink = jnp.exp(x - new[:, None]), jnp.exp(greatest - new)
            out = out * shrink[:, None] + _dot(p.astype(v_ref.dtype), v_ref[keys, :], 1, 0)
            return out, new, total * shrink + p.sum(1)

        empty = _zeros(tiles.t, e), jnp.full(tiles.t, _MASKED, jnp.float32), _zeros(tiles.t)
        out, greatest, total = jax.lax.fori_loop(0, s // tiles.s, step, empty)
        out_ref[...] = (out / total[:, None]).astype(out_ref.dtype)
        l_ref[...] = greatest + jnp.log(total)

    of_queries = pl.BlockSpec((None, tiles.t, None, e), lambda i, h, b: (b, i, h, 0))
    of_keys = pl.BlockSpec((None, s, None, e), lambda i, h, b: (b, 0, h // r, 0))
    return _call(
        kernel,
        (t // tiles.t, h, b),
        [of_queries, of_keys, of_keys, _mask_spec(mask, (tiles.t, s), lambda i: (i, 0))],
        (of_queries, pl.BlockSpec((None, None, tiles.t), lambda i, h, b: (b, h, i))),
        (jax.ShapeDtypeStruct(q.shape, v.dtype), jax.ShapeDtypeStruct((b, h, t), jnp.float32)),
        interpret,
    )(q, k, v, mask)


class _BackwardArguments(NamedTuple):
    """The arguments of the backward kernels: l is `log_sum` and D is `delta`, [b h t]."""

    q: Array
    k: Array
    v: Array
    d_out: Array
    mask: Array
    log_sum: Array
    delta: Array


def _backward(*arrays: Array, interpret: bool) -> tuple[Array, ...]:
    args = _BackwardArguments(*arrays)
    return _backward_q(args, interpret), *_backward_k_v(args, interpret)


def _backward_q(args: _BackwardArguments, interpret: bool) -> Array:
    q, k, v, _, mask, *_ = args
    tiles = choose_tiles(q, k, v)
    assert tiles
    b, t, h, e = q.shape
    s, r = k.shape[1], h // k.shape[2]

    def kernel(*refs: Any) -> None:
        q_ref, k_ref, v_ref, d_out_ref, mask_ref, l_ref, delta_ref, d_q_ref = refs
        q, d_out, log_sum, delta = (ref[...] for ref in (q_ref, d_out_ref, l_ref, delta_ref))

        def step(j: Array, d_q: Array) -> Array:
            keys = pl.ds(j * tiles.s, tiles.s)
            k = k_ref[keys, :]
            p = jnp.exp(_scores(q, k, mask_ref[:, keys]) - log_sum[:, None])
            d_x = p * (_dot(d_out, v_ref[keys, :], 1, 1) - delta[:, None])
            return d_q + _dot(d_x.astype(k.dtype), k, 1, 0)

        d_q = jax.lax.fori_loop(0, s // tiles.s, step, _zeros(tiles.t, e))
        d_q_ref[...] = (d_q * e**-0.5).astype(d_q_ref.dtype)

    of_queries = pl.BlockSpec((None, tiles.t, None, e), lambda i, h, b: (b, i, h, 0))
    of_keys = pl.BlockSpec((None, s, None, e), lambda i, h, b: (b, 0, h // r, 0))
    of_statistics = pl.BlockSpec((None, None, tiles.t), lambda i, h, b: (b, h, i))
    of_mask = _mask_spec(mask, (tiles.t, s), lambda i: (i, 0))
    return _call(
        kernel,
        (t // tiles.t, h, b),
        [of_queries, of_keys, of_keys, of_queries, of_mask, of_statistics, of_statistics],
        (of_queries,),
        (jax.ShapeDtypeStruct(q.shape, q.dtype),),
        interpret,
    )(*args)[0]


def _backward_k_v(args: _BackwardArguments, interpret: bool) -> tuple[Array, ...]:
    q, k, v, _, mask, *_ = args
    tiles = choose_tiles(q, k, v)
    assert tiles
    b, t, h, e = q.shape
    s, g = k.shape[1:3]
    r, parts = h // g, t // tiles.t

    def kernel(*refs: Any) -> None:
        q_ref, k_ref, v_ref, d_out_ref, mask_ref, l_ref, delta_ref, d_k_ref, d_v_ref = refs
        k, v = k_ref[...], v_ref[...]

        def step(n: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            d_k, d_v = carry
            head = jax.lax.div(n, parts)
            queries = pl.ds(jax.lax.rem(n, parts) * tiles.t, tiles.t)
            q, d_out = (ref[queries, head, :] for ref in (q_ref, d_out_ref))
            log_sum, delta = (ref[head, queries] for ref in (l_ref, delta_ref))
            p = jnp.exp(_scores(q, k, mask_ref[queries, :]) - log_sum[:, None])
            d_x = p * (_dot(d_out, v, 1, 1) - delta[:, None])
            return (
                d_k + _dot(d_x.astype(q.dtype), q, 0, 0),
                d_v + _dot(p.astype(d_out.dtype), d_out, 0, 0),
            )

        empty = _zeros(tiles.s, e)
        d_k, d_v = jax.lax.fori_loop(0, r * parts, step, (empty, empty))
        d_k_ref[...] = (d_k * e**-0.5).astype(d_k_ref.dtype)
        d_v_ref[...] = d_v.astype(d_v_ref.dtype)

    of_queries = pl.BlockSpec((None, t, r, e), lambda j, g, b: (b, 0, g, 0))
    of_keys = pl.BlockSpec((None, tiles.s, None, e), lambda j, g, b: (b, j, g, 0))
    of_statistics = pl.BlockSpec((None, r, t), lambda j, g, b: (b, g, 0))
    of_mask = _mask_spec(mask, (t, tiles.s), lambda j: (0, j))
    return _call(
        kernel,
        (s // tiles.s, g, b),
        [of_queries, of_keys, of_keys, of_queries, of_mask, of_statistics, of_statistics],
        (of_keys, of_keys),
        tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (k, v)),
        interpret,
    )(*args)


def _scores(q: Array, k: Array, mask: Array) -> Array:
    """Return the scores of a tile, [t s]."""
    return jnp.where(mask != 0, _dot(q, k, 1, 1) * q.shape[-1] ** -0.5, _MASKED)


def _dot(x: Array, y: Array, over_x: int, over_y: int) -> Array:
    """Contract an axis of each matrix, accumulated in float32."""
    return jax.lax.dot_general(
        x,
        y,
        (((over_x,), (over_y,)), ((), ())),
        precision=kernel_precision(),
        preferred_element_type=jnp.float32,
    )


def _zeros(*shape: int) -> Array:
    return jnp.zeros(shape, jnp.float32)


def _mask_spec(mask: Array, shape: tuple[int, int], at: Callable[..., tuple[Any, Any]]) -> Any:
    """Return the blocks of a mask [b t s], or of the same for all rows [1 t s]."""
    rows = len(mask)
    return pl.BlockSpec((None, *shape), lambda i, h, b: (b if rows > 1 else 0, *at(i)))


def _call(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    in_specs: Sequence[Any],
    out_specs: Sequence[Any],
    outs: Sequence[Any],
    interpret: bool,
) -> Callable[..., tuple[Array, ...]]:
    """Return the call of a kernel; `outs` and its results are tuples."""
    from jax.experimental.pallas import triton

    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=outs,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="attention",
    )
