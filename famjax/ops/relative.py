"""Attention of tokens to what stood before them, by distance.

Weights by distance are kept far first: of `span` of them, number n is of distance span - n. A
token that stands `place` slots behind the first slot that it may see finds distance span - n at
slot place + n.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from famjax.core.types import Array
from famjax.ops.attention import attend, attend_dropping, soft_cap
from famjax.ops.einsum_tape import slot_einsum

# stands for minus infinity where that would make NaN of a gradient
HIDDEN = -1e30

Drop = Callable[[Array], Array]


def scatter_bias(reversed_bias: Array, place: Array, slots: int) -> Array:
    """Lay weights by distance over the slots that one token sees: [... span] -> [... slots].

    Slots that are nearer than distance 1 or farther than span get 0.
    """
    empty = jnp.zeros((*reversed_bias.shape[:-1], slots), reversed_bias.dtype)
    return jax.lax.dynamic_update_slice_in_dim(empty, reversed_bias, place, empty.ndim - 1)


def relative_shift(reversed_bias: Array, slots: int) -> Array:
    """Lay weights by distance over slots, token i at place i: [... t span] -> [... t slots].

    Args:
      slots: span + t.
    """
    *lead, t, span = reversed_bias.shape
    row = slots + 1  # each row begins one slot behind the one above
    rows = jnp.pad(reversed_bias, [(0, 0)] * len(lead) + [(0, 0), (0, row - span)])
    return rows.reshape(*lead, t * row)[..., : t * slots].reshape(*lead, t, slots)


def within_span(place: Array, span: int, slots: int) -> Array:
    """Return which slots a token at `place` [...] finds at a distance of 1 to span: [... slots]."""
    n = jnp.arange(slots) - place[..., None]
    return (n >= 0) & (n < span)


def visible_or_all(mask: Array) -> tuple[Array, Array]:
    """Return a mask [... s] that lets something through, and where it did before: [...].

    What sees nothing (a stream's first token) attends to nothing: its result is to be taken as 0.
    """
    some = mask.any(-1)
    return mask | ~some[..., None], some


def log_span_mask(span: Array, tokens: int, ramp: int) -> Array:
    """Return the logarithm of adaptive span's mask by distance, far first: [h] -> [h tokens].

    The mask (Sukhbaatar et al., 2019, Equation 4) multiplies the weights behind the softmax, which
    are then normed again: the same as its logarithm added before the softmax.

    Args:
      span: tokens that each head sees.
      ramp: tokens over which its sight fades.
    """
    distance = jnp.arange(tokens, 0, -1)
    mask = jnp.clip((ramp + span[:, None] - distance) / ramp, 0, 1)
    return jnp.where(mask > 0, jnp.log(jnp.where(mask > 0, mask, 1)), HIDDEN)


def attend_window(
    q: Array,
    before: tuple[Array, Array],
    own: tuple[Array, Array],
    bias: Array,
    mask: Array,
    cap: float,
    drop: Drop | None,
) -> Array:
    """Attend with one token to the slots before its block and to those in it (`ops.hindsight`).

    Args:
      q: [b h e].
      before, own: keys and values [b g span e], [b g c e].
      bias: [b h span+c] or [h span+c], added to the scores.
      mask: [b span+c] bool.
      cap: of the scores, see `soft_cap`.
      drop: dropout of the weights.

    Returns:
      [b h e].
    """
    b, h, e = q.shape
    (k, v), (own_k, own_v) = before, own
    span, groups = k.shape[-2], (b, k.shape[1], h // k.shape[1])
    q = q.reshape(*groups, e)
    scores = jnp.concatenate(
        [slot_einsum("bgre,bgse->bgrs", q, k), _wide("bgre,bgse->bgrs", q, own_k)], -1
    )
    scores = soft_cap(scores * e**-0.5, cap) + bias.reshape(-1, *groups[1:], bias.shape[-1])
    mask, some = visible_or_all(mask)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -jnp.inf), axis=-1)
    weights = weights * some[:, None, None, None]
    weights = (weights if drop is None else drop(weights)).astype(v.dtype)
    out = slot_einsum("bgrs,bgse->bgre", weights[..., :span], v)
    out = out + _wide("bgrs,bgse->bgre", weights[..., span:], own_v)
    return out.astype(v.dtype).reshape(b, h, e)


def _wide(equation: str, x: Array, y: Array) -> Array:
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum(equation, x, y, preferred_element_type=wide)


def attend_line(
    q: Array, k: Array, v: Array, bias: Array, mask: Array, cap: float, drop: Drop | None
) -> Array:
    """Attend with all tokens of a call to a line of slots.

    Args:
      q: [b t h e].
      k, v: [b g s e].
      bias: [b h t s] or [h t s], added to the scores.
      mask: [b t s] bool.
      drop: dropout of the weights, if there is one.

    Returns:
      [b t h e].
    """
    h, g = q.shape[-2], k.shape[1]
    bias = bias.reshape(-1, g, h // g, *bias.shape[-2:])
    mask, some = visible_or_all(mask)
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    given = (q, k, v, mask, cap, bias)
    out = attend(*given) if drop is None else attend_dropping(*given, drop)
    return jnp.where(some[..., None, None], out, 0)
