"""Which calls the kernels can take, and how large a chunk of theirs is."""

from __future__ import annotations

from typing import NamedTuple

from famjax.core.types import Array

# tokens of a TPU's chunk
_TPU_CHUNK = 128
# key heads of one step of a TPU's grid: their products do not wait for each other
_TPU_HEADS = 4
# of the 16 MB that a kernel may have
_TPU_VMEM = 12 * 2**20
# a GPU's queries of a chunk, r times its tokens: a side of its products
_GPU_QUERIES = 64, 128
# pairs of a chunk, and bytes of S in the tokens' type: as compiled for sm_90, more of either takes
# over 99 KB of shared memory, which is all that some GPUs have
_GPU_PAIRS, _GPU_SUMS = 2**12, 2**14


class Sizes(NamedTuple):
    """Of a call: n chunks of c tokens, g key heads, r queries."""

    n: int
    g: int
    r: int
    c: int
    k: int
    e: int
    itemsize: int


def sizes(q: Array, v: Array) -> Sizes:
    n, _, g, r, c, k = q.shape
    return Sizes(n, g, r, c, k, v.shape[-1], q.dtype.itemsize)


def tpu_chunks(of: Sizes) -> int:
    """Return how many chunks are 128 tokens, where each fills tiles and a step fits into VMEM."""
    whole = _TPU_CHUNK % of.c == 0 and of.c % (32 // of.itemsize) == 0
    # a single feature of bfloat16 does not compile
    fits = min(of.k, of.e) >= 8 and vmem(of) <= _TPU_VMEM
    return _TPU_CHUNK // of.c if whole and fits and of.n * of.c >= _TPU_CHUNK else 0


def vmem(of: Sizes) -> int:
    """Return the bytes of the largest pass, `to_k_v`: blocks twice, and what a head computes.

    3 MB for 4 key heads, r 1, k 64, e 128 in bfloat16, 4.3 in float32.
    """
    j, i = _TPU_CHUNK, of.r * _TPU_CHUNK
    k, e = (-(-n // 128) * 128 for n in (of.k, of.e))
    keys, queries = 2 * j * (k + e) * of.itemsize, i * (k * of.itemsize + (e + 8) * 4)
    sums = 2 * (of.k * e + 8 * k) * 4
    computed = 4 * (4 * j * i + (i + j) * (k + e))
    return 2 * heads_at_once(of.g) * (keys + queries + sums) + computed


def gpu_chunks(of: Sizes) -> int:
    """Return how many chunks are one; Triton wants powers of 2, of 16 or more in products."""
    powers = all(n & (n - 1) == 0 for n in (of.r, of.c, of.k, of.e))
    sides = min(of.c, of.k, of.e) >= 16 and max(of.k, of.e) <= 128
    least, most = _GPU_QUERIES
    small = of.r * of.c <= most and of.k * of.e * of.itemsize <= _GPU_SUMS
    fits = powers and sides and small and of.n * of.c >= least
    at_once = max(least // (of.r * of.c), 1) if fits else 0
    return at_once if of.r * (at_once * of.c) ** 2 <= _GPU_PAIRS else 0


def heads_at_once(g: int) -> int:
    return max(n for n in range(1, _TPU_HEADS + 1) if g % n == 0)
