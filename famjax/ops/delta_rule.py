"""The delta rule, by chunks of tokens (Schlag et al. 2021, arXiv 2102.11174; Yang et al. 2024).

    S_j = S_{j-1} + beta_j k_j (v_j - S_{j-1}^T k_j)^T

A matrix S learns to return v_j for the key k_j: what it returned before is removed. The updates by
a chunk of c tokens are equal to one update. With K, V the chunk's keys and values and
B = diag(beta),

    A = tril(B K K^T, -1)       T = (I + A)^{-1} B
    S' = S + K^T T (V - K S)

so T is computed for all chunks in parallel. This is the WY form of Yang et al. 2024, arXiv
2406.06484, who also multiply T by K and V in advance; that takes more products, and reads and
writes one more array of the size of the keys. A is strictly lower triangular, and row i of
X = (I + A)^{-1} follows from the rows above it:

    X_i = e_i - sum_{j < i} A_ij X_j

These sums run over rows of all chunks at once. Unlike a triangular solve, they can be sharded over
any mesh; products of small matrices, one for each chunk, take 15 times as long on CPU. The series
(I - A)(I + A^2)(I + A^4)... is not used because its terms cancel: for 16 equal keys A^8 has
elements of 3,432, and float32 loses three digits. Accelerators have larger chunks, because each
chunk waits for the one before it. Their inverses are put together from those of both halves,

    (I + A)^{-1} = [ P  0 ; -R A_21 P  R ]       P = (I + A_11)^{-1}       R = (I + A_22)^{-1}

All products have full precision on every device, since every chunk writes their errors into S,
which is float32 regardless of the compute dtype.

S is passed transposed, [e k], which makes the products with wide keys faster on CPU (docs/log.md).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from famjax.core.types import Array
from famjax.parallel.traced import target_device

# products of c x c matrices cost little at this size, and updates are still matrix products
CPU_CHUNK, _ACCELERATOR_CHUNK = 32, 64
# largest matrix that is inverted row by row
_MAX_INVERTED_BY_ROWS = 16
# by default TPUs multiply float32 in bfloat16, GPUs in TF32
_FULL_PRECISION = jax.lax.Precision.HIGHEST


class DeltaUpdate(NamedTuple):
    """The update of S by one chunk: S' = S + k^T t (v - k S).

    Attributes:
      k: [... c k], keys.
      v: [... c e], values.
      t: [... c c], T.
    """

    k: Array
    v: Array
    t: Array

    def __call__(self, s: Float[Array, "*lead e k"]) -> Float[Array, "*lead e k"]:
        """Return the transpose of S', from that of S."""
        written = _product(self.t, self.v - _product(self.k, s.mT))
        return s + _product(written.mT, self.k)


def chunk_len(tokens: int, max_len: int | None = None) -> int:
    """Return the tokens of a chunk, a divisor of `tokens`.

    Args:
      max_len: their maximum; None is 32 on CPUs and 64 on accelerators.
    """
    if max_len is None:
        max_len = CPU_CHUNK if target_device().platform == "cpu" else _ACCELERATOR_CHUNK
    return max(c for c in range(1, min(max_len, tokens) + 1) if tokens % c == 0)


def delta_update(
    k: Float[Array, "*lead c k"], v: Float[Array, "*lead c e"], beta: Float[Array, "*lead c"]
) -> DeltaUpdate:
    """Return the update of S by a chunk of tokens."""
    kk = _product(k, k.mT)
    a = jnp.tril(beta[..., None] * kk, -1)
    return DeltaUpdate(k, v, _invert_unit_lower(a) * beta[..., None, :])


@jax.custom_jvp
def _invert_unit_lower(a: Float[Array, "*lead c c"]) -> Float[Array, "*lead c c"]:
    """Return (I + A)^{-1} of a strictly lower triangular A."""
    return _invert_halves(a)


def _invert_halves(a: Array) -> Array:
    n = a.shape[-1] // 2
    if a.shape[-1] <= _MAX_INVERTED_BY_ROWS:
        return _invert_rows(a)
    first, last = _invert_halves(a[..., :n, :n]), _invert_halves(a[..., n:, n:])
    below = -_product(_product(last, a[..., n:, :n]), first)
    return jnp.block([[first, jnp.zeros_like(below.mT)], [below, last]])


def _invert_rows(a: Array) -> Array:
    c = a.shape[-1]
    eye = jnp.eye(c, dtype=a.dtype)
    rows = [jnp.broadcast_to(eye[0], a[..., 0].shape)]
    for i in range(1, c):
        rows.append(eye[i] - sum(a[..., i, j, None] * rows[j] for j in range(i)))
    return jnp.stack(rows, -2)


@_invert_unit_lower.defjvp
def _differentiate_inverse(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # two products; differentiating each step of the recursion would take several for each row
    inverse = _invert_unit_lower(*primals)
    return inverse, -_product(_product(inverse, tangents[0]), inverse)


def _product(a: Array, b: Array) -> Array:
    """Return a @ b with full precision."""
    return jnp.matmul(a, b, precision=_FULL_PRECISION)
