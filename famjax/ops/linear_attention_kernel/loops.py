"""The loop over chunks, for each platform its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl

from famjax.core.types import Array
from famjax.ops.linear_attention_kernel.chunk import Seen, Turn
from famjax.ops.linear_attention_kernel.sizes import heads_at_once


def on_tpu(
    turn: Turn,
    queries: Array,
    ins: Sequence[Array],
    carry: tuple[Array, Array],
    outs: Sequence[jax.ShapeDtypeStruct],
    reverse: bool = False,
    interpret: bool = False,
) -> list[Array]:
    """Take a pass over the chunks, one step of the grid for each.

    Args:
      queries: [chunks b 2 i], where the document of each query begins, and which token it is.
      ins: q or k first; tokens [n b g ..], n chunks of the call's, and numbers of queries
        [chunks b g 1 i].
      carry: S or its gradient [b g k e], and z's [b g 1 k].
      outs: shapes and types of the results, as `ins`.

    Returns:
      the results, and the carry behind the last chunk.
    """
    from jax.experimental.pallas import tpu as pltpu

    chunks, (b, g) = len(queries), carry[0].shape[:2]
    tokens = ins[0].shape[0] // chunks * ins[0].shape[-2]
    heads = heads_at_once(g)

    def nth(n: Any) -> Any:
        return chunks - 1 - n if reverse else n

    def kernel(queries: Any, *refs: Any) -> None:
        given, before, results, carried = _divided(refs, len(ins), 2, len(outs), 2)
        n = pl.program_id(2)

        @pl.when(n == 0)
        def _() -> None:
            for ref, begin in zip(carried, before, strict=True):
                ref[...] = begin[...]

        seen = Seen(queries[:1], queries[1:], nth(n) * tokens)
        for head in range(heads):
            matrices = (_matrix(ref[:, head]) for ref in given)
            values = turn(seen, *matrices, *(ref[head] for ref in carried))
            for ref, value in zip(results, values, strict=False):
                ref[:, head] = value.astype(ref.dtype).reshape(ref.shape[0], *ref.shape[2:])
            for ref, value in zip(carried, values[-2:], strict=True):
                ref[head] = value

    def of_chunk(a: Any) -> pl.BlockSpec:
        rest = a.shape[3:]
        block = (a.shape[0] // chunks, None, heads, *rest)
        return pl.BlockSpec(block, lambda i, j, n: (nth(n), i, j, *(0 for _ in rest)))

    def of_head(a: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, heads, *a.shape[2:]), lambda i, j, n: (i, j, 0, 0))

    of_queries = pl.BlockSpec((None, None, *queries.shape[2:]), lambda i, j, n: (nth(n), i, 0, 0))
    return pl.pallas_call(
        kernel,
        grid=(b, g // heads, chunks),
        in_specs=[of_queries, *map(of_chunk, ins), *map(of_head, carry)],
        out_specs=[*map(of_chunk, outs), *map(of_head, carry)],
        out_shape=[*outs, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in carry)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name=f"linear_attention_{turn.__name__}",
    )(queries, *ins, *carry)


def on_gpu(
    turn: Turn,
    queries: Array,
    ins: Sequence[Array],
    carry: tuple[Array, Array],
    outs: Sequence[jax.ShapeDtypeStruct],
    reverse: bool = False,
    interpret: bool = False,
) -> list[Array]:
    """Take a pass over the chunks in a loop, one program for a row and key head; see `on_tpu`."""
    from jax.experimental.pallas import triton

    chunks, (b, g) = len(queries), carry[0].shape[:2]
    tokens = ins[0].shape[0] // chunks * ins[0].shape[-2]

    def kernel(start: Any, token: Any, *refs: Any) -> None:
        given, before, results, carried = _divided(refs, len(ins), 2, len(outs), 2)

        def step(i: Array, carry: Any) -> Any:
            n = chunks - 1 - i if reverse else i

            def here(ref: Any) -> Any:
                size = ref.shape[0] // chunks
                return (pl.ds(n * size, size), *(slice(None) for _ in ref.shape[1:]))

            begin, which = (_matrix(ref[here(ref)]) for ref in (start, token))
            seen = Seen(begin, which, n * tokens)
            values = turn(seen, *(_matrix(ref[here(ref)]) for ref in given), *carry)
            for ref, value in zip(results, values, strict=False):
                shape = (ref.shape[0] // chunks, *ref.shape[1:])
                ref[here(ref)] = value.astype(ref.dtype).reshape(shape)
            return values[-2:]

        last = jax.lax.fori_loop(0, chunks, step, tuple(ref[...] for ref in before))
        for ref, value in zip(carried, last, strict=True):
            ref[...] = value

    def of_row(a: Any) -> pl.BlockSpec:
        rest = a.shape[3:]
        return pl.BlockSpec(
            (a.shape[0], None, None, *rest), lambda i, j: (0, i, j, *(0 for _ in rest))
        )

    def of_head(a: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *a.shape[2:]), lambda i, j: (i, j, 0, 0))

    of_queries = pl.BlockSpec((chunks, None, 1, queries.shape[3]), lambda i, j: (0, i, 0, 0))
    return pl.pallas_call(
        kernel,
        grid=(b, g),
        in_specs=[of_queries, of_queries, *map(of_row, ins), *map(of_head, carry)],
        out_specs=[*map(of_row, outs), *map(of_head, carry)],
        out_shape=[*outs, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in carry)],
        # for sm_80, k 64, e 128 ptxas spills 16 KB a thread of `to_k_v` with 4 warps, 0.6 with 8
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name=f"linear_attention_{turn.__name__}",
    )(queries[:, :, :1], queries[:, :, 1:], *ins, *carry)


def _divided(refs: Sequence[Any], *sizes: int) -> list[Sequence[Any]]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [refs[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _matrix(x: Array) -> Array:
    """[m r c k] or [m c k] -> [m r c, k], [1 1 i] -> [1 i]."""
    return x.reshape(-1, x.shape[-1])
