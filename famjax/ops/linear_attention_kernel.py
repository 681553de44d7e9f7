"""The chunkwise form of `linear_attention` as kernels for TPU and GPU (Pallas), forward and backward.

Each of its three passes over the chunks (read; to q; to k and v) is one function of a chunk and the
sums S and z, `_read`, `_to_q` and `_to_k_v`, on plain matrices. Tokens are the last axis: k = 32
features would fill a quarter of a row of 128 lanes and of what is fetched for it, tokens fill all.
Of c tokens of a chunk and r query heads, i counts r c queries and j counts c keys:

    q [k i], k [k j], v [e j], num [e i], den [1 i], S [k e], z [k 1]

Two loops run them, since the machines share none. A TPU runs a grid (b, g, chunks) in order: S and z
stay in VMEM, as results whose place does not depend on the chunk, and the next chunk is fetched
meanwhile, so a row may be of any length. A GPU runs programs (b, g) at once, each with a loop over
chunks and S and z in registers (Triton has neither memory of a program's own nor an order of them).

A TPU chunk is 128 tokens, a row of lanes: 2 r 128 (k + e) + 2 (r + 1) k e flops a token and key head,
of which the last term is the recurrence's own. VMEM, twice what a step fetches and writes (see
`_vmem`): 1.2 MB for 4 key heads of k 64, e 128 in bfloat16, forward, 2 MB for the gradient of k and v.

Products are in the narrower type and added up in float32, as in the form for XLA; what differs is
the order of sums. Gradients are those of `linear_attention._pairs`, whose arguments these take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from famjax.core.types import Array

# tokens of a chunk: of a TPU a row of lanes
_TPU_CHUNK = 128
# key heads of one step of a TPU's grid: their products do not wait for each other
_TPU_HEADS = 4
# of the 16 MB that a kernel may have
_TPU_VMEM = 10 * 2**20
# queries of a GPU's chunk, r c: a side of its products
_GPU_QUERIES = 64

# the loop over chunks, see `_on_tpu`
_Loop = Callable[..., tuple[list[Array], Array, Array]]


def forms(interpret: bool = False) -> dict[str, Kernels]:
    """Return the kernels by platform; interpreted, they run on any, slowly."""
    return {
        "tpu": Kernels(functools.partial(_on_tpu, interpret=interpret), _tpu_chunk),
        "cuda": Kernels(functools.partial(_on_gpu, interpret=interpret), _gpu_chunk),
    }


def worth_it(q: Array, k: Array, v: Array, s: Array) -> bool:
    """Tell whether a kernel may take the call: types, known sizes, and a chunk of tokens or more."""
    known = all(isinstance(n, int) for a in (q, k, v) for n in a.shape)
    types = {a.dtype for a in (q, k, v)}
    usual = len(types) == 1 and types <= {jnp.dtype("float32"), jnp.dtype("bfloat16")}
    return known and usual and s.dtype == jnp.float32 and q.shape[0] * q.shape[-2] >= _TPU_CHUNK


class Kernels(NamedTuple):
    """The passes of `linear_attention._pairs` on one platform.

    Attributes:
      loop: over chunks.
      chunk: of r, k, e and bytes of an element, the tokens of a chunk; 0 if sizes do not suit.
    """

    loop: _Loop
    chunk: Callable[[int, int, int, int], int]

    def suit(self, q: Array, v: Array) -> bool:
        return self._chunk(q, v) > 0

    def forward(
        self, q: Array, k: Array, v: Array, s: Array, z: Array, start: Array
    ) -> tuple[Array, Array, Array, Array]:
        """Return num [n b g r c e], den [n b g r c], and the last S and z; see `_pairs`."""
        c = self._chunk(q, v)
        tokens = (_queries(q, c), _keys(k, c), _keys(v, c))
        outs = ((v.shape[-1], 1, jnp.float32), (1, 1, jnp.float32))
        (num, den), s, z = self._run(_read, tokens, start, q, c, (s, z), outs)
        return _from_queries(num, q, c), _from_queries(den, q, c)[..., 0], s, z

    def backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        s: Array,
        z: Array,
        start: Array,
        to_num: Array,
        to_den: Array,
        to_s: Array,
        to_z: Array,
    ) -> tuple[Array, Array, Array, Array, Array]:
        """Return the gradients of q, k, v and of S and z before the call."""
        c = self._chunk(q, v)
        keys = (_keys(k, c), _keys(v, c))
        of_result = (_queries(to_num, c), _queries(to_den[..., None], c))
        n_k, n_e = k.shape[-1], v.shape[-1]
        (to_q,), _, _ = self._run(
            _to_q, (*keys, *of_result), start, q, c, (s, z), ((n_k, 1, q.dtype),)
        )
        (to_k, to_v), to_s, to_z = self._run(
            _to_k_v,
            (_queries(q, c), *keys, *of_result),
            start,
            q,
            c,
            (to_s, to_z),
            ((n_k, 0, k.dtype), (n_e, 0, v.dtype)),
            reverse=True,
        )
        to_k, to_v = _from_keys(to_k, k), _from_keys(to_v, v)
        return _from_queries(to_q, q, c), to_k, to_v, to_s, to_z

    def _chunk(self, q: Array, v: Array) -> int:
        return self.chunk(q.shape[3], q.shape[-1], v.shape[-1], q.dtype.itemsize)

    def _run(
        self,
        turn: _Turn,
        tokens: Sequence[Array],
        start: Array,
        q: Array,
        c: int,
        carry: tuple[Array, Array],
        outs: Sequence[tuple[int, int, Any]],
        reverse: bool = False,
    ) -> tuple[list[Array], Array, Array]:
        """Go over the chunks. outs: rows of each result, 1 for queries or 0 for keys, and type."""
        n, b, g, r, own, _ = q.shape
        chunks = -(-n * own // c)
        start = jnp.moveaxis(start, 0, 1).reshape(b, -1)
        start = jnp.pad(start, ((0, 0), (0, chunks * c - n * own)), mode="edge")
        # of every query: all r heads of a chunk side by side
        start = jnp.tile(start.reshape(b, chunks, 1, c), (1, 1, r, 1)).reshape(b, 1, -1)
        shapes = [
            jax.ShapeDtypeStruct((b, g, rows, chunks * c * (r if query else 1)), dtype)
            for rows, query, dtype in outs
        ]
        s, z = carry
        results, s, z = self.loop(turn, tokens, start, (s, z[..., None]), shapes, c, reverse)
        return results, s, z[..., 0]


# a chunk ------------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    """What the tokens of a chunk see. A document that begins at s is what stands from s to itself.

    Attributes:
      start: [1 i], where in the call the document of each query begins.
      first: the chunk's first token.
      c: tokens.
    """

    start: Array
    first: Array
    c: int

    def own(self, a: Array) -> Array:
        """Of the chunk's own tokens, those of its document up to itself: [j i]."""
        j = jax.lax.broadcasted_iota(jnp.int32, a.shape, 0)
        i = jax.lax.rem(jax.lax.broadcasted_iota(jnp.int32, a.shape, 1), jnp.int32(self.c))
        begin = jnp.broadcast_to(self.start, a.shape) - self.first
        return jnp.where((j <= i) & (j >= begin), a, 0.0)

    def past(self, a: Array) -> Array:
        """Of what was before the chunk, a query of the same document everything: [k i]."""
        return _where(jnp.broadcast_to(self.start, a.shape) < self.first, a)

    def last(self, a: Array) -> Array:
        """Only tokens of the chunk's last document are carried on: [k j]."""
        j = jax.lax.broadcasted_iota(jnp.int32, a.shape, 1)
        return _where(j + self.first >= self._begin(a), a)

    def kept(self, a: Array) -> Array:
        """Sums outlive the chunk if no document begins in it: [k e]."""
        return _where(self._begin(a) < self.first, a)

    def _begin(self, like: Array) -> Array:
        """Return where the last document begins."""
        return jnp.broadcast_to(jnp.max(self.start, axis=1, keepdims=True), like.shape)


# of what is seen, tokens, S and z -> results, S and z
_Turn = Callable[..., tuple[tuple[Array, ...], Array, Array]]


def _read(
    seen: _Seen, q: Array, k: Array, v: Array, s: Array, z: Array
) -> tuple[tuple[Array, Array], Array, Array]:
    a = seen.own(_product(k, q, 0, 0))
    num = _product(v, a, 1, 0) + seen.past(_product(s, q, 0, 0))
    past = (z * q.astype(z.dtype)).sum(0, keepdims=True)
    den = a.sum(0, keepdims=True) + seen.past(past)
    return (num, den), *_remember(seen, k, v, s, z)


def _to_q(
    seen: _Seen, k: Array, v: Array, to_num: Array, to_den: Array, s: Array, z: Array
) -> tuple[tuple[Array], Array, Array]:
    past = seen.past(_product(s, to_num, 1, 0) + z * to_den)
    own = _product(k, _to_a(seen, v, to_num, to_den), 1, 0)
    return (past + own,), *_remember(seen, k, v, s, z)


def _to_k_v(
    seen: _Seen,
    q: Array,
    k: Array,
    v: Array,
    to_num: Array,
    to_den: Array,
    to_s: Array,
    to_z: Array,
) -> tuple[tuple[Array, Array], Array, Array]:
    """Go backward: `to_s` and `to_z` are the gradients of the sums behind the chunk."""
    a = seen.own(_product(k, q, 0, 0))
    to_a = _to_a(seen, v, to_num, to_den)
    to_k = seen.last(_product(to_s, v, 1, 0) + to_z) + _product(q, to_a, 1, 1)
    to_v = _product(to_s, seen.last(k), 0, 0) + _product(to_num, a, 1, 1)
    q_past = seen.past(q)
    to_s = seen.kept(to_s) + _product(q_past, to_num, 1, 1)
    to_z = seen.kept(to_z) + (q_past.astype(to_z.dtype) * to_den).sum(1, keepdims=True)
    return (to_k, to_v), to_s, to_z


def _to_a(seen: _Seen, v: Array, to_num: Array, to_den: Array) -> Array:
    """Return the gradient of the similarities: [j i]."""
    return seen.own(_product(v, to_num, 0, 0) + to_den)


def _remember(seen: _Seen, k: Array, v: Array, s: Array, z: Array) -> tuple[Array, Array]:
    k = seen.last(k)
    s = seen.kept(s) + _product(k, v, 1, 1)
    return s, seen.kept(z) + k.astype(z.dtype).sum(1, keepdims=True)


def _product(x: Array, y: Array, over_x: int, over_y: int) -> Array:
    """Multiply two matrices over an axis of each, in the narrower type, and add up in float32."""
    narrow = x.dtype if x.dtype.itemsize < y.dtype.itemsize else y.dtype
    return jax.lax.dot_general(
        x.astype(narrow),
        y.astype(narrow),
        (((over_x,), (over_y,)), ((), ())),
        precision=_precision(),
        preferred_element_type=jnp.float32,
    )


def _precision() -> jax.lax.Precision:
    """Return the program's precision: kernels have the machine's own and full float32, no other."""
    asked = jax.config.jax_default_matmul_precision
    own = asked in (None, "default", "fastest", "bfloat16")
    return jax.lax.Precision.DEFAULT if own else jax.lax.Precision.HIGHEST


def _where(true: Array, a: Array) -> Array:
    """Return a where true and 0 elsewhere; by float32, in whose layout comparisons are."""
    return jnp.where(true, a.astype(jnp.float32), 0.0).astype(a.dtype)


# the loops over chunks ----------------------------------------------------------------------------


def _on_tpu(
    turn: _Turn,
    tokens: Sequence[Array],
    start: Array,
    carry: tuple[Array, Array],
    outs: Sequence[jax.ShapeDtypeStruct],
    c: int,
    reverse: bool,
    interpret: bool = False,
) -> tuple[list[Array], Array, Array]:
    """Take a pass over the chunks, one step of the grid for each.

    Args:
      tokens: each [b g x t] or [b g x t r], of chunk after chunk.
      start: [b 1 t r].
      carry: S or its gradient [b g k e], and z [b g k 1].
      outs: shapes and types of the results, as of tokens.
    """
    from jax.experimental.pallas import tpu as pltpu

    b, g = carry[0].shape[:2]
    chunks = _chunks(tokens, outs, c)
    heads = max(n for n in range(1, _TPU_HEADS + 1) if g % n == 0)
    nth = functools.partial(_nth, chunks, reverse)

    def kernel(start: Any, *refs: Any) -> None:
        ins, before, results, carried = _divided(refs, len(tokens), 2, len(outs), 2)
        n = pl.program_id(2)

        @pl.when(n == 0)
        def _() -> None:
            for ref, begin in zip(carried, before, strict=True):
                ref[...] = begin[...]

        seen = _Seen(start[...], nth(n) * c, c)
        for head in range(heads):
            values, *after = turn(seen, *(ref[head] for ref in (*ins, *carried)))
            for ref, value in zip((*results, *carried), (*values, *after), strict=True):
                ref[head] = value.astype(ref.dtype)

    def of_chunk(a: Any) -> pl.BlockSpec:
        block = (None, heads, a.shape[2], a.shape[3] // chunks)
        return pl.BlockSpec(block, lambda i, j, n: (i, j, 0, nth(n)))

    def of_head(a: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, heads, *a.shape[2:]), lambda i, j, n: (i, j, 0, 0))

    of_start = pl.BlockSpec((None, 1, start.shape[2] // chunks), lambda i, j, n: (i, 0, nth(n)))
    *results, s, z = pl.pallas_call(
        kernel,
        grid=(b, g // heads, chunks),
        in_specs=[of_start, *map(of_chunk, tokens), *map(of_head, carry)],
        out_specs=[*map(of_chunk, outs), *map(of_head, carry)],
        out_shape=[*outs, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in carry)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name=f"linear_attention{turn.__name__}",
    )(start, *tokens, *carry)
    return results, s, z


def _on_gpu(
    turn: _Turn,
    tokens: Sequence[Array],
    start: Array,
    carry: tuple[Array, Array],
    outs: Sequence[jax.ShapeDtypeStruct],
    c: int,
    reverse: bool,
    interpret: bool = False,
) -> tuple[list[Array], Array, Array]:
    """Take a pass over the chunks in a loop, one program for a row and key head; see `_on_tpu`."""
    from jax.experimental.pallas import triton

    b, g = carry[0].shape[:2]
    chunks = _chunks(tokens, outs, c)

    def kernel(start: Any, *refs: Any) -> None:
        ins, before, results, carried = _divided(refs, len(tokens), 2, len(outs), 2)

        def step(i: Array, carry: Any) -> Any:
            n = _nth(chunks, reverse, i)

            def here(ref: Any) -> Any:
                width = ref.shape[1] // chunks
                return slice(None), pl.ds(n * width, width)

            seen = _Seen(start[here(start)], n * c, c)
            values, s, z = turn(seen, *(ref[here(ref)] for ref in ins), *carry)
            for ref, value in zip(results, values, strict=True):
                ref[here(ref)] = value.astype(ref.dtype)
            return s, z

        last = jax.lax.fori_loop(0, chunks, step, tuple(ref[...] for ref in before))
        for ref, value in zip(carried, last, strict=True):
            ref[...] = value

    def whole(a: Any) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *a.shape[2:]), lambda i, j: (i, j, 0, 0))

    *results, s, z = pl.pallas_call(
        kernel,
        grid=(b, g),
        in_specs=[
            pl.BlockSpec((None, 1, start.shape[2]), lambda i, j: (i, 0, 0)),
            *map(whole, (*tokens, *carry)),
        ],
        out_specs=[*map(whole, (*outs, *carry))],
        out_shape=[*outs, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in carry)],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=f"linear_attention{turn.__name__}",
    )(start, *tokens, *carry)
    return results, s, z


def _chunks(tokens: Sequence[Array], outs: Sequence[Any], c: int) -> int:
    # keys are among them in every pass, and narrower than queries or as wide
    return min(a.shape[3] for a in (*tokens, *outs)) // c


def _nth(chunks: int, reverse: bool, n: Any) -> Any:
    return chunks - 1 - n if reverse else n


def _divided(refs: Sequence[Any], *sizes: int) -> list[Sequence[Any]]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [refs[end - size : end] for end, size in zip(ends, sizes, strict=True)]


# sizes --------------------------------------------------------------------------------------------


def _tpu_chunk(r: int, k: int, e: int, size: int) -> int:
    """Return 128 where rows fill tiles and a step fits into VMEM."""
    tiled = k % (32 // size) == 0 and e % (32 // size) == 0
    return _TPU_CHUNK if tiled and _vmem(r, k, e, size) <= _TPU_VMEM else 0


def _vmem(r: int, k: int, e: int, size: int) -> int:
    """Return the bytes of the largest pass, `_to_k_v`: blocks twice, and what one head computes."""
    c, i = _TPU_CHUNK, r * _TPU_CHUNK
    keys, queries = 2 * c * (k + e) * size, i * (k * size + (e + 8) * 4)
    sums = 2 * k * (-(-e // 128) * 128 + 128) * 4
    computed = 4 * (4 * c * i + i * (k + e) + c * (k + e))
    return 2 * _TPU_HEADS * (keys + queries + sums) + computed


def _gpu_chunk(r: int, k: int, e: int, size: int) -> int:
    """Return the tokens of a chunk where all sides are powers of 2, as Triton's are, and no less."""
    c = max(_GPU_QUERIES // r, 16)
    powers = all(n & (n - 1) == 0 for n in (r, k, e))
    return c if powers and min(k, e) >= 16 and max(k, e) <= 128 and r <= 8 else 0


# layouts ------------------------------------------------------------------------------------------


def _keys(x: Array, c: int) -> Array:
    """[n b g c' k] -> [b g k t], t filled to a multiple of c."""
    n, b, g, own, k = x.shape
    x = x.transpose(1, 2, 4, 0, 3).reshape(b, g, k, n * own)
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -n * own % c)))


def _from_keys(x: Array, like: Array) -> Array:
    n, b, g, own, k = like.shape
    return x[..., : n * own].reshape(b, g, k, n, own).transpose(3, 0, 1, 4, 2)


def _queries(x: Array, c: int) -> Array:
    """[n b g r c' k] -> [b g k t r], all heads of a chunk of c tokens side by side."""
    n, b, g, r, own, k = x.shape
    x = x.transpose(1, 2, 5, 3, 0, 4).reshape(b, g, k, r, n * own)
    x = jnp.pad(x, (*((0, 0),) * 4, (0, -n * own % c)))
    return x.reshape(b, g, k, r, -1, c).swapaxes(3, 4).reshape(b, g, k, -1)


def _from_queries(x: Array, like: Array, c: int) -> Array:
    n, b, g, r, own, _ = like.shape
    x = x.reshape(b, g, x.shape[2], -1, r, c).swapaxes(3, 4).reshape(b, g, x.shape[2], r, -1)
    x = x[..., : n * own].reshape(b, g, -1, r, n, own)
    return x.transpose(4, 0, 1, 3, 5, 2)
