"""Normalised linear attention (T2R, Equations 4 to 7) on plain arrays of features.

    S_i = S_{i-1} + phi(k_i) v_i^T          z_i = z_{i-1} + phi(k_i)
    out_i = phi(q_i)^T S_i / phi(q_i)^T z_i

`q` and `k` are phi(q) and phi(k) here, of k features; `c` is the tokens of a chunk, r = h / g the
query heads that read one key head. Multi-head, grouped-query and multi-query alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from famjax.core.remat import tag_product
from famjax.core.sequence_parallel import ring_pass
from famjax.core.sharding import (
    axis_index,
    device,
    sequence_shards,
    shard_map_axes,
    shard_map_sequence,
)
from famjax.core.types import Array, Axes
from famjax.ops import linear_attention_kernel as kernel

# the least denominator, as in the authors' code (fairseq/random_feature_attention/utils.py)
EPS = 1e-2


class Sums(NamedTuple):
    """S: [b g k e] and z: [b g k] of a document's keys and values, float32 or wider."""

    s: Array
    z: Array


def recurrent(q: Array, k: Array, v: Array, sums: Sums, start: Array) -> tuple[Array, Sums]:
    """Read one token a lane, in O(k e). Arguments and results as in `chunked`, with t = 1."""
    wide = sums.s.dtype
    sums = Sums(*(jnp.where(_lanes(start[:, 0] < 0, a), a, 0) for a in sums))
    q_i, k_i, v_i = (a[:, 0].astype(wide) for a in (q, k, v))
    s = sums.s + k_i[..., None] * v_i[..., None, :]
    z = sums.z + k_i
    out = _normalised(jnp.einsum("bgrk,bgke->bgre", q_i, s), jnp.einsum("bgrk,bgk->bgr", q_i, z))
    return out.astype(v.dtype)[:, None], Sums(s, z)


def chunked(
    q: Array, k: Array, v: Array, sums: Sums, start: Array, chunk: int
) -> tuple[Array, Sums]:
    """Read t tokens: all pairs within a chunk, and S and z from chunk to chunk.

    Args:
      q, k, v: [b t g r k], [b t g k], [b t g e]. Where k and v are zero nothing is remembered.
      sums: of the document that each lane stands in.
      start: [b t] int32, where in the call the token's document begins; -1 before the call.
      chunk: c; the results are the same for any.

    Returns:
      [b t g r e] in v's type, and the sums of each lane's last document.
    """
    if sequence_shards(q.shape[1]) == 1:
        return _chunked(q, k, v, sums, start, chunk)

    def local(q: Array, k: Array, v: Array, sums: Sums, start: Array) -> tuple[Array, Sums]:
        """Read the tokens of one device, once it has been told the sums before them."""
        before = axis_index() * q.shape[1]
        start = jnp.where(start < before, -1, start - before)
        given, last = ring_pass(functools.partial(_sum_up, k, v, start), sums)
        return _chunked(q, k, v, given, start, chunk)[0], last

    return shard_map_sequence(local, (1, 1, 1, None, 1), (1, None))(q, k, v, sums, start)


def _sum_up(k: Array, v: Array, start: Array, sums: Sums) -> Sums:
    """Return the sums behind all tokens at once; arguments as in `chunked`."""
    last = start == start[:, -1:]
    k = jnp.where(last[..., None, None], k, 0)
    s, z = (jnp.where(_lanes(start[:, -1] < 0, a), a, 0) for a in sums)
    return Sums(s + _wide("btgk,btge->bgke", k, v), z + k.sum(1, dtype=z.dtype))


def _chunked(
    q: Array, k: Array, v: Array, sums: Sums, start: Array, chunk: int
) -> tuple[Array, Sums]:
    b, t, g, r, _ = q.shape
    chunk = min(chunk, t)
    tokens = (_chunks(q, chunk), _chunks(k, chunk), _chunks(v, chunk))
    # what fills the last chunk belongs to the last document and adds nothing to it
    filled = jnp.pad(start, ((0, 0), (0, -t % chunk)), mode="edge")
    num, den, sums = _pairs(*tokens, sums, _chunks(filled[..., None], chunk)[..., 0])
    out = _normalised(num, den).astype(v.dtype)  # [n b g r c e]
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(b, -1, g, r, v.shape[-1])[:, :t], sums


def attend_all(q: Array, k: Array, v: Array) -> Array:
    """Let every query see every key: [... t g r k], [... s g k], [... s g e] -> [... t g r e]."""
    q, k, wide_v = (a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in (q, k, v))
    s = jnp.einsum("...sgk,...sge->...gke", k, wide_v)
    num = jnp.einsum("...tgrk,...gke->...tgre", q, s)
    return _normalised(num, jnp.einsum("...tgrk,...gk->...tgr", q, k.sum(-3))).astype(v.dtype)


def causal_weights(q: Array, k: Array) -> Array:
    """Return what `chunked` gives each value of a document: [b t g r k], [b t g k] -> [b g r t t].

    All pairs at once; to look at, not to train with.
    """
    index = jnp.arange(q.shape[1])
    similar = jnp.where(index[:, None] >= index, _wide("bigrk,bjgk->bgrij", q, k), 0)
    return _normalised(similar, similar.sum(-1))


def _normalised(num: Array, den: Array) -> Array:
    return num / jnp.maximum(den, EPS)[..., None]


def _lanes(lanes: Array, like: Array) -> Array:
    return lanes.reshape(-1, *(1,) * (like.ndim - 1))


def _chunks(x: Array, c: int) -> Array:
    """[b t ... k] -> [n b ... c k], zeros behind the last token."""
    b, t, *_ = x.shape
    x = jnp.pad(x, ((0, 0), (0, -t % c), *((0, 0),) * (x.ndim - 2)))
    return jnp.moveaxis(jnp.moveaxis(x.reshape(b, -1, c, *x.shape[2:]), 1, 0), 2, -2)


# all pairs within chunks --------------------------------------------------------------------------

# q [n b g r c k], k [n b g c k], v [n b g c e] and start [n b c]
Tokens = tuple[Array, Array, Array, Array]


@jax.custom_vjp
def _pairs(q: Array, k: Array, v: Array, sums: Sums, start: Array) -> tuple[Array, Array, Sums]:
    """Return phi(q_i) S_i [n b g r c e], phi(q_i) z_i [n b g r c] and the last S and z.

    The gradient goes over the chunks twice, forward with S for that of q, and backward with the
    gradient of S for those of k and v: nothing of k x e is kept, for a token or for a chunk.
    """
    num, den, *last = _run(_READ, q, k, v, *sums, start)
    return tag_product(num), tag_product(den), Sums(*last)


def _forward(
    q: Array, k: Array, v: Array, sums: Sums, start: Array
) -> tuple[tuple[Array, Array, Sums], Any]:
    return _pairs(q, k, v, sums, start), (q, k, v, sums, start)


def _backward(saved: Any, grads: tuple[Array, Array, Sums]) -> tuple[Any, ...]:
    q, k, v, sums, start = saved
    to_num, to_den, to_sums = grads
    *of_tokens, to_s, to_z = _run(_GRADIENT, q, k, v, *sums, start, to_num, to_den, *to_sums)
    return *of_tokens, Sums(to_s, to_z), None


_pairs.defvjp(_forward, _backward)


def _read(q: Array, k: Array, v: Array, s: Array, z: Array, start: Array) -> tuple[Array, ...]:
    """Return num, den and the last S and z."""

    def chunk(sums: Sums, xs: Any) -> tuple[Sums, tuple[Array, Array]]:
        q, k, v, sight = xs
        a = sight.own(_wide("bgrik,bgjk->bgrij", q, k))
        q_past = sight.past(q)
        num = _wide("bgrij,bgje->bgrie", a, v) + _wide("bgrik,bgke->bgrie", q_past, sums.s)
        den = a.sum(-1) + jnp.einsum("bgrik,bgk->bgri", q_past, sums.z)
        return _remember(sums, k, v, sight), (num, den)

    sums, (num, den) = jax.lax.scan(chunk, Sums(s, z), (q, k, v, _sights(start)))
    return num, den, *sums


def _gradient(
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
    """Return the gradients of q, k, v, and of S and z before the call."""
    attention_inputs = _sights(start)

    def to_a(to_num: Array, to_den: Array, v: Array, sight: Sight) -> Array:
        return sight.own(_wide("bgrie,bgje->bgrij", to_num, v) + to_den[..., None])

    def of_q(sums: Sums, xs: Any) -> tuple[Sums, Array]:
        k, v, sight, to_num, to_den = xs
        past = _wide("bgrie,bgke->bgrik", to_num, sums.s)
        past = sight.past(past + to_den[..., None] * sums.z[:, :, None, None])
        own = _wide("bgrij,bgjk->bgrik", to_a(to_num, to_den, v, sight), k)
        return _remember(sums, k, v, sight), (past + own).astype(q.dtype)

    def of_k_v(to_sums: Sums, xs: Any) -> tuple[Sums, tuple[Array, Array]]:
        q, k, v, sight, to_num, to_den = xs
        to_scores = to_a(to_num, to_den, v, sight)
        a = sight.own(_wide("bgrik,bgjk->bgrij", q, k))
        to_k = _wide("bgje,bgke->bgjk", v, to_sums.s) + to_sums.z[:, :, None]
        to_k = sight.last(to_k) + _wide("bgrij,bgrik->bgjk", to_scores, q)
        to_v = _wide("bgjk,bgke->bgje", sight.last(k), to_sums.s)
        to_v = to_v + _wide("bgrij,bgrie->bgje", a, to_num)
        q_past = sight.past(q)
        before = Sums(
            sight.kept(to_sums.s) + _wide("bgrik,bgrie->bgke", q_past, to_num),
            sight.kept(to_sums.z) + jnp.einsum("bgrik,bgri->bgk", q_past, to_den),
        )
        return before, (to_k.astype(k.dtype), to_v.astype(v.dtype))

    _, to_q = jax.lax.scan(of_q, Sums(s, z), (k, v, attention_inputs, to_num, to_den))
    xs = (q, k, v, attention_inputs, to_num, to_den)
    to_sums, (to_k, to_v) = jax.lax.scan(of_k_v, Sums(to_s, to_z), xs, reverse=True)
    return to_q, to_k, to_v, *to_sums


class Sight(NamedTuple):
    """What the tokens of a chunk may see. start: [b c], before: [b], the document behind it."""

    start: Array
    before: Array

    def own(self, a: Array) -> Array:
        """Of the chunk's own tokens, those of its document up to itself: [b g r i j]."""
        index = jnp.arange(a.shape[-1])
        seen = (self.start[:, :, None] == self.start[:, None]) & (index[:, None] >= index)
        return jnp.where(seen[:, None, None], a, 0)

    def past(self, a: Array) -> Array:
        """Of what was before the chunk, a token of the same document everything: [b g r c k]."""
        return jnp.where((self.start == self.before[:, None])[:, None, None, :, None], a, 0)

    def last(self, a: Array) -> Array:
        """Only tokens of the chunk's last document are carried on: [b g c k]."""
        return jnp.where((self.start == self.start[:, -1:])[:, None, :, None], a, 0)

    def kept(self, a: Array) -> Array:
        """Sums outlive the chunk if no document begins in it: [b ...]."""
        return jnp.where(_lanes(self.start[:, -1] == self.before, a), a, 0)


def _sights(start: Array) -> Sight:
    """[n b c] -> for every chunk, stacked."""
    before = jnp.concatenate([jnp.full_like(start[:1, :, -1], -1), start[:-1, :, -1]])
    return Sight(start, before)


def _remember(sums: Sums, k: Array, v: Array, sight: Sight) -> Sums:
    k = sight.last(k)
    s = sight.kept(sums.s) + _wide("bgjk,bgje->bgke", k, v)
    return Sums(s, sight.kept(sums.z) + k.sum(2, dtype=s.dtype))


def _wide(equation: str, x: Array, y: Array) -> Array:
    """Multiply in the narrower of both types, and add up in float32 or wider."""
    narrow = x.dtype if x.dtype.itemsize < y.dtype.itemsize else y.dtype
    wide = jnp.promote_types(narrow, jnp.float32)
    return jnp.einsum(equation, x.astype(narrow), y.astype(narrow), preferred_element_type=wide)


# kernels ------------------------------------------------------------------------------------------


class _Pass(NamedTuple):
    """One way to go over the chunks, for XLA and as a kernel.

    Attributes:
      kernel: the pass of `kernel.Kernels`.
      axes, out_axes: logical axes of arguments and results, as in `core.sharding`.
    """

    xla: Callable[..., tuple[Array, ...]]
    kernel: Callable[..., tuple[Array, ...]]
    axes: tuple[Axes, ...]
    out_axes: tuple[Axes, ...]


_CHUNK: Axes = (None, "batch", "kv_heads")
_SUMS: tuple[Axes, ...] = (("batch", "kv_heads"),) * 2
_TOKENS = (_CHUNK,) * 3
_GIVEN = (*_TOKENS, *_SUMS, (None, "batch"))
_RESULTS = (_CHUNK, _CHUNK, *_SUMS)

_READ = _Pass(_read, kernel.Kernels.forward, _GIVEN, _RESULTS)
_GRADIENT = _Pass(_gradient, kernel.Kernels.backward, (*_GIVEN, *_RESULTS), (*_TOKENS, *_SUMS))


def _has_kernels(device: jax.Device) -> bool:
    """Tell whether kernels are worth tracing; GPUs before Ampere multiply no bfloat16."""
    if device.platform == "gpu":
        # AMD's have names like gfx942
        major = str(getattr(device, "compute_capability", "")).partition(".")[0]
        return major.isdecimal() and int(major) >= 8
    return device.platform == "tpu"


def _run(of: _Pass, *args: Array) -> tuple[Array, ...]:
    """Run a pass by the kernel of the platform it is compiled for, where one suits, or by XLA."""
    fitting = kernel.fitting(*args[:4]) if _has_kernels(device()) else {}
    _, rows, heads, *_ = args[0].shape
    sizes = {"batch": rows, "kv_heads": heads}
    kernels = {
        name: shard_map_axes(functools.partial(of.kernel, on), sizes, of.axes, of.out_axes)
        for name, on in fitting.items()
    }
    known = {name: f for name, f in kernels.items() if f is not None}
    return jax.lax.platform_dependent(*args, default=of.xla, **known) if known else of.xla(*args)
