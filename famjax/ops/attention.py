"""Softmax attention on plain arrays: multi-head, grouped-query and multi-query."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from famjax.core.remat import tag_product
from famjax.core.types import Array
from famjax.parallel.sharding import runs_on_one_cpu

# weights of this size stay in the cache of a CPU core (docs/design.md)
_CACHE_BYTES = 1 << 20


def soft_cap(x: Float[Array, "*lead"], cap: float) -> Float[Array, "*lead"]:
    """Return cap * tanh(x / cap), within -cap to cap; x itself if cap is 0."""
    return cap * jnp.tanh(x / cap) if cap else x


def attention_weights(
    q: Float[Array, "*#lead t h e"],
    k: Float[Array, "*#lead s g e"],
    mask: Bool[Array, "*#lead #t #s"] | None,
    cap: float = 0.0,
    bias: Float[Array, "*#lead #g #r #t s"] | None = None,
) -> Float[Array, "... g h//g t s"]:
    """Return softmax(q k / sqrt(e)) over the unmasked keys.

    Args:
      q: [... t h e].
      k: [... s g e]; query head i uses key head i // (h / g).
      mask: [... t s] bool, broadcast; True is visible. Each query must see at least one key.
      cap: limit for soft-capping of the scores, see `soft_cap`.
      bias: [... g h/g t s], added to the scores; all but the last axis are broadcast.

    Returns:
      [... g h/g t s] in float32 or wider.
    """
    scores = soft_cap(_scores(q, k), cap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = jnp.where(mask[..., None, None, :, :], scores, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1)


def _scores(q: Array, k: Array) -> Array:
    *_, h, e = q.shape
    g = k.shape[-2]
    q = q.reshape(*q.shape[:-2], g, h // g, e)
    acc_dtype = jnp.promote_types(q.dtype, jnp.float32)
    return jnp.einsum("...tgre,...sge->...grts", q, k, preferred_element_type=acc_dtype) * e**-0.5


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend(
    q: Float[Array, "*#lead t h e"],
    k: Float[Array, "*#lead s g e"],
    v: Float[Array, "*#lead s g e"],
    mask: Bool[Array, "*#lead #t #s"] | None = None,
    cap: float = 0.0,
    bias: Float[Array, "*#lead #g #r #t s"] | None = None,
) -> Float[Array, "... t h e"]:
    """Return SelfAttention(q, k, v): [... t h e]. Arguments as in `attention_weights`.

    It has a custom VJP whose residuals are the weights, in v's dtype, and the output. The gradient
    of the softmax needs sum_s weights * d_weights, which equals sum_e out * d_out, a sum over e
    instead of over all keys, as in FlashAttention. For gradients q, k and v must have equal leading
    axes. Forward-mode differentiation is not supported.
    """
    return _attend_forward(q, k, v, mask, cap, bias)[0]


Residuals = tuple[Array, Array, Array, Array, Array, Array | None]


def _attend_forward(
    q: Array, k: Array, v: Array, mask: Array | None, cap: float, bias: Array | None
) -> tuple[Array, Residuals]:
    weights = tag_product(attention_weights(q, k, mask, cap, bias).astype(v.dtype))
    out = jnp.einsum("...grts,...sge->...tgre", weights, v)
    out = tag_product(out.reshape(q.shape))
    # a residual with the bias's shape but no elements
    return out, (q, k, v, weights, out, None if bias is None else bias[..., :0])


def _attend_backward(
    cap: float, residuals: Residuals, d_out: Array
) -> tuple[Array, Array, Array, None, Array | None]:
    q, k, v, weights, out, bias = residuals
    e, groups = q.shape[-1], weights.shape[-4:-2]

    def group_heads(x: Array) -> Array:
        return x.reshape(*x.shape[:-2], *groups, e)

    acc_dtype = jnp.promote_types(q.dtype, jnp.float32)
    mean = (group_heads(d_out).astype(acc_dtype) * group_heads(out)).sum(-1)  # [... t g r]
    mean = jnp.moveaxis(mean, -3, -1)[..., None]
    d_weights = jnp.einsum(
        "...tgre,...sge->...grts", group_heads(d_out), v, preferred_element_type=acc_dtype
    )
    d_scores = weights * (d_weights - mean)
    d_bias = None if bias is None else _sum_to_shape(d_scores, bias)
    d_scores = d_scores * e**-0.5
    if cap:
        # recomputes the scores instead of saving them: few families cap their scores
        d_scores = d_scores * (1 - jnp.square(jnp.tanh(_scores(q, k) / cap)))
    d_scores = d_scores.astype(q.dtype)
    return (
        jnp.einsum("...grts,...sge->...tgre", d_scores, k).reshape(q.shape),
        jnp.einsum("...grts,...tgre->...sge", d_scores, group_heads(q)),
        jnp.einsum("...grts,...tgre->...sge", weights, group_heads(d_out)),
        None,
        d_bias,
    )


def _sum_to_shape(a: Array, like: Array) -> Array:
    """Sum `a` to the shape of `like` (the transpose of broadcasting), all but the last axis."""
    a = a.sum(tuple(range(a.ndim - like.ndim)))
    narrow = tuple(i for i, n in enumerate(like.shape[:-1]) if n == 1 and a.shape[i] != 1)
    return a.sum(narrow, keepdims=True).astype(like.dtype)


attend.defvjp(_attend_forward, _attend_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend_blocks(
    q: Float[Array, "b n t h e"],
    k: Float[Array, "b n s g e"],
    v: Float[Array, "b n s g e"],
    mask: Bool[Array, "b n t s"],
    cap: float = 0.0,
) -> Float[Array, "b n t h e"]:
    """Return `attend` of n blocks of b rows.

    On a CPU the weights of all blocks leave the cache. There, unless it is differentiated, blocks
    are computed one after another, as many at a time as have about `_CACHE_BYTES` of weights.
    """
    blocks = q.shape[0] * q.shape[1]
    parts = _count_parts(q, k)
    if parts == 1:
        return attend(q, k, v, mask, cap)
    xs = jax.tree.map(lambda a: a.reshape(blocks, *a.shape[2:]), (q, k, v, mask))
    out = jax.lax.map(lambda x: attend(*x, cap), xs, batch_size=max(blocks // parts, 1))
    return out.reshape(q.shape)


def _count_parts(q: Array, k: Array) -> int:
    """Return in how many parts the blocks [b n ...] are computed; 1 is all at once."""
    b, n, t, h, _ = q.shape
    # an exported program has a batch of any size, and runs on any device
    if not isinstance(b, int) or not runs_on_one_cpu():
        return 1
    return min(max(4 * b * n * t * h * k.shape[2] // _CACHE_BYTES, 1), b * n)


def _attend_blocks_forward(
    q: Array, k: Array, v: Array, mask: Array, cap: float
) -> tuple[Array, Residuals]:
    return _attend_forward(q, k, v, mask, cap, None)


def _attend_blocks_backward(
    cap: float, residuals: Residuals, d_out: Array
) -> tuple[Array, Array, Array, None]:
    d_q, d_k, d_v, _, _ = _attend_backward(cap, residuals, d_out)
    return d_q, d_k, d_v, None


attend_blocks.defvjp(_attend_blocks_forward, _attend_blocks_backward)


def attend_dropping(
    q: Float[Array, "*#lead t h e"],
    k: Float[Array, "*#lead s g e"],
    v: Float[Array, "*#lead s g e"],
    mask: Bool[Array, "*#lead #t #s"] | None,
    cap: float,
    bias: Float[Array, "*#lead #g #r #t s"] | None,
    drop: Callable[[Array], Array],
) -> Float[Array, "... t h e"]:
    """Return SelfAttention(q, k, v) as `attend` does, with dropout of the weights by `drop`."""
    weights = tag_product(drop(attention_weights(q, k, mask, cap, bias)).astype(v.dtype))
    return jnp.einsum("...grts,...sge->...tgre", weights, v).reshape(q.shape)


# q, k, v, mask of n frames of s keys; n and s may differ between the arguments of `attend_frames`
KVFrames = tuple[
    Float[Array, "b _n h e"],
    Float[Array, "b _n _s g e"],
    Float[Array, "b _n _s g e"],
    Bool[Array, "b _n _s"],
]


def attend_frames(*frames: KVFrames, cap: float = 0.0) -> Float[Array, "b h e"]:
    """Attend with one query to keys in several position frames.

    This is `attend` for one token, with keys that are rotated by their offset in their frame:
    rotating the query for each frame is cheaper than rotating every key of the frame.

    Args:
      frames: each (q, k, v, mask): q [b n h e], the query rotated for each of n frames; k and v
        [b n s g e], s keys per frame; mask [b n s] bool.
      cap: limit for soft-capping of the scores, see `soft_cap`.

    Returns:
      [b h e].
    """
    scores, values = [], []
    for q, k, v, mask in frames:
        b, n, h, e = q.shape
        s, g = k.shape[2:4]
        acc_dtype = jnp.promote_types(q.dtype, jnp.float32)
        q = q.reshape(b, n, g, h // g, e)
        score = jnp.einsum("bngre,bnsge->bgrns", q, k, preferred_element_type=acc_dtype) * e**-0.5
        score = jnp.where(mask[:, None, None], soft_cap(score, cap), -jnp.inf)
        scores.append(score.reshape(b, g, h // g, n * s))
        values.append(v.reshape(b, n * s, g, e))
    weights = jax.nn.softmax(jnp.concatenate(scores, -1), axis=-1).astype(v.dtype)
    out = jnp.einsum("bgrs,bsge->bgre", weights, jnp.concatenate(values, 1))
    return out.reshape(b, h, e)
