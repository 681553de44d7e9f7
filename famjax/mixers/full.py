"""Full causal attention with a KV cache of fixed capacity: the baseline that does not stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.derived import reads_whole_rows
from famjax.config.resolved import ResolvedModelConfig
from famjax.config.schema import Config, ModelConfig
from famjax.core.errors import UserError
from famjax.core.lanes import select_rows
from famjax.core.types import Array, Context, PyTree
from famjax.layers.mlp import FeedForward
from famjax.layers.qkv import QKV
from famjax.mixers.mixer import FORMATS, Mixer, MixerSpec, kv_bytes
from famjax.ops.positions import document_positions
from famjax.parallel import traced


class CacheState(NamedTuple):
    """A KV cache.

    It is head-major, the layout of products with one query per lane: XLA on CPU transposed a
    token-major cache as a whole at every token, which took ten times as long as the product.

    The cache that a call starts from may have fewer entries, see `shorten_caches`.

    Attributes:
      k, v: [b g capacity e], keys and values; keys are rotated to their positions in the document.
      length: [b] int32, number of the document's tokens in the cache.
    """

    k: Array
    v: Array
    length: Array


def truncate_cache(state: CacheState, length: Array) -> CacheState:
    """Return a cache with only its first `length` [b] tokens.

    The cache is that of one layer, or of stacked layers, [repeats b ...].
    """
    length = jnp.broadcast_to(length, state.length.shape)
    kept = jnp.arange(state.k.shape[-2]) < length[..., None]

    def truncate(a: Array) -> Array:
        return jnp.where(kept[..., None, :, None], a, 0)

    return CacheState(truncate(state.k), truncate(state.v), length)


def shorten_caches(state: PyTree, entries: int) -> PyTree:
    """Return a state whose caches have only their first `entries`.

    Attention otherwise computes the scores of all `capacity` entries, although those that are empty
    are masked. `entries` may be 0 for calls that drop the final state, and must not be exceeded by
    the documents of later `step`s.
    """

    def shorten(leaf: Any) -> Any:
        if not isinstance(leaf, CacheState):
            return leaf
        return leaf._replace(k=leaf.k[..., :entries, :], v=leaf.v[..., :entries, :])

    return jax.tree.map(shorten, state, is_leaf=_is_cache)


def lengthen_caches(state: PyTree, whole: PyTree) -> PyTree:
    """Undo `shorten_caches`: the entries that it cut off are those of `whole`."""

    def lengthen(leaf: Any, whole: Any) -> Any:
        if not isinstance(leaf, CacheState):
            return leaf
        entries = leaf.k.shape[-2]
        k, v = (
            old.at[..., :entries, :].set(new) for old, new in ((whole.k, leaf.k), (whole.v, leaf.v))
        )
        return CacheState(k, v, leaf.length)

    return jax.tree.map(lengthen, state, whole, is_leaf=_is_cache)


def _is_cache(leaf: Any) -> bool:
    return isinstance(leaf, CacheState)


class FullAttention(Mixer):
    """Causal attention over the document, up to the capacity.

    Tokens beyond the capacity raise a `UserError`; under jit their outputs are NaN.
    """

    def __init__(self, config: ResolvedModelConfig, *, rngs: nnx.Rngs):
        self.qkv = QKV(config, rngs=rngs)
        self.block_len = 1
        self.capacity = config.capacity

    def init_state(self, batch: int, prompt: Array | None = None) -> CacheState:
        shape = (batch, self.qkv.kv_heads, self.capacity, self.qkv.head_dim)
        empty = jnp.zeros(shape, self.qkv.dtype)
        return CacheState(empty, empty, jnp.zeros((batch,), jnp.int32))

    def state_axes(self) -> CacheState:
        kv: Any = ("batch", "kv_heads", None, None)
        lanes: Any = ("batch",)
        return CacheState(kv, kv, lanes)

    def check_capacity(self, state: CacheState, tokens: int) -> None:
        self._check_position(state.length + tokens - 1)

    def __call__(
        self, x: Array, state: CacheState, ctx: Context, mlp: FeedForward
    ) -> tuple[Array, CacheState]:
        """Process any number of tokens: [b t d] -> [b t d]."""
        valid = jnp.ones(x.shape[:2], bool) if ctx.valid is None else ctx.valid
        start, position, length = document_positions(state.length, ctx, x.shape[1])
        self._check_position(jnp.where(valid, position, 0))

        q, k, v = self.qkv.project(x)
        k = self.qkv.rotate(k, position, long_range=True)
        # the layer below outputs NaN beyond the capacity; 0 * NaN would spread to tokens that fit
        v = jnp.where((position < self.capacity)[..., None, None], v, 0)
        attention_mask = self.attention_mask(state, start, valid, ctx.mutual)
        # if tokens are sharded: every query needs all keys, and so does the cache
        k, v = traced.all_gather_tokens(k), traced.all_gather_tokens(v)
        keys = jnp.concatenate([_swap_heads_tokens(state.k).astype(k.dtype), k], 1)
        values = jnp.concatenate([_swap_heads_tokens(state.v).astype(v.dtype), v], 1)
        q = self.qkv.rotate(q, position, long_range=True)
        y = self.attend(q, keys, values, attention_mask, x, ctx)
        y = jnp.where((valid & (position >= self.capacity))[..., None], jnp.nan, y)
        return y, self.final_state(k, v, state, start[:, -1], valid, length)

    def step(
        self, x: Array, state: CacheState, ctx: Context, mlp: FeedForward
    ) -> tuple[Array, CacheState]:
        """Process one token per lane, which is first written to the cache: [b 1 d] -> [b 1 d].

        Only one cache entry per lane is written, in place if the state is donated.
        """
        valid = jnp.ones(x.shape[:2], bool) if ctx.valid is None else ctx.valid
        reset = None if ctx.reset is None else ctx.reset & valid
        _, position, length = document_positions(state.length, ctx._replace(reset=reset), 1)
        self._check_position(jnp.where(valid, position, 0))

        q, k, v = self.qkv.project(x)
        q, k = (self.qkv.rotate(a, position, long_range=True) for a in (q, k))
        entries = state.k.shape[-2]
        # padding is written out of bounds, where it is dropped, as are tokens that do not fit
        index = jnp.where(valid, position, entries)[:, 0]
        old_k, old_v = state.k, state.v
        if reset is not None:
            old_k, old_v = (select_rows(reset[:, 0], 0, a) for a in (old_k, old_v))
        new = CacheState(_write_entry(old_k, k, index), _write_entry(old_v, v, index), length)
        # padding with an empty cache attends to zeros, so that no row of the softmax is empty
        attention_mask = jnp.arange(entries) < jnp.maximum(length, 1)[:, None, None]
        keys, values = (_swap_heads_tokens(a).astype(q.dtype) for a in (new.k, new.v))
        y = self.attend(q, keys, values, attention_mask, x, ctx)
        return jnp.where((valid & (position >= entries))[..., None], jnp.nan, y), new

    def attend(
        self, q: Array, keys: Array, values: Array, attention_mask: Array, x: Array, ctx: Context
    ) -> Array:
        """Attend, project, and add x: [b t h e], [b s g e], [b s g e], [b t s] -> [b t d]."""
        q, keys = self.qkv.shift(q, ctx.offset), self.qkv.shift(keys, ctx.offset)
        return self.qkv.output_projection(
            self.qkv.attend(q, keys, values, attention_mask, ctx.key), x, ctx.key
        )

    def attention_map(self, x: Array) -> Array:
        """Return the attention weights of a document in one call: [b t d] -> [b h t t]."""
        position = jnp.arange(x.shape[1])
        q, k, _ = self.qkv.project(x)
        q, k = self.qkv.rotate(q, position), self.qkv.rotate(k, position)
        return self.qkv.weights(q, k, position[:, None] >= position)

    def _check_position(self, position: Array) -> None:
        if not isinstance(position, jax.core.Tracer) and position.max() >= self.capacity:
            raise UserError(
                f"full attention: token {int(position.max()) + 1} of a document does not fit its "
                f"cache of {self.capacity}; raise model.capacity or use a windowed mixer"
            )

    def attention_mask(
        self, state: CacheState, start: Array, valid: Array, mutual: Array | None
    ) -> Array:
        """Return the mask [b t s+t] over s cached keys and the t keys of the call.

        Cached keys are visible up to the call's first reset. Keys of the call are visible causally
        within their document, or in both directions where `Context.mutual` says so.

        Args:
          mutual: `Context.mutual`.
        """
        t = start.shape[1]
        cached = jnp.arange(state.k.shape[-2]) < state.length[:, None]
        cached = cached[:, None] & (start < 0)[..., None]
        index = jnp.arange(t)
        visible = index[:, None] >= index
        if mutual is not None:
            visible = visible | (mutual[:, :, None] & mutual[:, None, :])
        same = (start[:, :, None] == start[:, None, :]) & visible
        # padding attends to itself, so that no row of the softmax is empty
        same &= valid[:, None] | jnp.eye(t, dtype=bool)
        return jnp.concatenate([cached, same], -1)

    def final_state(
        self, k: Array, v: Array, state: CacheState, start: Array, valid: Array, length: Array
    ) -> CacheState:
        """Append the new keys; after a reset, clear the cache first."""
        first = jnp.maximum(start, 0)
        base = jnp.where(start < 0, state.length, 0)
        index = jnp.arange(state.k.shape[-2])
        source = jnp.clip(index - base[:, None] + first[:, None], 0, k.shape[1] - 1)
        from_cache = index < base[:, None]
        from_call = ~from_cache & (index < length[:, None])

        def merge_rows(old: Array, new: Array) -> Array:
            gathered = jnp.take_along_axis(new, source[..., None, None], 1).astype(old.dtype)
            cached = jnp.where(from_cache[:, None, :, None], old, 0)
            return jnp.where(from_call[:, None, :, None], _swap_heads_tokens(gathered), cached)

        all_padding = ~valid.any(-1)
        return CacheState(
            select_rows(all_padding, state.k, merge_rows(state.k, k)),
            select_rows(all_padding, state.v, merge_rows(state.v, v)),
            length,
        )


class FullSpec(MixerSpec):
    title = "full attention"
    allows_post_norm = True
    keys = ("model.capacity",)
    is_blockwise = False
    is_bounded = True
    has_attention_map = True
    layer_type = "full_attention"
    formats = FORMATS

    def make(self, config: ResolvedModelConfig, rngs: nnx.Rngs) -> FullAttention:
        return FullAttention(config, rngs=rngs)

    def check(self, config: Config) -> Iterator[str]:
        length, capacity = config.data.length, config.model.capacity
        if length > capacity:
            yield (
                f"data.length={length} is longer than model.capacity={capacity}, the KV cache of "
                f"full attention; set model.capacity={length}"
            )

    def keys_seen(self, model: ModelConfig) -> float:
        return model.capacity / 2  # a document as long as the cache; a shorter one costs less

    def keys_computed(self, model: ModelConfig) -> float:
        return model.capacity

    def remote_keys(self, model: ModelConfig, tokens: float) -> float:
        return tokens

    def state_bytes(self, model: ModelConfig) -> int:
        return kv_bytes(model) * model.capacity

    def max_attention_weights(self, config: Config) -> int:
        length, capacity = config.data.length, config.model.capacity
        keys = length if reads_whole_rows(config) else capacity
        return length // config.train.bptt_segments * keys


def _swap_heads_tokens(a: Array) -> Array:
    """[b g s e] -> [b s g e], and the inverse."""
    return a.swapaxes(1, 2)


def _write_entry(cache: Array, new: Array, index: Array) -> Array:
    """Write [b 1 g e] into [b g capacity e] at `index` [b]; drop it beyond the end."""

    def lane(cache: Array, new: Array, index: Array) -> Array:
        return cache.at[:, index].set(new[0].astype(cache.dtype), mode="drop")

    return jax.vmap(lane)(cache, new, index)
