"""Which calls the kernels support, and their chunk sizes."""

from __future__ import annotations

from typing import NamedTuple

from famjax.core.types import Array

# tokens of a TPU chunk
_TPU_CHUNK = 128
# key heads per step of a TPU grid: their products are independent
_TPU_HEADS = 4
# bytes of VMEM that may be planned, of the 16 MB that a kernel may use
_TPU_VMEM = 12 * 2**20
# minimum and maximum number of queries of a GPU chunk (r times its tokens), a side of its products
_GPU_QUERIES = 64, 128
# maximum number of query-key pairs of a chunk, and bytes of S in the tokens' dtype: compiled for
# sm_90, more of either takes over 99 KB of shared memory, the limit of some GPUs
_GPU_PAIRS, _GPU_SUMS = 2**12, 2**14


class CallSizes(NamedTuple):
    """Dimensions of a call: n chunks of c tokens, g key heads, r query heads each."""

    n: int
    g: int
    r: int
    c: int
    k: int
    e: int
    itemsize: int


def sizes(q: Array, v: Array) -> CallSizes:
    n, _, g, r, c, k = q.shape
    return CallSizes(n, g, r, c, k, v.shape[-1], q.dtype.itemsize)


def tpu_chunks(call: CallSizes) -> int:
    """Return how many chunks make 128 tokens; 0 if they do not fill tiles or exceed VMEM."""
    aligned = _TPU_CHUNK % call.c == 0 and call.c % (32 // call.itemsize) == 0
    # a single feature of bfloat16 does not compile
    fits = min(call.k, call.e) >= 8 and vmem(call) <= _TPU_VMEM
    return _TPU_CHUNK // call.c if aligned and fits and call.n * call.c >= _TPU_CHUNK else 0


def vmem(call: CallSizes) -> int:
    """Return the bytes of VMEM that the largest pass uses, `backward_k_v`.

    It needs its blocks twice, and temporaries: 3 MB for 4 key heads, r 1, k 64, e 128 in bfloat16,
    4.3 in float32.
    """
    j, i = _TPU_CHUNK, call.r * _TPU_CHUNK
    k, e = (-(-n // 128) * 128 for n in (call.k, call.e))
    keys, queries = 2 * j * (k + e) * call.itemsize, i * (k * call.itemsize + (e + 8) * 4)
    sums = 2 * (call.k * e + 8 * k) * 4
    temporaries = 4 * (4 * j * i + (i + j) * (k + e))
    return 2 * heads_per_step(call.g) * (keys + queries + sums) + temporaries


def gpu_chunks(call: CallSizes) -> int:
    """Return how many chunks form one, 0 if Triton does not support their sizes.

    It needs powers of 2, which must be at least 16 in products.
    """
    powers = all(n & (n - 1) == 0 for n in (call.r, call.c, call.k, call.e))
    sides = min(call.c, call.k, call.e) >= 16 and max(call.k, call.e) <= 128
    min_queries, max_queries = _GPU_QUERIES
    small = call.r * call.c <= max_queries and call.k * call.e * call.itemsize <= _GPU_SUMS
    fits = powers and sides and small and call.n * call.c >= min_queries
    chunks = max(min_queries // (call.r * call.c), 1) if fits else 0
    return chunks if call.r * (chunks * call.c) ** 2 <= _GPU_PAIRS else 0


def heads_per_step(g: int) -> int:
    return max(n for n in range(1, _TPU_HEADS + 1) if g % n == 0)
