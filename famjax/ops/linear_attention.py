"""Normalized linear attention (T2R, Equations 4 to 7) on plain arrays of features.

    S_i = S_{i-1} + phi(k_i) v_i^T          z_i = z_{i-1} + phi(k_i)
    out_i = phi(q_i)^T S_i / phi(q_i)^T z_i

The arguments `q` and `k` are phi(q) and phi(k), with k features. c is the number of tokens of a
chunk, r = h / g that of query heads per key head: attention may be multi-head, grouped-query or
multi-query. The chunkwise form is that of flash-linear-attention (Yang et al., 2024, arXiv
2312.06635).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from famjax.core.lanes import select_rows
from famjax.core.remat import tag_product
from famjax.core.types import Array, Axes, acc_dtype, at_least_float32
from famjax.ops import linear_attention_kernel as kernel
from famjax.ops.kernels import kernel_platform
from famjax.parallel.sequence_parallel import ring_pass
from famjax.parallel.traced import axis_index, sequence_shards, shard_map_axes, shard_map_sequence

# the minimum denominator, as in the authors' code (fairseq/random_feature_attention/utils.py)
EPS = 1e-2


class Sums(NamedTuple):
    """The sums S [b g k e] and z [b g k] over a document's keys and values, float32 or wider."""

    s: Float[Array, "b g k e"]
    z: Float[Array, "b g k"]


def recurrent_attention(
    q: Float[Array, "b 1 g r k"],
    k: Float[Array, "b 1 g k"],
    v: Float[Array, "b 1 g e"],
    sums: Sums,
    start: Int[Array, "b 1"],
) -> tuple[Float[Array, "b 1 g r e"], Sums]:
    """Process one token per lane in O(k e); the same as `chunkwise_attention` with t = 1."""
    sum_dtype = sums.s.dtype
    sums = Sums(*(select_rows(start[:, 0] < 0, a, 0) for a in sums))
    q_i, k_i, v_i = (a[:, 0].astype(sum_dtype) for a in (q, k, v))
    s = sums.s + k_i[..., None] * v_i[..., None, :]
    z = sums.z + k_i
    out = _normalize(jnp.einsum("bgrk,bgke->bgre", q_i, s), jnp.einsum("bgrk,bgk->bgr", q_i, z))
    return out.astype(v.dtype)[:, None], Sums(s, z)


def chunkwise_attention(
    q: Float[Array, "b t g r k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g e"],
    sums: Sums,
    start: Int[Array, "b t"],
    chunk: int,
) -> tuple[Float[Array, "b t g r e"], Sums]:
    """Process t tokens: quadratic within a chunk, S and z carried between chunks.

    Args:
      q, k, v: [b t g r k], [b t g k], [b t g e]. Zeros in k and v add nothing to the sums.
      sums: S and z of each lane's document before the call.
      start: [b t] int32, index in the call where the token's document starts; -1 before the call.
      chunk: c; results do not depend on it.

    Returns:
      [b t g r e] in v's dtype, and the sums of each lane's last document.
    """
    if sequence_shards(q.shape[1]) == 1:
        return _chunkwise(q, k, v, sums, start, chunk)

    def local(q: Array, k: Array, v: Array, sums: Sums, start: Array) -> tuple[Array, Sums]:
        """Process the tokens of one device, after it has received the sums before them."""
        before = axis_index() * q.shape[1]
        start = jnp.where(start < before, -1, start - before)
        received, final = ring_pass(functools.partial(_final_sums, k, v, start), sums)
        return _chunkwise(q, k, v, received, start, chunk)[0], final

    return shard_map_sequence(local, (1, 1, 1, None, 1), (1, None))(q, k, v, sums, start)


def _final_sums(k: Array, v: Array, start: Array, sums: Sums) -> Sums:
    """Return the sums after all tokens; arguments as in `chunkwise_attention`."""
    in_last_document = start == start[:, -1:]
    k = jnp.where(in_last_document[..., None, None], k, 0)
    s, z = (select_rows(start[:, -1] < 0, a, 0) for a in sums)
    return Sums(s + _narrow_einsum("btgk,btge->bgke", k, v), z + k.sum(1, dtype=z.dtype))


def _chunkwise(
    q: Array, k: Array, v: Array, sums: Sums, start: Array, chunk: int
) -> tuple[Array, Sums]:
    b, t, g, r, _ = q.shape
    chunk = min(chunk, t)
    tokens = (_split_chunks(q, chunk), _split_chunks(k, chunk), _split_chunks(v, chunk))
    # padding of the last chunk belongs to the last document and adds nothing to it
    padded = jnp.pad(start, ((0, 0), (0, -t % chunk)), mode="edge")
    num, den, sums = _num_den(*tokens, sums, _split_chunks(padded[..., None], chunk)[..., 0])
    out = _normalize(num, den).astype(v.dtype)  # [n b g r c e]
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(b, -1, g, r, v.shape[-1])[:, :t], sums


def attend_all(
    q: Float[Array, "*lead t g r k"], k: Float[Array, "*lead s g k"], v: Float[Array, "*lead s g e"]
) -> Float[Array, "*lead t g r e"]:
    """Return non-causal attention: [... t g r k], [... s g k], [... s g e] -> [... t g r e]."""
    k, v_acc = map(at_least_float32, (k, v))
    s = jnp.einsum("...sgk,...sge->...gke", k, v_acc)
    return attend_sums(q, s, k.sum(-3)).astype(v.dtype)


def attend_sums(
    q: Float[Array, "*lead t g r k"], s: Float[Array, "*lead g k e"], z: Float[Array, "*lead g k"]
) -> Float[Array, "*lead t g r e"]:
    """Attend with t queries to the same sums: [... t g r k] -> [... t g r e], in s's dtype."""
    q = q.astype(s.dtype)
    num = jnp.einsum("...tgrk,...gke->...tgre", q, s)
    return _normalize(num, jnp.einsum("...tgrk,...gk->...tgr", q, z))


def attend_masked(
    q: Float[Array, "b t g r k"],
    k: Float[Array, "b s g k"],
    v: Float[Array, "b s g e"],
    mask: Bool[Array, "b #t s"],
) -> Float[Array, "b t g r e"]:
    """Attend to the tokens where a mask [b t s] is True, by computing all pairs of tokens."""
    similar = _narrow_einsum("btgrk,bsgk->btgrs", q, k)
    similar = jnp.where(mask[:, :, None, None], similar, 0)
    num = _narrow_einsum("btgrs,bsge->btgre", similar, v.astype(similar.dtype))
    return _normalize(num, similar.sum(-1)).astype(v.dtype)


def causal_weights(
    q: Float[Array, "b t g r k"], k: Float[Array, "b t g k"]
) -> Float[Array, "b g r t t"]:
    """Return a document's attention weights: [b t g r k], [b t g k] -> [b g r t t].

    Quadratic; for analysis.
    """
    index = jnp.arange(q.shape[1])
    similar = jnp.where(index[:, None] >= index, _narrow_einsum("bigrk,bjgk->bgrij", q, k), 0)
    return _normalize(similar, similar.sum(-1))


def _normalize(num: Array, den: Array) -> Array:
    return num / jnp.maximum(den, EPS)[..., None]


def _split_chunks(x: Array, c: int) -> Array:
    """[b t ... k] -> [n b ... c k], zero-padded at the end."""
    b, t, *_ = x.shape
    x = jnp.pad(x, ((0, 0), (0, -t % c), *((0, 0),) * (x.ndim - 2)))
    return jnp.moveaxis(jnp.moveaxis(x.reshape(b, -1, c, *x.shape[2:]), 1, 0), 2, -2)


# q [n b g r c k], k [n b g c k], v [n b g c e] and start [n b c]
Tokens = tuple[Array, Array, Array, Array]


@jax.custom_vjp
def _num_den(q: Array, k: Array, v: Array, sums: Sums, start: Array) -> tuple[Array, Array, Sums]:
    """Return phi(q_i) S_i [n b g r c e], phi(q_i) z_i [n b g r c] and the last S and z.

    The custom VJP scans the chunks twice: forward with S for the gradient of q, and backward with
    the gradient of S for those of k and v. It needs no k x e residuals for tokens or chunks.
    """
    num, den, *final_sums = _run(_FORWARD, q, k, v, *sums, start)
    return tag_product(num), tag_product(den), Sums(*final_sums)


def _forward(
    q: Array, k: Array, v: Array, sums: Sums, start: Array
) -> tuple[tuple[Array, Array, Sums], Any]:
    return _num_den(q, k, v, sums, start), (q, k, v, sums, start)


def _backward(residuals: Any, grads: tuple[Array, Array, Sums]) -> tuple[Any, ...]:
    q, k, v, sums, start = residuals
    d_num, d_den, d_sums = grads
    *d_tokens, d_s, d_z = _run(_BACKWARD, q, k, v, *sums, start, d_num, d_den, *d_sums)
    return *d_tokens, Sums(d_s, d_z), None


_num_den.defvjp(_forward, _backward)


def _xla_forward(
    q: Array, k: Array, v: Array, s: Array, z: Array, start: Array
) -> tuple[Array, ...]:
    """Return num, den and the last S and z."""

    def scan_chunk(sums: Sums, xs: Any) -> tuple[Sums, tuple[Array, Array]]:
        q, k, v, mask = xs
        a = mask.current(_narrow_einsum("bgrik,bgjk->bgrij", q, k))
        q_past = mask.past(q)
        num = _narrow_einsum("bgrij,bgje->bgrie", a, v) + _narrow_einsum(
            "bgrik,bgke->bgrie", q_past, sums.s
        )
        den = a.sum(-1) + jnp.einsum("bgrik,bgk->bgri", q_past, sums.z)
        return _accumulate(sums, k, v, mask), (num, den)

    sums, (num, den) = jax.lax.scan(scan_chunk, Sums(s, z), (q, k, v, _document_masks(start)))
    return num, den, *sums


def _xla_backward(
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
    """Return the gradients of q, k, v, and of S and z before the call."""
    masks = _document_masks(start)

    def d_similarities(d_num: Array, d_den: Array, v: Array, mask: DocumentMask) -> Array:
        return mask.current(_narrow_einsum("bgrie,bgje->bgrij", d_num, v) + d_den[..., None])

    def grad_q(sums: Sums, xs: Any) -> tuple[Sums, Array]:
        k, v, mask, d_num, d_den = xs
        past = _narrow_einsum("bgrie,bgke->bgrik", d_num, sums.s)
        past = mask.past(past + d_den[..., None] * sums.z[:, :, None, None])
        current = _narrow_einsum("bgrij,bgjk->bgrik", d_similarities(d_num, d_den, v, mask), k)
        return _accumulate(sums, k, v, mask), (past + current).astype(q.dtype)

    def grad_k_v(d_sums: Sums, xs: Any) -> tuple[Sums, tuple[Array, Array]]:
        q, k, v, mask, d_num, d_den = xs
        d_scores = d_similarities(d_num, d_den, v, mask)
        a = mask.current(_narrow_einsum("bgrik,bgjk->bgrij", q, k))
        d_k = _narrow_einsum("bgje,bgke->bgjk", v, d_sums.s) + d_sums.z[:, :, None]
        d_k = mask.last_document(d_k) + _narrow_einsum("bgrij,bgrik->bgjk", d_scores, q)
        d_v = _narrow_einsum("bgjk,bgke->bgje", mask.last_document(k), d_sums.s)
        d_v = d_v + _narrow_einsum("bgrij,bgrie->bgje", a, d_num)
        q_past = mask.past(q)
        d_before = Sums(
            mask.carry(d_sums.s) + _narrow_einsum("bgrik,bgrie->bgke", q_past, d_num),
            mask.carry(d_sums.z) + jnp.einsum("bgrik,bgri->bgk", q_past, d_den),
        )
        return d_before, (d_k.astype(k.dtype), d_v.astype(v.dtype))

    _, d_q = jax.lax.scan(grad_q, Sums(s, z), (k, v, masks, d_num, d_den))
    xs = (q, k, v, masks, d_num, d_den)
    d_sums, (d_k, d_v) = jax.lax.scan(grad_k_v, Sums(d_s, d_z), xs, reverse=True)
    return d_q, d_k, d_v, *d_sums


class DocumentMask(NamedTuple):
    """Document masks of a chunk.

    Attributes:
      start: [b c], where the document of each token starts.
      before: [b], where the document of the last token before the chunk starts.
    """

    start: Array
    before: Array

    def current(self, a: Array) -> Array:
        """Mask pairs within the chunk: same document and causal: [b g r i j]."""
        index = jnp.arange(a.shape[-1])
        visible = (self.start[:, :, None] == self.start[:, None]) & (index[:, None] >= index)
        return jnp.where(visible[:, None, None], a, 0)

    def past(self, a: Array) -> Array:
        """Mask tokens whose document did not start before the chunk: [b g r c k]."""
        return jnp.where((self.start == self.before[:, None])[:, None, None, :, None], a, 0)

    def last_document(self, a: Array) -> Array:
        """Mask tokens that are not of the chunk's last document: [b g c k]."""
        return jnp.where((self.start == self.start[:, -1:])[:, None, :, None], a, 0)

    def carry(self, a: Array) -> Array:
        """Reset sums if a document starts in the chunk: [b ...]."""
        return select_rows(self.start[:, -1] == self.before, a, 0)


def _document_masks(start: Array) -> DocumentMask:
    """[n b c] -> the masks of all chunks, stacked."""
    before = jnp.concatenate([jnp.full_like(start[:1, :, -1], -1), start[:-1, :, -1]])
    return DocumentMask(start, before)


def _accumulate(sums: Sums, k: Array, v: Array, mask: DocumentMask) -> Sums:
    k = mask.last_document(k)
    s = mask.carry(sums.s) + _narrow_einsum("bgjk,bgje->bgke", k, v)
    return Sums(s, mask.carry(sums.z) + k.sum(2, dtype=s.dtype))


def _narrow_einsum(equation: str, x: Array, y: Array) -> Array:
    """Einsum in the narrower of both dtypes, accumulated in float32 or wider."""
    narrow = x.dtype if x.dtype.itemsize < y.dtype.itemsize else y.dtype
    x, y = x.astype(narrow), y.astype(narrow)
    return jnp.einsum(equation, x, y, preferred_element_type=acc_dtype(x))


class _Pass(NamedTuple):
    """A pass over the chunks, for XLA and as a Pallas kernel.

    Attributes:
      xla: the pass for XLA.
      kernel: the method of `kernel.Kernels` that runs the pass as a Pallas kernel.
      axes, out_axes: logical axes of arguments and results, as in `parallel.sharding`.
    """

    xla: Callable[..., tuple[Array, ...]]
    kernel: Callable[..., tuple[Array, ...]]
    axes: tuple[Axes, ...]
    out_axes: tuple[Axes, ...]


_CHUNK: Axes = (None, "batch", "kv_heads")
_SUMS: tuple[Axes, ...] = (("batch", "kv_heads"),) * 2
_TOKENS = (_CHUNK,) * 3
_INPUTS = (*_TOKENS, *_SUMS, (None, "batch"))
_RESULTS = (_CHUNK, _CHUNK, *_SUMS)

_FORWARD = _Pass(_xla_forward, kernel.Kernels.forward, _INPUTS, _RESULTS)
_BACKWARD = _Pass(_xla_backward, kernel.Kernels.backward, (*_INPUTS, *_RESULTS), (*_TOKENS, *_SUMS))


def _run(scan: _Pass, *args: Array) -> tuple[Array, ...]:
    """Run a pass with the target platform's kernel if that supports the call, else with XLA."""
    supported = kernel.supported_kernels(*args[:4]) if kernel_platform() else {}
    _, rows, heads, *_ = args[0].shape
    sizes = {"batch": rows, "kv_heads": heads}
    sharded = {
        name: shard_map_axes(
            functools.partial(scan.kernel, kernels), sizes, scan.axes, scan.out_axes
        )
        for name, kernels in supported.items()
    }
    by_platform = {name: f for name, f in sharded.items() if f is not None}
    if not by_platform:
        return scan.xla(*args)
    return jax.lax.platform_dependent(*args, default=scan.xla, **by_platform)
