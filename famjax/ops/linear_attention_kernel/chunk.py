"""What each pass does with one chunk, on matrices; letters as in the package's docstring."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from famjax.core.types import Array


class Seen(NamedTuple):
    """What the tokens of a chunk see. A document that begins at s is what stands from s to itself.

    Attributes:
      start: [1 i], where in the call the document of each query begins.
      token: [1 i], which token each query is.
      first: the chunk's first token.
    """

    start: Array
    token: Array
    first: Array

    def own(self, a: Array) -> Array:
        """Of the chunk's own tokens, those of its document up to itself: [j i]."""
        j = self.first + jax.lax.broadcasted_iota(jnp.int32, a.shape, 0)
        start, token = (jnp.broadcast_to(row, a.shape) for row in (self.start, self.token))
        return jnp.where((j <= token) & (j >= start), a, 0.0)

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
Turn = Callable[..., tuple[Array, ...]]


def read(seen: Seen, q: Array, k: Array, v: Array, s: Array, z: Array) -> tuple[Array, ...]:
    a = seen.own(_product(k, q, 1, 1))
    num = _product(a, v, 0, 0) + seen.past(_product(q, s, 1, 0))
    past = seen.past((q.astype(z.dtype) * z).sum(1, keepdims=True))
    return num, a.sum(0, keepdims=True) + _turned(past), *_remember(seen, k, v, s, z)


def to_q(
    seen: Seen, k: Array, v: Array, to_num: Array, to_den: Array, s: Array, z: Array
) -> tuple[Array, ...]:
    past = seen.past(_product(to_num, s, 1, 1) + _turned(to_den) * z)
    own = _product(_to_a(seen, v, to_num, to_den), k, 0, 0)
    return past + own, *_remember(seen, k, v, s, z)


def to_k_v(
    seen: Seen,
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


def _to_a(seen: Seen, v: Array, to_num: Array, to_den: Array) -> Array:
    """Return the gradient of the similarities: [j i]."""
    return seen.own(_product(v, to_num, 1, 1) + to_den)


def _remember(seen: Seen, k: Array, v: Array, s: Array, z: Array) -> tuple[Array, Array]:
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
    asked = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    own = asked in (None, "default", "fastest", "bfloat16")
    return jax.lax.Precision.DEFAULT if own else jax.lax.Precision.HIGHEST


def _turned(row: Array) -> Array:
    """[1 i] -> [i 1], or back."""
    return row.T


def _where(true: Array, a: Array) -> Array:
    """Return a where true and 0 elsewhere; by float32, in whose layout comparisons are."""
    return jnp.where(true, a.astype(jnp.float32), 0.0).astype(a.dtype)
