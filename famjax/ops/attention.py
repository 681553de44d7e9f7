"""Softmax attention on plain arrays, multi-head, grouped-query and multi-query alike."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from famjax.core.types import Array


def attention_weights(q: Array, k: Array, mask: Array | None) -> Array:
    """Return softmax(q k / sqrt(e)) over the keys that the mask lets through.

    Args:
      q: [... t h e].
      k: [... s g e]; query head i reads key head i // (h / g).
      mask: [... t s] bool, broadcast; True is visible. Each query must see at least one key.

    Returns:
      [... g h/g t s] in float32 or wider.
    """
    *_, h, e = q.shape
    g = k.shape[-2]
    q = q.reshape(*q.shape[:-2], g, h // g, e)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("...tgre,...sge->...grts", q, k, preferred_element_type=wide) * e**-0.5
    if mask is not None:
        scores = jnp.where(mask[..., None, None, :, :], scores, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1)


def attend(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    """Return SelfAttention(q, k, v): [... t h e]. Shapes as in `attention_weights`."""
    weights = attention_weights(q, k, mask).astype(v.dtype)
    out = jnp.einsum("...grts,...sge->...tgre", weights, v)
    return out.reshape(q.shape)


Frames = tuple[Array, Array, Array, Array]


def attend_frames(*frames: Frames) -> Array:
    """Attend with one query to keys that are kept in frames of their own.

    This is `attend` for one token where the keys are rotated by their offset in their frame:
    turning the query once a frame is cheaper than turning every key that the frame holds.

    Args:
      frames: each (q, k, v, mask): q [b s h e], the query as each of s frames must see it; k and v
        [b s c g e], c keys a frame; mask [b s c] bool.

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
        score = jnp.where(mask[:, None, None], score, -jnp.inf)
        scores.append(score.reshape(b, g, h // g, s * c))
        values.append(v.reshape(b, s * c, g, e))
    weights = jax.nn.softmax(jnp.concatenate(scores, -1), axis=-1).astype(v.dtype)
    out = jnp.einsum("bgrs,bsge->bgre", weights, jnp.concatenate(values, 1))
    return out.reshape(b, h, e)
