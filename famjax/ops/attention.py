"""Softmax attention on plain arrays: multi-head, grouped-query and multi-query."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from famjax.core.remat import tag_product
from famjax.core.types import Array, DropoutFn, acc_dtype
from famjax.ops import attention_kernel as kernel
from famjax.ops.kernels import kernel_platform
from famjax.parallel.traced import runs_on_one_cpu

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
    x = jnp.einsum("...tgre,...sge->...grts", q, k, preferred_element_type=acc_dtype(q))
    return x * e**-0.5


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

    On GPUs it is a kernel where that supports the call, and its residuals are the output and the
    logarithm of each query's sum, see `famjax.ops.attention_kernel`.
    """
    return _attend_forward(q, k, v, mask, cap, bias)[0]


# of XLA's form: q, k, v, the weights, the output, and the bias without elements
Residuals = tuple[Array, Array, Array, Array, Array, Array | None]


class KernelResiduals(NamedTuple):
    """What the kernel's backward pass gets, with one leading axis: [b t h e] and so on."""

    q: Array
    k: Array
    v: Array
    mask: Array
    out: Array
    log_sum: Array


def _attend_forward(
    q: Array, k: Array, v: Array, mask: Array | None, cap: float, bias: Array | None
) -> tuple[Array, Residuals | KernelResiduals]:
    if not cap and bias is None and (args := _kernel_arguments(q, k, v, mask)) is not None:
        # programs traced for a GPU may run on another device, too
        results = jax.lax.platform_dependent(*args, cuda=kernel.forward, default=_xla_forward)
        out, log_sum = map(tag_product, results)
        return out.reshape(q.shape), KernelResiduals(*args, out, log_sum)
    weights = tag_product(attention_weights(q, k, mask, cap, bias).astype(v.dtype))
    out = jnp.einsum("...grts,...sge->...tgre", weights, v)
    out = tag_product(out.reshape(q.shape))
    # a residual with the bias's shape but no elements
    return out, (q, k, v, weights, out, None if bias is None else bias[..., :0])


def _kernel_arguments(
    q: Array, k: Array, v: Array, mask: Array | None
) -> tuple[Array, Array, Array, Array] | None:
    """Return the kernel's arguments, with one leading axis; None if XLA's form is to be used."""
    t, s, lead = q.shape[-3], k.shape[-3], q.shape[:-3]
    if not lead or k.shape[:-3] != lead or kernel_platform() != "gpu":
        return None
    q, k, v = (a.reshape(-1, *a.shape[-3:]) for a in (q, k, v))
    if not kernel.supports(q, k, v):
        return None
    mask = jnp.ones((1, t, s), bool) if mask is None else mask
    if math.prod(mask.shape[:-2]) > 1:
        mask = jnp.broadcast_to(mask, (*lead, t, s))
    return q, k, v, jnp.broadcast_to(mask, (*mask.shape[:-2], t, s)).reshape(-1, t, s)


def _attend_backward(
    cap: float, residuals: Residuals | KernelResiduals, d_out: Array
) -> tuple[Array, Array, Array, None, Array | None]:
    if isinstance(residuals, KernelResiduals):
        args = (*residuals, d_out.reshape(residuals.q.shape))
        grads = jax.lax.platform_dependent(*args, cuda=kernel.backward, default=_xla_backward)
        lead = d_out.shape[:-3]
        d_q, d_k, d_v = (a.reshape(*lead, *a.shape[1:]) for a in grads)
        return d_q, d_k, d_v, None, None
    d_q, d_k, d_v, d_bias = _gradients(cap, *residuals, d_out)
    return d_q, d_k, d_v, None, d_bias


def _xla_forward(q: Array, k: Array, v: Array, mask: Array) -> tuple[Array, ...]:
    """Return what `kernel.forward` does, by XLA."""
    x = jnp.where(mask[:, None, None], _scores(q, k), -jnp.inf)
    log_sum = jax.nn.logsumexp(x, axis=-1)
    weights = jnp.exp(x - log_sum[..., None]).astype(v.dtype)
    out = jnp.einsum("...grts,...sge->...tgre", weights, v)
    return out.reshape(q.shape), log_sum.reshape(len(q), -1, q.shape[1])


def _xla_backward(
    q: Array, k: Array, v: Array, mask: Array, out: Array, log_sum: Array, d_out: Array
) -> tuple[Array, ...]:
    """Return what `kernel.backward` does, by XLA."""
    x = jnp.where(mask[:, None, None], _scores(q, k), -jnp.inf)
    weights = jnp.exp(x - log_sum.reshape(x.shape[:-1])[..., None]).astype(v.dtype)
    return _gradients(0.0, q, k, v, weights, out, None, d_out)[:3]


def _gradients(
    cap: float,
    q: Array,
    k: Array,
    v: Array,
    weights: Array,
    out: Array,
    empty_bias: Array | None,
    d_out: Array,
) -> tuple[Array, Array, Array, Array | None]:
    """Return the gradients of q, k, v and the bias.

    Args:
      empty_bias: the bias without elements, for its shape and dtype; None without a bias.
    """
    e, groups = q.shape[-1], weights.shape[-4:-2]

    def group_heads(x: Array) -> Array:
        return x.reshape(*x.shape[:-2], *groups, e)

    # D in FlashAttention-2, Algorithm 2: [... t g r]
    delta = (group_heads(d_out).astype(acc_dtype(q)) * group_heads(out)).sum(-1)
    delta = jnp.moveaxis(delta, -3, -1)[..., None]
    d_weights = jnp.einsum(
        "...tgre,...sge->...grts", group_heads(d_out), v, preferred_element_type=acc_dtype(q)
    )
    d_scores = weights * (d_weights - delta)
    d_bias = None if empty_bias is None else _sum_to_shape(d_scores, empty_bias)
    d_scores = d_scores * e**-0.5
    if cap:
        # recomputes the scores instead of saving them: few families cap their scores
        d_scores = d_scores * (1 - jnp.square(jnp.tanh(_scores(q, k) / cap)))
    d_scores = d_scores.astype(q.dtype)
    return (
        jnp.einsum("...grts,...sge->...tgre", d_scores, k).reshape(q.shape),
        jnp.einsum("...grts,...tgre->...sge", d_scores, group_heads(q)),
        jnp.einsum("...grts,...tgre->...sge", weights, group_heads(d_out)),
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
) -> tuple[Array, Residuals | KernelResiduals]:
    return _attend_forward(q, k, v, mask, cap, None)


def _attend_blocks_backward(
    cap: float, residuals: Residuals | KernelResiduals, d_out: Array
) -> tuple[Array, Array, Array, None]:
    d_q, d_k, d_v, _, _ = _attend_backward(cap, residuals, d_out)
    return d_q, d_k, d_v, None


attend_blocks.defvjp(_attend_blocks_forward, _attend_blocks_backward)


def attend_with_dropout(
    q: Float[Array, "*#lead t h e"],
    k: Float[Array, "*#lead s g e"],
    v: Float[Array, "*#lead s g e"],
    mask: Bool[Array, "*#lead #t #s"] | None,
    cap: float,
    bias: Float[Array, "*#lead #g #r #t s"] | None,
    drop: DropoutFn,
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
        q = q.reshape(b, n, g, h // g, e)
        score = jnp.einsum("bngre,bnsge->bgrns", q, k, preferred_element_type=acc_dtype(q))
        score = jnp.where(mask[:, None, None], soft_cap(score * e**-0.5, cap), -jnp.inf)
        scores.append(score.reshape(b, g, h // g, n * s))
        values.append(v.reshape(b, n * s, g, e))
    weights = jax.nn.softmax(jnp.concatenate(scores, -1), axis=-1).astype(v.dtype)
    out = jnp.einsum("bgrs,bsge->bgre", weights, jnp.concatenate(values, 1))
    return out.reshape(b, h, e)
