"""Softmax attention on plain arrays, multi-head, grouped-query and multi-query alike."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from famjax.core.remat import tag_product
from famjax.core.types import Array


def soft_cap(x: Array, cap: float) -> Array:
    """Return cap * tanh(x / cap), which stays within -cap to cap; x itself if cap is 0."""
    return cap * jnp.tanh(x / cap) if cap else x


def attention_weights(
    q: Array, k: Array, mask: Array | None, cap: float = 0.0, bias: Array | None = None
) -> Array:
    """Return softmax(q k / sqrt(e)) over the keys that the mask lets through.

    Args:
      q: [... t h e].
      k: [... s g e]; query head i reads key head i // (h / g).
      mask: [... t s] bool, broadcast; True is visible. Each query must see at least one key.
      cap: of the scores, see `soft_cap`.
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
    wide = jnp.promote_types(q.dtype, jnp.float32)
    return jnp.einsum("...tgre,...sge->...grts", q, k, preferred_element_type=wide) * e**-0.5


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None = None,
    cap: float = 0.0,
    bias: Array | None = None,
) -> Array:
    """Return SelfAttention(q, k, v): [... t h e]. Arguments as in `attention_weights`.

    For its gradient it keeps the weights, in v's type, and its result. The softmax's gradient takes
    the mean of the weights' gradient under the weights; that is the product of the result with its
    own gradient, a sum over e instead of over all keys. For a gradient q, k and v must have equal
    leading axes; JAX's forward mode does not go through.
    """
    return _attend(q, k, v, mask, cap, bias)[0]


Saved = tuple[Array, Array, Array, Array, Array, Array | None]


def _attend(
    q: Array, k: Array, v: Array, mask: Array | None, cap: float, bias: Array | None
) -> tuple[Array, Saved]:
    weights = tag_product(attention_weights(q, k, mask, cap, bias).astype(v.dtype))
    out = jnp.einsum("...grts,...sge->...tgre", weights, v)
    out = tag_product(out.reshape(q.shape))
    # of the bias the shape alone
    return out, (q, k, v, weights, out, None if bias is None else bias[..., :0])


def _attend_backward(
    cap: float, saved: Saved, to_out: Array
) -> tuple[Array, Array, Array, None, Array | None]:
    q, k, v, weights, out, bias = saved
    e, groups = q.shape[-1], weights.shape[-4:-2]

    def grouped(x: Array) -> Array:
        return x.reshape(*x.shape[:-2], *groups, e)

    wide = jnp.promote_types(q.dtype, jnp.float32)
    mean = (grouped(to_out).astype(wide) * grouped(out)).sum(-1)  # [... t g r]
    mean = jnp.moveaxis(mean, -3, -1)[..., None]
    to_weights = jnp.einsum(
        "...tgre,...sge->...grts", grouped(to_out), v, preferred_element_type=wide
    )
    to_scores = weights * (to_weights - mean)
    to_bias = None if bias is None else _summed(to_scores, bias)
    to_scores = to_scores * e**-0.5
    if cap:
        # the scores are computed once more: capped families are few, and this keeps nothing
        to_scores = to_scores * (1 - jnp.square(jnp.tanh(_scores(q, k) / cap)))
    to_scores = to_scores.astype(q.dtype)
    return (
        jnp.einsum("...grts,...sge->...tgre", to_scores, k).reshape(q.shape),
        jnp.einsum("...grts,...tgre->...sge", to_scores, grouped(q)),
        jnp.einsum("...grts,...tgre->...sge", weights, grouped(to_out)),
        None,
        to_bias,
    )


def _summed(a: Array, like: Array) -> Array:
    """Sum over the axes that `like` has not, or has as 1; the last stays."""
    a = a.sum(tuple(range(a.ndim - like.ndim)))
    narrow = tuple(i for i, n in enumerate(like.shape[:-1]) if n == 1 and a.shape[i] != 1)
    return a.sum(narrow, keepdims=True).astype(like.dtype)


attend.defvjp(_attend, _attend_backward)


def attend_dropping(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    cap: float,
    bias: Array | None,
    drop: Callable[[Array], Array],
) -> Array:
    """As `attend`, with dropout of the weights."""
    weights = tag_product(drop(attention_weights(q, k, mask, cap, bias)).astype(v.dtype))
    return jnp.einsum("...grts,...sge->...tgre", weights, v).reshape(q.shape)


Frames = tuple[Array, Array, Array, Array]


def attend_frames(*frames: Frames, cap: float = 0.0) -> Array:
    """Attend with one query to keys that are kept in frames of their own.

    This is `attend` for one token where the keys are rotated by their offset in their frame:
    turning the query once a frame is cheaper than turning every key that the frame holds.

    Args:
      frames: each (q, k, v, mask): q [b s h e], the query as each of s frames must see it; k and v
        [b s c g e], c keys a frame; mask [b s c] bool.
      cap: of the scores, see `soft_cap`.

    Returns:
      [b h e].
    """
    scores, values = [], []
    for q, k, v, mask in frames:
        b, s, h, e = q.shape
        c, g = k.shape[2:4]
        wide = jnp.promote_types(q.dtype, jnp.float32)
        q = q.reshape(b, s, g, h // g, e)
        score = jnp.einsum("bsgre,bscge->bgrsc", q, k, preferred_element_type=wide) * e**-0.5
        score = jnp.where(mask[:, None, None], soft_cap(score, cap), -jnp.inf)
        scores.append(score.reshape(b, g, h // g, s * c))
        values.append(v.reshape(b, s * c, g, e))
    weights = jax.nn.softmax(jnp.concatenate(scores, -1), axis=-1).astype(v.dtype)
    out = jnp.einsum("bgrs,bsge->bgre", weights, jnp.concatenate(values, 1))
    return out.reshape(b, h, e)
