"""Pallas kernels of chunkwise linear attention (`famjax.ops.linear_attention`), for TPU and GPU.

Each of the three passes over the chunks (forward; backward for q; backward for k and v) is a
function of a chunk and the sums S and z, on plain matrices (`chunk`). A chunk of the kernels
consists of m of the caller's chunks of c tokens, in the caller's layout, without copies or
transposes: it has m r c queries i and m c keys j.

    q [i k], k [j k], v [j e], num [i e], den [1 i], S [k e], z [1 k], pairs [j i]

The platforms need different loops (`loops`). A TPU runs a grid (b, g, chunks) in order: S and z
stay in VMEM, as outputs whose block index does not depend on the chunk, and the next chunk is
prefetched, so rows may have any length. A GPU runs programs (b, g) in parallel, each with a loop
over chunks and S and z in registers: Triton has no scratch memory and no order of programs.

A TPU's chunk is 128 tokens, which is one side of its products. The forward pass takes
2 r 128 (k + e) + 2 (r + 1) k e flops per token and key head, of which the last term is the
recurrence's. Features and values are padded to 128 lanes, in HBM too: k = 32 is read as 128. For
the use of VMEM see `sizes.vmem`.

Products are in the narrower dtype and accumulated in float32, as for XLA; only the order of sums
differs. Arguments and gradients are those of `linear_attention._num_den`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from famjax.core.types import Array
from famjax.ops.linear_attention_kernel import chunk, loops
from famjax.ops.linear_attention_kernel.sizes import CallSizes, gpu_chunks, sizes, tpu_chunks


def platform_kernels(interpret: bool = False) -> dict[str, Kernels]:
    """Return the kernels by platform; in interpret mode they run on any platform, slowly."""
    return {
        "tpu": Kernels(functools.partial(loops.scan_tpu, interpret=interpret), tpu_chunks),
        "cuda": Kernels(functools.partial(loops.scan_gpu, interpret=interpret), gpu_chunks),
    }


def supported_kernels(q: Array, k: Array, v: Array, s: Array) -> dict[str, Kernels]:
    """Return the kernels that support a call, by platform."""
    return {
        name: kernels
        for name, kernels in platform_kernels().items()
        if kernels.supports(q, k, v, s)
    }


class Kernels(NamedTuple):
    """The passes of `linear_attention._num_den` on one platform.

    Attributes:
      loop: the loop over the chunks, `loops.scan_tpu` or `loops.scan_gpu`.
      chunks_per_step: for a call's sizes, how many of its chunks form one chunk here; 0 if they are
        not supported.
    """

    loop: Callable[..., list[Array]]
    chunks_per_step: Callable[[CallSizes], int]

    def supports(self, q: Array, k: Array, v: Array, s: Array) -> bool:
        """Return whether the call's dtypes and sizes are supported."""
        static = all(isinstance(n, int) for a in (q, v) for n in a.shape)
        types = {a.dtype for a in (q, k, v)}
        same_dtype = len(types) == 1 and types <= {jnp.dtype("float32"), jnp.dtype("bfloat16")}
        return (
            static
            and same_dtype
            and s.dtype == jnp.float32
            and self.chunks_per_step(sizes(q, v)) > 0
        )

    def forward(
        self, q: Array, k: Array, v: Array, s: Array, z: Array, start: Array
    ) -> tuple[Array, ...]:
        """Return num [n b g r c e], den [n b g r c], and the last S and z."""
        n, m = len(q), self.chunks_per_step(sizes(q, v))
        q, k, v = (_pad_chunks(a, m) for a in (q, k, v))
        outs = (
            jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), jnp.float32),
            jax.ShapeDtypeStruct(_row_shape(q, m), jnp.float32),
        )
        queries = _query_index(q, start, m)
        num, den, s, z = self.loop(chunk.forward, queries, (q, k, v), (s, z[:, :, None]), outs)
        return num[:n], _from_rows(den, q, m)[:n], s, z[:, :, 0]

    def backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        s: Array,
        z: Array,
        start: Array,
        d_num: Array,
        d_den: Array,
        d_s: Array,
        d_z: Array,
    ) -> tuple[Array, ...]:
        """Return the gradients of q, k, v and of S and z before the call."""
        n, m = len(q), self.chunks_per_step(sizes(q, v))
        q, k, v, d_num, d_den = (_pad_chunks(a, m) for a in (q, k, v, d_num, d_den))
        queries, d_den = _query_index(q, start, m), _to_rows(d_den, q, m)
        like_q, *like_k_v = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (q, k, v))
        sums, d_sums = (s, z[:, :, None]), (d_s, d_z[:, :, None])
        d_q, *_ = self.loop(chunk.backward_q, queries, (k, v, d_num, d_den), sums, (like_q,))
        ins = (q, k, v, d_num, d_den)
        d_k, d_v, d_s, d_z = self.loop(
            chunk.backward_k_v, queries, ins, d_sums, like_k_v, reverse=True
        )
        return d_q[:n], d_k[:n], d_v[:n], d_s, d_z[:, :, 0]


def _pad_chunks(x: Array, m: int) -> Array:
    """[n ...], n padded to a multiple of m with zeros, which add nothing."""
    return jnp.pad(x, ((0, -len(x) % m), *((0, 0),) * (x.ndim - 1)))


def _query_index(q: Array, start: Array, m: int) -> Array:
    """Return each query's document start and token index: [chunks b 2 i]."""
    n, b, _, r, c, _ = q.shape
    # no document starts in the padding
    start = jnp.pad(start, ((0, n - len(start)), (0, 0), (0, 0)), mode="edge")
    token = jnp.broadcast_to(jnp.arange(n * c, dtype=start.dtype).reshape(n, 1, c), start.shape)
    both = jnp.stack([start, token], 2)  # [n b 2 c]
    both = jnp.broadcast_to(both[:, :, :, None], (n, b, 2, r, c)).reshape(-1, m, b, 2, r, c)
    return jnp.moveaxis(both, 1, 3).reshape(n // m, b, 2, m * r * c)


def _row_shape(q: Array, m: int) -> tuple[int, ...]:
    """Return the shape of a scalar per query: [chunks b g 1 i]."""
    n, b, g, r, c, _ = q.shape
    return n // m, b, g, 1, m * r * c


def _to_rows(x: Array, q: Array, m: int) -> Array:
    """[n b g r c] -> [chunks b g 1 i]."""
    _, b, g, r, c, _ = q.shape
    return jnp.moveaxis(x.reshape(-1, m, b, g, r, c), 1, 3).reshape(_row_shape(q, m))


def _from_rows(x: Array, q: Array, m: int) -> Array:
    n, b, g, r, c, _ = q.shape
    return jnp.moveaxis(x.reshape(-1, b, g, m, r, c), 3, 1).reshape(n, b, g, r, c)
