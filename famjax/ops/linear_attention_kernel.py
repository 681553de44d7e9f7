"""The chunkwise form of `linear_attention` as kernels for TPU and GPU (Pallas), forward and backward.

Each of its three passes over the chunks (read; to q; to k and v) is one function of a chunk and the
sums S and z, `_read`, `_to_q` and `_to_k_v`, on plain matrices. A chunk here is m of the caller's
chunks of c tokens, where it stands: m r c queries i and m c keys j, of which nothing is copied or
turned on its way in or out.

    q [i k], k [j k], v [j e], num [i e], den [1 i], S [k e], z [1 k], pairs [j i]

Two loops run them, since the machines share none. A TPU runs a grid (b, g, chunks) in order: S and z
stay in VMEM, as results whose place does not depend on the chunk, and the next chunk is fetched
meanwhile, so a row may be of any length. A GPU runs programs (b, g) at once, each with a loop over
chunks and S and z in registers (Triton has neither memory of a program's own nor an order of them).

A TPU's chunk is 128 tokens, a side of its products: 2 r 128 (k + e) + 2 (r + 1) k e flops a token and
key head forward, of which the last term is the recurrence's own. Features and values fill rows of
128 lanes there, in HBM too: k = 32 is fetched as 128. VMEM: see `_vmem`.

Products are in the narrower type and added up in float32, as in the form for XLA; what differs is
the order of sums. Arguments and gradients are those of `linear_attention._pairs`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from famjax.core.types import Array

# tokens of a TPU's chunk
_TPU_CHUNK = 128
# key heads of one step of a TPU's grid: their products do not wait for each other
_TPU_HEADS = 4
# of the 16 MB that a kernel may have
_TPU_VMEM = 12 * 2**20
# a GPU's queries of a chunk, r times its tokens: a side of its products
_GPU_QUERIES = 64, 128

def forms(interpret: bool = False) -> dict[str, Kernels]:
    """Return the kernels by platform; interpreted, they run on any, slowly."""
    return {
        "tpu": Kernels(functools.partial(_on_tpu, interpret=interpret), _tpu_chunks),
        "cuda": Kernels(functools.partial(_on_gpu, interpret=interpret), _gpu_chunks),
    }


class Kernels(NamedTuple):
    """The passes of `linear_attention._pairs` on one platform.

    Attributes:
      loop: over the chunks, `_on_tpu` or `_on_gpu`.
      at_once: of a call's sizes, how many of its chunks are one here; 0 if they do not suit.
    """

    loop: Callable[..., list[Array]]
    at_once: Callable[[_Sizes], int]

    def suit(self, q: Array, k: Array, v: Array, s: Array) -> bool:
        """Tell whether they can take the call, by its types and sizes."""
        known = all(isinstance(n, int) for a in (q, v) for n in a.shape)
        types = {a.dtype for a in (q, k, v)}
        usual = len(types) == 1 and types <= {jnp.dtype("float32"), jnp.dtype("bfloat16")}
        return known and usual and s.dtype == jnp.float32 and self.at_once(_sizes(q, v)) > 0

    def forward(
        self, q: Array, k: Array, v: Array, s: Array, z: Array, start: Array
    ) -> tuple[Array, Array, Array, Array]:
        """Return num [n b g r c e], den [n b g r c], and the last S and z."""
        n, *_ = q.shape
        m = self.at_once(_sizes(q, v))
        q, k, v = (_filled(a, m) for a in (q, k, v))
        rows = _of_queries(q, start, m)
        num = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), jnp.float32)
        den = jax.ShapeDtypeStruct(_in_rows(q, m), jnp.float32)
        num, den, s, z = self.loop(_read, m * k.shape[3], rows, (q, k, v), (s, z[:, :, None]), (num, den))
        return num[:n], _from_rows(den, q, m)[:n], s, z[:, :, 0]

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
        n, *_ = q.shape
        m = self.at_once(_sizes(q, v))
        q, k, v, to_num, to_den = (_filled(a, m) for a in (q, k, v, to_num, to_den))
        rows = _of_queries(q, start, m)
        to_den = _to_rows(to_den, q, m)
        like_q, like_k, like_v = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (q, k, v))
        ins, carry = (k, v, to_num, to_den), (s, z[:, :, None])
        to_q, _, _ = self.loop(_to_q, m * k.shape[3], rows, ins, carry, (like_q,))
        ins, carry = (q, *ins), (to_s, to_z[:, :, None])
        results = self.loop(_to_k_v, m * k.shape[3], rows, ins, carry, (like_k, like_v), reverse=True)
        to_k, to_v, to_s, to_z = results
        return to_q[:n], to_k[:n], to_v[:n], to_s, to_z[:, :, 0]


# a chunk ------------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    """What the tokens of a chunk see. A document that begins at s is what stands from s to itself.

    Attributes:
      start, index: [1 i], where in the call the document of each query begins, and the query.
      first: the chunk's first token.
    """

    start: Array
    index: Array
    first: Array

    def own(self, a: Array) -> Array:
        """Of the chunk's own tokens, those of its document up to itself: [j i]."""
        j = self.first + jax.lax.broadcasted_iota(jnp.int32, a.shape, 0)
        start, index = (jnp.broadcast_to(row, a.shape) for row in (self.start, self.index))
        return jnp.where((j <= index) & (j >= start), a, 0.0)

    def past(self, a: Array) -> Array:
        """Of what was before the chunk, a query of the same document everything: [i k]."""
        return _where(jnp.broadcast_to(_turned(self.start), a.shape) < self.first, a)

    def last(self, a: Array) -> Array:
        """Only tokens of the chunk's last document are carried on: [j k]."""
        j = self.first + jax.lax.broadcasted_iota(jnp.int32, a.shape, 0)
        return _where(j >= self._begin(a), a)

    def kept(self, a: Array) -> Array:
        """Sums outlive the chunk if no document begins in it: [k e]."""
        return _where(self._begin(a) < self.first, a)

    def _begin(self, like: Array) -> Array:
        """Return where the last document begins."""
        return jnp.broadcast_to(jnp.max(self.start, axis=1, keepdims=True), like.shape)


# of what is seen, tokens, S and z -> results, S and z
_Turn = Callable[..., tuple[Array, ...]]


def _read(seen: _Seen, q: Array, k: Array, v: Array, s: Array, z: Array) -> tuple[Array, ...]:
    a = seen.own(_product(k, q, 1, 1))
    num = _product(a, v, 0, 0) + seen.past(_product(q, s, 1, 0))
    past = seen.past((q.astype(z.dtype) * z).sum(1, keepdims=True))
    return num, a.sum(0, keepdims=True) + _turned(past), *_remember(seen, k, v, s, z)


def _to_q(
    seen: _Seen, k: Array, v: Array, to_num: Array, to_den: Array, s: Array, z: Array
) -> tuple[Array, ...]:
    past = seen.past(_product(to_num, s, 1, 1) + _turned(to_den) * z)
    own = _product(_to_a(seen, v, to_num, to_den), k, 0, 0)
    return past + own, *_remember(seen, k, v, s, z)


def _to_k_v(
    seen: _Seen,
    q: Array,
    k: Array,
    v: Array,
    to_num: Array,
    to_den: Array,
    to_s: Array,
    to_z: Array,
) -> tuple[Array, ...]:
    """Go backward: `to_s` and `to_z` are the gradients of the sums behind the chunk."""
    a = seen.own(_product(k, q, 1, 1))
    to_a = _to_a(seen, v, to_num, to_den)
    to_k = seen.last(_product(v, to_s, 1, 1) + to_z) + _product(to_a, q, 1, 0)
    to_v = _product(seen.last(k), to_s, 1, 0) + _product(a, to_num, 1, 0)
    q_past = seen.past(q)
    to_s = seen.kept(to_s) + _product(q_past, to_num, 0, 0)
    to_z = seen.kept(to_z) + (q_past.astype(to_z.dtype) * _turned(to_den)).sum(0, keepdims=True)
    return to_k, to_v, to_s, to_z


def _to_a(seen: _Seen, v: Array, to_num: Array, to_den: Array) -> Array:
    """Return the gradient of the similarities: [j i]."""
    return seen.own(_product(v, to_num, 1, 1) + to_den)


def _remember(seen: _Seen, k: Array, v: Array, s: Array, z: Array) -> tuple[Array, Array]:
    k = seen.last(k)
    s = seen.kept(s) + _product(k, v, 0, 0)
    return s, seen.kept(z) + k.astype(z.dtype).sum(0, keepdims=True)


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


def _turned(row: Array) -> Array:
    """[1 i] -> [i 1], or back."""
    return row.T


def _where(true: Array, a: Array) -> Array:
    """Return a where true and 0 elsewhere; by float32, in whose layout comparisons are."""
    return jnp.where(true, a.astype(jnp.float32), 0.0).astype(a.dtype)


# the loops over chunks ----------------------------------------------------------------------------


def _on_tpu(
    turn: _Turn,
    tokens: int,
    rows: Array,
    ins: Sequence[Array],
    carry: tuple[Array, Array],
    outs: Sequence[jax.ShapeDtypeStruct],
    reverse: bool = False,
    interpret: bool = False,
) -> list[Array]:
    """Take a pass over the chunks, one step of the grid for each.

    Args:
      tokens: of a chunk.
      rows: [chunks b 2 i], see `_of_queries`.
      ins: tokens [n b g ..], n chunks of the call's, and numbers of queries [chunks b g 1 i].
      carry: S or its gradient [b g k e], and z's [b g 1 k].
      outs: shapes and types of the results, as `ins`.

    Returns:
      the results, and the carry behind the last chunk.
    """
    from jax.experimental.pallas import tpu as pltpu

    chunks, (b, g) = len(rows), carry[0].shape[:2]
    heads = _heads(g)

    def nth(n: Any) -> Any:
        return chunks - 1 - n if reverse else n

    def kernel(rows: Any, *refs: Any) -> None:
        given, before, results, carried = _divided(refs, len(ins), 2, len(outs), 2)
        n = pl.program_id(2)

        @pl.when(n == 0)
        def _() -> None:
            for ref, begin in zip(carried, before, strict=True):
                ref[...] = begin[...]

        seen = _Seen(rows[:1], rows[1:], nth(n) * tokens)
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

    of_rows = pl.BlockSpec((None, None, *rows.shape[2:]), lambda i, j, n: (nth(n), i, 0, 0))
    return pl.pallas_call(
        kernel,
        grid=(b, g // heads, chunks),
        in_specs=[of_rows, *map(of_chunk, ins), *map(of_head, carry)],
        out_specs=[*map(of_chunk, outs), *map(of_head, carry)],
        out_shape=[*outs, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in carry)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name=f"linear_attention{turn.__name__}",
    )(rows, *ins, *carry)


def _on_gpu(
    turn: _Turn,
    tokens: int,
    rows: Array,
    ins: Sequence[Array],
    carry: tuple[Array, Array],
    outs: Sequence[jax.ShapeDtypeStruct],
    reverse: bool = False,
    interpret: bool = False,
) -> list[Array]:
    """Take a pass over the chunks in a loop, one program for a row and key head; see `_on_tpu`."""
    from jax.experimental.pallas import triton

    chunks, (b, g) = len(rows), carry[0].shape[:2]

    def kernel(start: Any, index: Any, *refs: Any) -> None:
        given, before, results, carried = _divided(refs, len(ins), 2, len(outs), 2)

        def step(i: Array, carry: Any) -> Any:
            n = chunks - 1 - i if reverse else i

            def here(ref: Any) -> Any:
                size = ref.shape[0] // chunks
                return (pl.ds(n * size, size), *(slice(None) for _ in ref.shape[1:]))

            begin, tokens_of = (_matrix(ref[here(ref)]) for ref in (start, index))
            seen = _Seen(begin, tokens_of, n * tokens)
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

    of_rows = pl.BlockSpec((chunks, None, 1, rows.shape[3]), lambda i, j: (0, i, 0, 0))
    return pl.pallas_call(
        kernel,
        grid=(b, g),
        in_specs=[of_rows, of_rows, *map(of_row, ins), *map(of_head, carry)],
        out_specs=[*map(of_row, outs), *map(of_head, carry)],
        out_shape=[*outs, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in carry)],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name=f"linear_attention{turn.__name__}",
    )(rows[:, :, :1], rows[:, :, 1:], *ins, *carry)


def _divided(refs: Sequence[Any], *sizes: int) -> list[Sequence[Any]]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [refs[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _matrix(x: Array) -> Array:
    """[m r c k] or [m c k] -> [m r c, k], [1 1 i] -> [1 i]."""
    return x.reshape(-1, x.shape[-1])


def _heads(g: int) -> int:
    return max(n for n in range(1, _TPU_HEADS + 1) if g % n == 0)


# sizes --------------------------------------------------------------------------------------------


class _Sizes(NamedTuple):
    """Of a call: n chunks of c tokens, g key heads, r queries; bytes of an element."""

    n: int
    g: int
    r: int
    c: int
    k: int
    e: int
    bytes: int


def _sizes(q: Array, v: Array) -> _Sizes:
    n, _, g, r, c, k = q.shape
    return _Sizes(n, g, r, c, k, v.shape[-1], q.dtype.itemsize)


def _tpu_chunks(of: _Sizes) -> int:
    """Return how many chunks are 128 tokens, where each fills tiles and a step fits into VMEM."""
    whole = _TPU_CHUNK % of.c == 0 and of.c % (32 // of.bytes) == 0
    long = of.n * of.c >= _TPU_CHUNK
    return _TPU_CHUNK // of.c if whole and long and _vmem(of) <= _TPU_VMEM else 0


def _vmem(of: _Sizes) -> int:
    """Return the bytes of the largest pass, `_to_k_v`: blocks twice, and what a head computes.

    1.9 MB for 4 key heads, r 1, k 64, e 128 in bfloat16.
    """
    j, i = _TPU_CHUNK, of.r * _TPU_CHUNK
    k, e = (-(-n // 128) * 128 for n in (of.k, of.e))
    keys, queries = 2 * j * (k + e) * of.bytes, i * (k * of.bytes + (e + 8) * 4)
    sums = 2 * (of.k * e + 8 * k) * 4
    computed = 4 * (4 * j * i + (i + j) * (k + e))
    return 2 * _heads(of.g) * (keys + queries + sums) + computed


def _gpu_chunks(of: _Sizes) -> int:
    """Return how many chunks are one; Triton's sides are powers of 2, and of products 16 or more."""
    powers = all(n & (n - 1) == 0 for n in (of.r, of.c, of.k, of.e))
    sides = min(of.c, of.k, of.e) >= 16 and max(of.k, of.e) <= 128
    least, most = _GPU_QUERIES
    long = of.n * of.c >= least
    fits = powers and sides and long and of.r * of.c <= most
    return max(least // (of.r * of.c), 1) if fits else 0


# layouts ------------------------------------------------------------------------------------------


def _filled(x: Array, m: int) -> Array:
    """[n ...], n filled to a multiple of m: what belongs to no token, and adds nothing."""
    return jnp.pad(x, ((0, -len(x) % m), *((0, 0),) * (x.ndim - 1)))


def _of_queries(q: Array, start: Array, m: int) -> Array:
    """Return where each query's document begins, and which token it is: [chunks b 2 i]."""
    n, b, _, r, c, _ = q.shape
    start = jnp.pad(start, ((0, n - len(start)), (0, 0), (0, 0)), mode="edge")
    index = jnp.broadcast_to(jnp.arange(n * c, dtype=start.dtype).reshape(n, 1, c), start.shape)
    both = jnp.stack([start, index], 2)  # [n b 2 c]
    both = jnp.broadcast_to(both[:, :, :, None], (n, b, 2, r, c)).reshape(-1, m, b, 2, r, c)
    return jnp.moveaxis(both, 1, 3).reshape(n // m, b, 2, m * r * c)


def _in_rows(q: Array, m: int) -> tuple[int, ...]:
    n, b, g, r, c, _ = q.shape
    return n // m, b, g, 1, m * r * c


def _to_rows(x: Array, q: Array, m: int) -> Array:
    """[n b g r c] -> [chunks b g 1 i]."""
    n, b, g, r, c, _ = q.shape
    return jnp.moveaxis(x.reshape(-1, m, b, g, r, c), 1, 3).reshape(_in_rows(q, m))


def _from_rows(x: Array, q: Array, m: int) -> Array:
    n, b, g, r, c, _ = q.shape
    return jnp.moveaxis(x.reshape(-1, b, g, m, r, c), 3, 1).reshape(n, b, g, r, c)
