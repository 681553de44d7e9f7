"""The chunkwise form of `linear_attention` as kernels in Pallas, for TPU and GPU.

Each of its three passes over the chunks (read; to q; to k and v) is one function of a chunk and the
sums S and z, on plain matrices (`chunk`). A chunk here is m of the caller's chunks of c tokens,
where they stand: m r c queries i and m c keys j, of which nothing is copied or turned on its way.

    q [i k], k [j k], v [j e], num [i e], den [1 i], S [k e], z [1 k], pairs [j i]

Two loops run them, since the machines share none (`loops`). A TPU runs a grid (b, g, chunks) in
order: S and z stay in VMEM, as results whose place does not depend on the chunk, and the next chunk
is fetched meanwhile, so a row may be of any length. A GPU runs programs (b, g) at once, each with a
loop over chunks and S and z in registers: Triton has neither memory of a program's own nor an order
of programs.

A TPU's chunk is 128 tokens, a side of its products: forward 2 r 128 (k + e) + 2 (r + 1) k e flops a
token and key head, of which the last term is the recurrence's own. Features and values fill rows of
128 lanes there, in HBM too: k = 32 is fetched as 128. VMEM: `sizes.vmem`.

Products are in the narrower type and added up in float32, as in the form for XLA; what differs is
the order of sums. Arguments and gradients are those of `linear_attention._pairs`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from famjax.core.types import Array
from famjax.ops.linear_attention_kernel import chunk, loops
from famjax.ops.linear_attention_kernel.sizes import Sizes, gpu_chunks, sizes, tpu_chunks


def forms(interpret: bool = False) -> dict[str, Kernels]:
    """Return the kernels by platform; interpreted, they run on any, slowly."""
    return {
        "tpu": Kernels(functools.partial(loops.on_tpu, interpret=interpret), tpu_chunks),
        "cuda": Kernels(functools.partial(loops.on_gpu, interpret=interpret), gpu_chunks),
    }


def fitting(q: Array, k: Array, v: Array, s: Array) -> dict[str, Kernels]:
    """Return the kernels that can take a call, by platform."""
    return {name: of for name, of in forms().items() if of.suit(q, k, v, s)}


class Kernels(NamedTuple):
    """The passes of `linear_attention._pairs` on one platform.

    Attributes:
      loop: over the chunks, `loops.on_tpu` or `loops.on_gpu`.
      at_once: of a call's sizes, how many of its chunks are one here; 0 if they do not suit.
    """

    loop: Callable[..., list[Array]]
    at_once: Callable[[Sizes], int]

    def suit(self, q: Array, k: Array, v: Array, s: Array) -> bool:
        """Tell whether they can take the call, by its types and sizes."""
        known = all(isinstance(n, int) for a in (q, v) for n in a.shape)
        types = {a.dtype for a in (q, k, v)}
        usual = len(types) == 1 and types <= {jnp.dtype("float32"), jnp.dtype("bfloat16")}
        return known and usual and s.dtype == jnp.float32 and self.at_once(sizes(q, v)) > 0

    def forward(
        self, q: Array, k: Array, v: Array, s: Array, z: Array, start: Array
    ) -> tuple[Array, ...]:
        """Return num [n b g r c e], den [n b g r c], and the last S and z."""
        n, m = len(q), self.at_once(sizes(q, v))
        q, k, v = (_filled(a, m) for a in (q, k, v))
        outs = (
            jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), jnp.float32),
            jax.ShapeDtypeStruct(_rows(q, m), jnp.float32),
        )
        queries = _of_queries(q, start, m)
        num, den, s, z = self.loop(chunk.read, queries, (q, k, v), (s, z[:, :, None]), outs)
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
    ) -> tuple[Array, ...]:
        """Return the gradients of q, k, v and of S and z before the call."""
        n, m = len(q), self.at_once(sizes(q, v))
        q, k, v, to_num, to_den = (_filled(a, m) for a in (q, k, v, to_num, to_den))
        queries, to_den = _of_queries(q, start, m), _to_rows(to_den, q, m)
        like_q, *like_k_v = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (q, k, v))
        before, behind = (s, z[:, :, None]), (to_s, to_z[:, :, None])
        to_q, *_ = self.loop(chunk.to_q, queries, (k, v, to_num, to_den), before, (like_q,))
        ins = (q, k, v, to_num, to_den)
        to_k, to_v, to_s, to_z = self.loop(
            chunk.to_k_v, queries, ins, behind, like_k_v, reverse=True
        )
        return to_q[:n], to_k[:n], to_v[:n], to_s, to_z[:, :, 0]


# layouts ------------------------------------------------------------------------------------------


def _filled(x: Array, m: int) -> Array:
    """[n ...], n filled to a multiple of m: what belongs to no token, and adds nothing."""
    return jnp.pad(x, ((0, -len(x) % m), *((0, 0),) * (x.ndim - 1)))


def _of_queries(q: Array, start: Array, m: int) -> Array:
    """Return where each query's document begins, and which token it is: [chunks b 2 i]."""
    n, b, _, r, c, _ = q.shape
    # no document begins in what was filled up
    start = jnp.pad(start, ((0, n - len(start)), (0, 0), (0, 0)), mode="edge")
    token = jnp.broadcast_to(jnp.arange(n * c, dtype=start.dtype).reshape(n, 1, c), start.shape)
    both = jnp.stack([start, token], 2)  # [n b 2 c]
    both = jnp.broadcast_to(both[:, :, :, None], (n, b, 2, r, c)).reshape(-1, m, b, 2, r, c)
    return jnp.moveaxis(both, 1, 3).reshape(n // m, b, 2, m * r * c)


def _rows(q: Array, m: int) -> tuple[int, ...]:
    """Return the shape of a number for each query: [chunks b g 1 i]."""
    n, b, g, r, c, _ = q.shape
    return n // m, b, g, 1, m * r * c


def _to_rows(x: Array, q: Array, m: int) -> Array:
    """[n b g r c] -> [chunks b g 1 i]."""
    _, b, g, r, c, _ = q.shape
    return jnp.moveaxis(x.reshape(-1, m, b, g, r, c), 1, 3).reshape(_rows(q, m))


def _from_rows(x: Array, q: Array, m: int) -> Array:
    n, b, g, r, c, _ = q.shape
    return jnp.moveaxis(x.reshape(-1, b, g, m, r, c), 3, 1).reshape(n, b, g, r, c)
