"""Attention to earlier tokens with a bias by distance (relative positions, adaptive span).

A bias by distance is stored reversed, farthest first: element n of `span` is for distance span - n.
For a token whose first visible entry has index i, that is the distance of entry i + n.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Integer

from famjax.core.types import Array, DropoutFn, acc_dtype
from famjax.ops.attention import attend, attend_with_dropout, soft_cap
from famjax.ops.einsum_tape import history_einsum

# instead of -inf, whose gradient would be NaN
MASK_VALUE = -1e30


def scatter_bias(
    reversed_bias: Float[Array, "*lead span"], index: Integer[Array, ""], entries: int
) -> Float[Array, "*lead {entries}"]:
    """Align a reversed bias with the entries of one token: [... span] -> [... entries].

    Entries at distances below 1 or above span get 0.
    """
    empty = jnp.zeros((*reversed_bias.shape[:-1], entries), reversed_bias.dtype)
    return jax.lax.dynamic_update_slice_in_dim(empty, reversed_bias, index, empty.ndim - 1)


def relative_shift(
    reversed_bias: Float[Array, "*lead t span"], entries: int
) -> Float[Array, "*lead t span+t"]:
    """Align reversed biases with entries, token i at index i: [... t span] -> [... t entries].

    This is the relative shift of Transformer-XL (Dai et al., 2019, Appendix B).

    Args:
      entries: span + t.
    """
    *lead, t, span = reversed_bias.shape
    row = entries + 1  # each row starts one entry after the previous one
    rows = jnp.pad(reversed_bias, [(0, 0)] * len(lead) + [(0, 0), (0, row - span)])
    return rows.reshape(*lead, t * row)[..., : t * entries].reshape(*lead, t, entries)


def span_mask(
    index: Integer[Array, "*lead"], span: int, entries: int
) -> Bool[Array, "*lead {entries}"]:
    """Return which entries are within the span of a token at `index` [...]: [... entries]."""
    n = jnp.arange(entries) - index[..., None]
    return (n >= 0) & (n < span)


def unmask_empty_rows(
    mask: Bool[Array, "*lead s"],
) -> tuple[Bool[Array, "*lead s"], Bool[Array, "*lead"]]:
    """Return the mask [... s] with all-False rows set to True, and which rows had a True: [...].

    For rows without visible entries (a stream's first token) the caller must set the result to 0.
    """
    any_visible = mask.any(-1)
    return mask | ~any_visible[..., None], any_visible


def log_span_mask(span: Float[Array, "h"], tokens: int, ramp: int) -> Float[Array, "h {tokens}"]:
    """Return the log of adaptive span's mask by distance, farthest first: [h] -> [h tokens].

    The mask (Sukhbaatar et al., 2019, Equation 4) multiplies the softmax weights, which are then
    renormalized. This is equivalent to adding the mask's log before the softmax.

    Args:
      span: span of each head, in tokens.
      ramp: tokens over which the mask decays to 0.
    """
    distance = jnp.arange(tokens, 0, -1)
    mask = jnp.clip((ramp + span[:, None] - distance) / ramp, 0, 1)
    return jnp.where(mask > 0, jnp.log(jnp.where(mask > 0, mask, 1)), MASK_VALUE)


def attend_window(
    q: Float[Array, "b h e"],
    past: tuple[Float[Array, "b g span e"], Float[Array, "b g span e"]],
    current: tuple[Float[Array, "b g c e"], Float[Array, "b g c e"]],
    bias: Float[Array, "*lead h span+c"],
    mask: Bool[Array, "b span+c"],
    cap: float,
    drop: DropoutFn | None,
) -> Float[Array, "b h e"]:
    """Attend with one token to the entries before its block and to those in it (`ops.token_scan`).

    Args:
      q: [b h e].
      past, current: keys and values of the entries before the block [b g span e], and of those in
        it [b g c e].
      bias: [b h span+c] or [h span+c], added to the scores.
      mask: [b span+c] bool.
      cap: limit for soft-capping of the scores, see `soft_cap`.
      drop: dropout function of the weights, or None.

    Returns:
      [b h e].
    """
    b, h, e = q.shape
    (k, v), (current_k, current_v) = past, current
    span, groups = k.shape[-2], (b, k.shape[1], h // k.shape[1])
    q = q.reshape(*groups, e)
    scores = jnp.concatenate(
        [history_einsum("bgre,bgse->bgrs", q, k), _einsum_acc32("bgre,bgse->bgrs", q, current_k)],
        -1,
    )
    scores = soft_cap(scores * e**-0.5, cap) + bias.reshape(-1, *groups[1:], bias.shape[-1])
    mask, any_visible = unmask_empty_rows(mask)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, -jnp.inf), axis=-1)
    weights = weights * any_visible[:, None, None, None]
    weights = (weights if drop is None else drop(weights)).astype(v.dtype)
    out = history_einsum("bgrs,bgse->bgre", weights[..., :span], v)
    out = out + _einsum_acc32("bgrs,bgse->bgre", weights[..., span:], current_v)
    return out.astype(v.dtype).reshape(b, h, e)


def _einsum_acc32(equation: str, x: Array, y: Array) -> Array:
    return jnp.einsum(equation, x, y, preferred_element_type=acc_dtype(x))


def attend_history(
    q: Float[Array, "b t h e"],
    k: Float[Array, "b g s e"],
    v: Float[Array, "b g s e"],
    bias: Float[Array, "*lead h t s"],
    mask: Bool[Array, "b t s"],
    cap: float,
    drop: DropoutFn | None,
) -> Float[Array, "b t h e"]:
    """Attend with all tokens of a call to a history of entries.

    Args:
      q: [b t h e].
      k, v: [b g s e].
      bias: [b h t s] or [h t s], added to the scores.
      mask: [b t s] bool.
      drop: dropout function of the weights, or None.

    Returns:
      [b t h e].
    """
    h, g = q.shape[-2], k.shape[1]
    bias = bias.reshape(-1, g, h // g, *bias.shape[-2:])
    mask, any_visible = unmask_empty_rows(mask)
    k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    args = (q, k, v, mask, cap, bias)
    out = attend(*args) if drop is None else attend_with_dropout(*args, drop)
    return jnp.where(any_visible[..., None, None], out, 0)
