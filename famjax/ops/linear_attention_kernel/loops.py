"""The loops over chunks, for TPU and GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl

from famjax.core.types import Array
from famjax.ops.linear_attention_kernel.chunk import ChunkFn, ChunkMask
from famjax.ops.linear_attention_kernel.sizes import heads_per_step


def scan_tpu(
    chunk_fn: ChunkFn,
    queries: Array,
    ins: Sequence[Array],
    carry: tuple[Array, Array],
    outs: Sequence[jax.ShapeDtypeStruct],
    reverse: bool = False,
    interpret: bool = False,
) -> list[Array]:
    """Scan the chunks, one grid step for each.

    Args:
      queries: [chunks b 2 i], each query's document start and token index.
      ins: inputs of the pass, of tokens [n b g ..], with the call's n chunks, or of queries
        [chunks b g 1 i]. The first is q or k.
      carry: S or its gradient [b g k e], and z or its gradient [b g 1 k].
      outs: shapes and dtypes of the results, laid out like `ins`.

    Returns:
      the results, and the final carry.
    """
    from jax.experimental.pallas import tpu as pltpu

    chunks, (b, g) = len(queries), carry[0].shape[:2]
    tokens = ins[0].shape[0] // chunks * ins[0].shape[-2]
    heads = heads_per_step(g)

    def chunk_index(n: Any) -> Any:
        return chunks - 1 - n if reverse else n

    def kernel(queries: Any, *refs: Any) -> None:
        in_refs, init_refs, out_refs, carry_refs = _split_refs(refs, len(ins), 2, len(outs), 2)
        n = pl.program_id(2)

        @pl.when(n == 0)
        def _() -> None:
            for ref, init in zip(carry_refs, init_refs, strict=True):
                ref[...] = init[...]

        mask = ChunkMask(queries[:1], queries[1:], chunk_index(n) * tokens)
        for head in range(heads):
            matrices = (_matrix(ref[:, head]) for ref in in_refs)
            values = chunk_fn(mask, *matrices, *(ref[head] for ref in carry_refs))
            for ref, value in zip(out_refs, values, strict=False):
                ref[:, head] = value.astype(ref.dtype).reshape(ref.shape[0], *ref.shape[2:])
            for ref, value in zip(carry_refs, values[-2:], strict=True):
                ref[head] = value

    def chunk_spec(a: Any) -> pl.BlockSpec:
        rest = a.shape[3:]
        block = (a.shape[0] // chunks, None, heads, *rest)
        return pl.BlockSpec(block, lambda i, j, n: (chunk_index(n), i, j, *(0 for _ in rest)))

    def head_spec(a: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, heads, *a.shape[2:]), lambda i, j, n: (i, j, 0, 0))

    query_spec = pl.BlockSpec(
        (None, None, *queries.shape[2:]), lambda i, j, n: (chunk_index(n), i, 0, 0)
    )
    return pl.pallas_call(
        kernel,
        grid=(b, g // heads, chunks),
        in_specs=[query_spec, *map(chunk_spec, ins), *map(head_spec, carry)],
        out_specs=[*map(chunk_spec, outs), *map(head_spec, carry)],
        out_shape=[*outs, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in carry)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name=f"linear_attention_{chunk_fn.__name__}",
    )(queries, *ins, *carry)


def scan_gpu(
    chunk_fn: ChunkFn,
    queries: Array,
    ins: Sequence[Array],
    carry: tuple[Array, Array],
    outs: Sequence[jax.ShapeDtypeStruct],
    reverse: bool = False,
    interpret: bool = False,
) -> list[Array]:
    """Scan the chunks in a loop, one program for each row and key head; see `scan_tpu`."""
    from jax.experimental.pallas import triton

    chunks, (b, g) = len(queries), carry[0].shape[:2]
    tokens = ins[0].shape[0] // chunks * ins[0].shape[-2]

    def kernel(start: Any, token: Any, *refs: Any) -> None:
        in_refs, init_refs, out_refs, carry_refs = _split_refs(refs, len(ins), 2, len(outs), 2)

        def step(i: Array, carry: Any) -> Any:
            n = chunks - 1 - i if reverse else i

            def chunk_slice(ref: Any) -> Any:
                size = ref.shape[0] // chunks
                return (pl.ds(n * size, size), *(slice(None) for _ in ref.shape[1:]))

            start_row, token_row = (_matrix(ref[chunk_slice(ref)]) for ref in (start, token))
            mask = ChunkMask(start_row, token_row, n * tokens)
            values = chunk_fn(mask, *(_matrix(ref[chunk_slice(ref)]) for ref in in_refs), *carry)
            for ref, value in zip(out_refs, values, strict=False):
                shape = (ref.shape[0] // chunks, *ref.shape[1:])
                ref[chunk_slice(ref)] = value.astype(ref.dtype).reshape(shape)
            return values[-2:]

        final_carry = jax.lax.fori_loop(0, chunks, step, tuple(ref[...] for ref in init_refs))
        for ref, value in zip(carry_refs, final_carry, strict=True):
            ref[...] = value

    def row_spec(a: Any) -> pl.BlockSpec:
        rest = a.shape[3:]
        return pl.BlockSpec(
            (a.shape[0], None, None, *rest), lambda i, j: (0, i, j, *(0 for _ in rest))
        )

    def head_spec(a: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *a.shape[2:]), lambda i, j: (i, j, 0, 0))

    query_spec = pl.BlockSpec((chunks, None, 1, queries.shape[3]), lambda i, j: (0, i, 0, 0))
    return pl.pallas_call(
        kernel,
        grid=(b, g),
        in_specs=[query_spec, query_spec, *map(row_spec, ins), *map(head_spec, carry)],
        out_specs=[*map(row_spec, outs), *map(head_spec, carry)],
        out_shape=[*outs, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in carry)],
        # with 4 warps ptxas spills 16 KB per thread of `backward_k_v`, with 8 warps 0.6 KB (sm_80,
        # k 64, e 128)
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name=f"linear_attention_{chunk_fn.__name__}",
    )(queries[:, :, :1], queries[:, :, 1:], *ins, *carry)


def _split_refs(refs: Sequence[Any], *sizes: int) -> list[Sequence[Any]]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [refs[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _matrix(x: Array) -> Array:
    """[m r c k] or [m c k] -> [m r c, k], [1 1 i] -> [1 i]."""
    return x.reshape(-1, x.shape[-1])
