"""The passes on one chunk, on matrices, with the dimension letters of the package's docstring."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from famjax.core.types import Array
from famjax.ops.kernels import kernel_precision


class ChunkMask(NamedTuple):
    """Document masks of a chunk: a query sees tokens from its document's start to itself.

    Attributes:
      start: [1 i], index in the call where each query's document starts.
      token: [1 i], token index of each query.
      first: index of the chunk's first token.
    """

    start: Array
    token: Array
    first: Array

    def current(self, a: Array) -> Array:
        """Mask pairs within the chunk: same document and causal: [j i]."""
        j = self.first + jax.lax.broadcasted_iota(jnp.int32, a.shape, 0)
        start, token = (jnp.broadcast_to(row, a.shape) for row in (self.start, self.token))
        return jnp.where((j <= token) & (j >= start), a, 0.0)

    def past(self, a: Array) -> Array:
        """Mask queries whose document did not start before the chunk: [i k]."""
        return _select(jnp.broadcast_to(_transpose(self.start), a.shape) < self.first, a)

    def last_document(self, a: Array) -> Array:
        """Mask tokens that are not of the chunk's last document: [j k]."""
        j = self.first + jax.lax.broadcasted_iota(jnp.int32, a.shape, 0)
        return _select(j >= self._last_start(a), a)

    def carry(self, a: Array) -> Array:
        """Reset sums if a document starts in the chunk: [k e]."""
        return _select(self._last_start(a) < self.first, a)

    def _last_start(self, like: Array) -> Array:
        """Return the start of the last document."""
        return jnp.broadcast_to(jnp.max(self.start, axis=1, keepdims=True), like.shape)


# (mask, tokens, S, z) -> (results, S, z)
ChunkFn = Callable[..., tuple[Array, ...]]


def forward(mask: ChunkMask, q: Array, k: Array, v: Array, s: Array, z: Array) -> tuple[Array, ...]:
    a = mask.current(_dot(k, q, 1, 1))
    num = _dot(a, v, 0, 0) + mask.past(_dot(q, s, 1, 0))
    past = mask.past((q.astype(z.dtype) * z).sum(1, keepdims=True))
    return num, a.sum(0, keepdims=True) + _transpose(past), *_accumulate(mask, k, v, s, z)


def backward_q(
    mask: ChunkMask, k: Array, v: Array, d_num: Array, d_den: Array, s: Array, z: Array
) -> tuple[Array, ...]:
    past = mask.past(_dot(d_num, s, 1, 1) + _transpose(d_den) * z)
    current = _dot(_similarity_gradient(mask, v, d_num, d_den), k, 0, 0)
    return past + current, *_accumulate(mask, k, v, s, z)


def backward_k_v(
    mask: ChunkMask,
    q: Array,
    k: Array,
    v: Array,
    d_num: Array,
    d_den: Array,
    d_s: Array,
    d_z: Array,
) -> tuple[Array, ...]:
    """Scan backwards: `d_s` and `d_z` are the gradients of the sums after the chunk."""
    a = mask.current(_dot(k, q, 1, 1))
    d_a = _similarity_gradient(mask, v, d_num, d_den)
    d_k = mask.last_document(_dot(v, d_s, 1, 1) + d_z) + _dot(d_a, q, 1, 0)
    d_v = _dot(mask.last_document(k), d_s, 1, 0) + _dot(a, d_num, 1, 0)
    q_past = mask.past(q)
    d_s = mask.carry(d_s) + _dot(q_past, d_num, 0, 0)
    d_z = mask.carry(d_z) + (q_past.astype(d_z.dtype) * _transpose(d_den)).sum(0, keepdims=True)
    return d_k, d_v, d_s, d_z


def _similarity_gradient(mask: ChunkMask, v: Array, d_num: Array, d_den: Array) -> Array:
    """Return the gradient of the similarities: [j i]."""
    return mask.current(_dot(v, d_num, 1, 1) + d_den)


def _accumulate(mask: ChunkMask, k: Array, v: Array, s: Array, z: Array) -> tuple[Array, Array]:
    k = mask.last_document(k)
    s = mask.carry(s) + _dot(k, v, 0, 0)
    return s, mask.carry(z) + k.astype(z.dtype).sum(0, keepdims=True)


def _dot(x: Array, y: Array, over_x: int, over_y: int) -> Array:
    """Contract an axis of each matrix, in the narrower dtype, accumulated in float32."""
    narrow = x.dtype if x.dtype.itemsize < y.dtype.itemsize else y.dtype
    return jax.lax.dot_general(
        x.astype(narrow),
        y.astype(narrow),
        (((over_x,), (over_y,)), ((), ())),
        precision=kernel_precision(),
        preferred_element_type=jnp.float32,
    )


def _transpose(row: Array) -> Array:
    """[1 i] -> [i 1], or the inverse."""
    return row.T


def _select(true: Array, a: Array) -> Array:
    """Return a where true, else 0; computed in float32, which has the comparison's layout."""
    return jnp.where(true, a.astype(jnp.float32), 0.0).astype(a.dtype)
