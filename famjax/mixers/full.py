"""Full causal attention with a cache of fixed capacity: the baseline that does not stream."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.core import sharding
from famjax.core.config import ModelConfig
from famjax.core.errors import UserError
from famjax.core.types import Array, Context
from famjax.layers.mlp import FeedForward
from famjax.layers.qkv import QKV
from famjax.mixers.window import select_rows
from famjax.ops.positions import in_document


class CacheState(NamedTuple):
    """k, v: [b g capacity e], rotated by the position in the document; length: [b] int32.

    A head's keys lie together, as products with one query a lane read them: behind each other by
    token, XLA on CPU turned the whole cache at every token, ten times the time of the product.
    """

    k: Array
    v: Array
    length: Array


class Full(nnx.Module):
    """Causal attention over everything since the document's start, up to the capacity.

    Beyond the capacity: a `UserError`, or NaN under jit, never a wrong number.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.qkv = QKV(config, rngs=rngs)
        self.block_len = 1
        self.capacity = config.capacity
        self.receptive_field = None  # it can depend on everything

    def init_state(self, batch: int, prompt: Array | None = None) -> CacheState:
        shape = (batch, self.qkv.kv_heads, self.capacity, self.qkv.head_dim)
        empty = jnp.zeros(shape, self.qkv.dtype)
        return CacheState(empty, empty, jnp.zeros((batch,), jnp.int32))

    def state_axes(self) -> CacheState:
        kv: Any = ("batch", "kv_heads", None, None)
        lanes: Any = ("batch",)
        return CacheState(kv, kv, lanes)

    def encode_memory_prompt(self, prompt: Array, offset: Array | None = None) -> Array:
        return self.qkv.encode_memory_prompt(prompt, offset)

    def __call__(
        self, x: Array, state: CacheState, ctx: Context, mlp: FeedForward
    ) -> tuple[Array, CacheState]:
        """Read any number of tokens: [b t d] -> [b t d]."""
        valid = jnp.ones(x.shape[:2], bool) if ctx.valid is None else ctx.valid
        start, position, length = in_document(state.length, ctx, x.shape[1])
        self.check_capacity(jnp.where(valid, position, 0))

        q, k, v = self.qkv.project(x)
        k = self.qkv.rotate(k, position, far=True)
        # the layer below gave NaN beyond the capacity; 0 * NaN would carry it to tokens that fit
        v = jnp.where((position < self.capacity)[..., None, None], v, 0)
        mask = self.mask(state, start, valid)
        # of tokens that are divided every query sees all, and the cache takes them
        k, v = sharding.all_gather_tokens(k), sharding.all_gather_tokens(v)
        keys = jnp.concatenate([_by_token(state.k).astype(k.dtype), k], 1)
        values = jnp.concatenate([_by_token(state.v).astype(v.dtype), v], 1)
        q = self.qkv.rotate(q, position, far=True)
        y = self.attend(q, keys, values, mask, x, ctx)
        y = jnp.where((valid & (position >= self.capacity))[..., None], jnp.nan, y)
        return y, self.final_state(k, v, state, start[:, -1], valid, length)

    def step(
        self, x: Array, state: CacheState, ctx: Context, mlp: FeedForward
    ) -> tuple[Array, CacheState]:
        """Read one token a lane: [b 1 d] -> [b 1 d]. It is written first, then the cache is read.

        Of the cache one slot a lane is written, in place where the state is donated.
        """
        valid = jnp.ones(x.shape[:2], bool) if ctx.valid is None else ctx.valid
        reset = None if ctx.reset is None else ctx.reset & valid
        _, position, length = in_document(state.length, ctx._replace(reset=reset), 1)
        self.check_capacity(jnp.where(valid, position, 0))

        q, k, v = self.qkv.project(x)
        q, k = (self.qkv.rotate(a, position, far=True) for a in (q, k))
        # padding is written nowhere, as what does not fit
        slot = jnp.where(valid, position, self.capacity)[:, 0]
        old = state if reset is None else _clear_rows(state, reset[:, 0])
        new = CacheState(_write_slot(old.k, k, slot), _write_slot(old.v, v, slot), length)
        # padding that finds the cache empty sees zeros, so that no row of the softmax is empty
        mask = jnp.arange(self.capacity) < jnp.maximum(length, 1)[:, None, None]
        keys, values = (_by_token(a).astype(q.dtype) for a in (new.k, new.v))
        y = self.attend(q, keys, values, mask, x, ctx)
        return jnp.where((valid & (position >= self.capacity))[..., None], jnp.nan, y), new

    def attend(
        self, q: Array, keys: Array, values: Array, mask: Array, x: Array, ctx: Context
    ) -> Array:
        """[b t h e], [b s g e], [b s g e] and [b t s] -> [b t d]."""
        q, keys = self.qkv.shift(q, ctx.offset), self.qkv.shift(keys, ctx.offset)
        return self.qkv.output_projection(
            self.qkv.attend(q, keys, values, mask, ctx.key), x, ctx.key
        )

    def attention_map(self, x: Array) -> Array:
        """Return the attention of a document read in one call: [b t d] -> [b h t t]."""
        position = jnp.arange(x.shape[1])
        q, k, _ = self.qkv.project(x)
        q, k = self.qkv.rotate(q, position), self.qkv.rotate(k, position)
        return self.qkv.weights(q, k, position[:, None] >= position)

    def check_capacity(self, position: Array) -> None:
        if not isinstance(position, jax.core.Tracer) and position.max() >= self.capacity:
            raise UserError(
                f"full attention: token {int(position.max()) + 1} of a document does not fit its "
                f"cache of {self.capacity}; raise model.capacity or use a windowed mixer"
            )

    def mask(self, state: CacheState, start: Array, valid: Array) -> Array:
        """Return [b t capacity+t]: cached keys unless a reset came between, own ones causally."""
        t = start.shape[1]
        cached = jnp.arange(self.capacity) < state.length[:, None]
        cached = cached[:, None] & (start < 0)[..., None]
        index = jnp.arange(t)
        same = (start[:, :, None] == start[:, None, :]) & (index[:, None] >= index)
        # padding sees itself, so that no row of the softmax is empty
        same &= valid[:, None] | jnp.eye(t, dtype=bool)
        return jnp.concatenate([cached, same], -1)

    def final_state(
        self, k: Array, v: Array, state: CacheState, start: Array, valid: Array, length: Array
    ) -> CacheState:
        """Append the new keys, or begin the cache anew behind the last reset."""
        begin = jnp.maximum(start, 0)
        base = jnp.where(start < 0, state.length, 0)
        slot = jnp.arange(self.capacity)
        source = jnp.clip(slot - base[:, None] + begin[:, None], 0, k.shape[1] - 1)
        is_old = slot < base[:, None]
        is_new = ~is_old & (slot < length[:, None])

        def merge_rows(old: Array, new: Array) -> Array:
            all_gather_tokens = jnp.take_along_axis(new, source[..., None, None], 1).astype(
                old.dtype
            )
            kept = jnp.where(is_old[:, None, :, None], old, 0)
            return jnp.where(is_new[:, None, :, None], _by_token(all_gather_tokens), kept)

        all_padding = ~valid.any(-1)
        return CacheState(
            select_rows(all_padding, state.k, merge_rows(state.k, k)),
            select_rows(all_padding, state.v, merge_rows(state.v, v)),
            length,
        )


def _by_token(a: Array) -> Array:
    """[b g s e] -> [b s g e], and back."""
    return a.swapaxes(1, 2)


def _clear_rows(state: CacheState, reset: Array) -> CacheState:
    """Return the state with the caches empty of lanes [b] that begin a document."""
    return state._replace(
        **{
            name: jnp.where(reset[:, None, None, None], 0, getattr(state, name))
            for name in ("k", "v")
        }
    )


def _write_slot(cache: Array, new: Array, slot: Array) -> Array:
    """Write [b 1 g e] into [b g capacity e] at each lane's slot [b]; nothing beyond the end."""

    def lane(cache: Array, new: Array, slot: Array) -> Array:
        return cache.at[:, slot].set(new[0].astype(cache.dtype), mode="drop")

    return jax.vmap(lane)(cache, new, slot)
