"""Block sliding window attention (TransformerFAM 2.1, Equation 1, Algorithm 1) and variants.

    K^_t = Concat(K_{tau-m : tau-1}, K_{tau : t})          V^_t likewise
    a_t  = SelfAttention(q_t, K^_t, V^_t) + i_t

`swa` also masks keys outside a token window; with a window of one block it is the paper's
Transformer-XL (3.1, B.4.5). `bswa_sg` stops gradients at the memory segments. `fam` adds the keys
and values of its memory to those of a block (`famjax.mixers.fam`), and the memory segments of `fm`
hold outputs instead of inputs (`famjax.mixers.fm`).
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig, sizes
from famjax.config.schema import Config, ModelConfig
from famjax.core.lanes import select_rows, select_valid
from famjax.core.types import Array, Context
from famjax.layers.dropout import ATTENTION_WEIGHTS, split_key
from famjax.layers.key_smear import KeySmear, init_for_pretrained, previous_keys
from famjax.layers.mlp import FeedForward
from famjax.layers.qkv import QKV
from famjax.mixers.blocks import (
    BlockInputs,
    Blocks,
    ExtraKV,
    from_block_major,
    join_keys,
    start_documents,
    to_block_major,
)
from famjax.mixers.mixer import FORMATS, BlockWeights, Mixer, MixerSpec, kv_bytes
from famjax.ops.attention import KVFrames, attend_frames
from famjax.parallel import sequence_parallel


class WindowState(NamedTuple):
    """Keys and values of the last blocks, each key rotated by its offset in its own block.

    Keys are stored as they are before smearing (`smear_keys`).

    Attributes:
      k, v: [b m+1 w g e]: the m memory segments, oldest first, then the block being filled by
        `step`. Empty entries are zero.
      blocks: [b] int32, number of filled memory segments, at most m.
      tokens: [b] int32, number of tokens in the block being filled, less than w.
      before: [b g e], the key of the token before the oldest of the m+1 blocks, rotated like `k`; 0
        if there is no such token. None unless keys are smeared.
    """

    k: Array
    v: Array
    blocks: Array
    tokens: Array
    before: Array | None = None

    def keys_before(self) -> Array:
        """Return the key of the token before each of the m+1 blocks: [b m+1 g e]."""
        assert self.before is not None  # called only if keys are smeared
        return jnp.concatenate([self.before[:, None], self.k[:, :-1, -1]], 1)


class WindowAttention(Mixer):
    """Attention of each block to its memory segments and causally to itself.

    Args:
      config: the model's sizes and block_len w; its memory_segments is not read.
      segments: number of memory segments, m.
      window: number of tokens that a query attends to, itself included; None means all tokens of
        the memory segments.
      smeared_keys: whether queries see smeared keys, see `KeySmear`; the state has unsmeared ones.
      stop_gradient: whether to stop gradients into memory segments (3.2, M1_SG).
    """

    def __init__(
        self,
        config: ResolvedModelConfig,
        *,
        rngs: nnx.Rngs,
        segments: int,
        window: int | None = None,
        smeared_keys: bool = False,
        stop_gradient: bool = False,
    ):
        self.qkv = QKV(config, rngs=rngs, local=window is not None)
        self.key_smear = KeySmear(config.kv_heads) if smeared_keys else None
        self.block_len = config.block_len
        self.segments = segments
        self.window = window
        self.stop_gradient = stop_gradient
        # maximum number of earlier blocks that a block depends on
        self.receptive_blocks = (
            segments if window is None else _window_segments(window, self.block_len)
        )
        if smeared_keys:
            # the first visible key is smeared with the last key of the block before it
            self.receptive_blocks += 1
        self.sequential_blocks = config.remat in ("attention", "block")

    def init_state(self, batch: int, prompt: Array | None = None) -> WindowState:
        """Return the empty state. `prompt` is unused; see `famjax.mixers.fam`."""
        shape = (batch, self.segments + 1, self.block_len, self.qkv.kv_heads, self.qkv.head_dim)
        empty = jnp.zeros(shape, self.qkv.dtype)
        zero = jnp.zeros((batch,), jnp.int32)
        before = None if self.key_smear is None else empty[:, 0, 0]
        return WindowState(empty, empty, zero, zero, before)

    def state_axes(self) -> WindowState:
        kv: Any = ("batch", None, None, "kv_heads", None)
        lanes: Any = ("batch",)
        before: Any = None if self.key_smear is None else ("batch", "kv_heads", None)
        return WindowState(kv, kv, lanes, lanes, before)

    def __call__(
        self, x: Array, state: WindowState, ctx: Context, mlp: FeedForward
    ) -> tuple[Array, WindowState]:
        """Process whole blocks: [b n*w d] -> [b n*w d]. All lanes are at the start of a block."""
        inputs = self.project_blocks(x, state, ctx)
        attended = self.attend_blocks(inputs, state, ctx)
        y = self.qkv.output_projection(attended, x, ctx.key)
        return y, self.final_state(inputs.k, inputs.v, state, inputs.blocks)

    def project_blocks(self, x: Array, state: WindowState, ctx: Context) -> BlockInputs:
        """Project all blocks: [b n*w d] -> q [b n w h e], k and v [b n w g e]."""
        b, t, d = x.shape
        w = self.block_len
        q, k, v = self.qkv.project(x.reshape(b, t // w, w, d))
        offsets = jnp.arange(w)
        blocks = Blocks.from_context(ctx, b, t, w)
        rotated_q, rotated_k = self.qkv.rotate(q, offsets), self.qkv.rotate(k, offsets)
        seen_k = self.smear_blocks(rotated_k, state, blocks)
        return BlockInputs(rotated_q, rotated_k, v, seen_k, blocks, q)

    def smear_blocks(self, k: Array, state: WindowState, blocks: Blocks) -> Array:
        """Return the keys of a call's blocks as queries see them: [b n w g e] -> [b n w g e]."""
        if self.key_smear is None:
            return k
        old = state.keys_before()[:, -1:].astype(k.dtype)
        before = sequence_parallel.halo_exchange(old, k[:, :, -1])[:, :, 0]
        if self.stop_gradient:
            before = jax.lax.stop_gradient(before)
        before = jnp.where(blocks.reset[..., None, None], 0, before)
        return self.smear_keys(k, before)

    def smear_state(self, state: WindowState) -> Array:
        """Return the keys of the state's blocks as queries see them: [b m+1 w g e]."""
        return state.k if self.key_smear is None else self.smear_keys(state.k, state.keys_before())

    def smear_keys(self, k: Array, before: Array) -> Array:
        """Smear keys [... w g e] of blocks, each rotated to its own position in its block.

        Args:
          before: [... g e], the last key of the block before each; 0 if there is none.
        """
        assert self.key_smear is not None
        # from the position of each key to the next one, and from the last of a block to the first
        shift = jnp.where(jnp.arange(self.block_len) == 0, 1 - self.block_len, 1)
        return self.key_smear(k, self.qkv.rotate(previous_keys(k, before), shift))

    def unrotate(self, k: Array) -> Array:
        """Remove the rotary positions from keys of whole blocks (`BlockInputs.k`): [... w g e]."""
        return self.qkv.rotate(k, -jnp.arange(self.block_len))

    def segment_kv(
        self, k: Array, v: Array, state: WindowState, blocks: Blocks
    ) -> tuple[Array, Array, Array]:
        """Return the memory segments of each block.

        Args:
          k: keys as queries see them.

        Returns:
          keys and values [b n m*w g e], keys rotated to their positions relative to the block's
          start; the mask [b n w m*w].
        """
        b, n, w, g, e = k.shape
        m = self.segments
        if m == 0:
            empty = jnp.zeros((b, n, 0, g, e), k.dtype)
            return empty, empty, jnp.zeros((b, n, w, 0), bool)
        old_k = self.smear_state(state)[:, :m].astype(k.dtype)
        old_v = state.v[:, :m].astype(v.dtype)
        if self.stop_gradient:
            old_k, old_v, k, v = jax.lax.stop_gradient((old_k, old_v, k, v))
        distance = jnp.arange(m, 0, -1)
        shift = -w * distance[:, None]
        segment_k = self.qkv.rotate(sequence_parallel.halo_exchange(old_k, k), shift)
        segment_v = sequence_parallel.halo_exchange(old_v, v)
        segment_k, segment_v = (a.reshape(b, n, m * w, g, e) for a in (segment_k, segment_v))
        visible = blocks.blocks_since_reset(state.blocks)[..., None] >= distance  # [b n m]
        visible = jnp.repeat(visible, w, axis=-1)[:, :, None]
        return segment_k, segment_v, visible & self.window_mask(-w * distance)

    def window_mask(self, starts: Array) -> Array:
        """Return the causal mask of a block's queries over n blocks of keys: [w n*w] bool.

        Keys outside of the window, if there is one, are masked as well.

        Args:
          starts: [n], where the blocks of keys start, relative to the queries' block.
        """
        w = self.block_len
        offsets = jnp.arange(w)
        keys = (starts[:, None] + offsets).reshape(-1)
        distance = offsets[:, None] - keys
        return distance >= 0 if self.window is None else (distance >= 0) & (distance < self.window)

    def attend_blocks(
        self, inputs: BlockInputs, state: WindowState, ctx: Context, extra: ExtraKV | None = None
    ) -> Array:
        """Attend with each block to its memory segments, `extra`, and causally to itself.

        Returns:
          [b n*w h e].
        """
        b, n, w, h, e = inputs.q.shape
        keys = split_key(ctx.key, ATTENTION_WEIGHTS, n)
        if self.sequential_blocks:
            out = self.attend_sequentially(inputs, state, ctx, extra, keys)
        else:
            out = self.qkv.attend_blocks(*self.attention_inputs(inputs, state, ctx, extra), keys)
        return out.reshape(b, n * w, h, e)

    def attend_sequentially(
        self,
        inputs: BlockInputs,
        state: WindowState,
        ctx: Context,
        extra: ExtraKV | None,
        keys: Array | None,
    ) -> Array:
        """Compute `attend_blocks` with one block's keys and scores at a time: [b n w h e]."""
        # k: the keys as queries see them
        q, k, v, blocks = inputs.q, inputs.seen_k, inputs.v, inputs.blocks
        b, n = k.shape[:2]
        m = self.segments
        offset = None if ctx.offset is None else jnp.broadcast_to(ctx.offset, (n, b))

        def attend(window: tuple[Array, Array], x: Any) -> Array:
            (q, extra_k, extra_v), (blocks_since_reset, extra_visible, offset, key) = x
            extra = None if extra_visible is None else ExtraKV(extra_k, extra_v, extra_visible)
            return self.attend_block(q, *window, blocks_since_reset, offset, key, extra)

        old = (self.smear_state(state)[:, :m].astype(k.dtype), state.v[:, :m].astype(v.dtype))
        extra_k, extra_v, extra_visible = extra or (None, None, None)
        xs, (blocks_since_reset, extra_visible) = to_block_major(
            ((q, extra_k, extra_v), (blocks.blocks_since_reset(state.blocks), extra_visible))
        )
        out = sequence_parallel.blockwise_map(
            attend, old, (k, v), xs, (blocks_since_reset, extra_visible, offset, keys)
        )
        attended: Array = from_block_major(out)
        return attended

    def attend_block(
        self,
        q: Array,
        k: Array,
        v: Array,
        blocks_since_reset: Array,
        offset: Array | None,
        key: Array | None,
        extra: ExtraKV | None = None,
    ) -> Array:
        """Attend with one block to its memory segments, `extra` and causally to itself.

        Args:
          q: [b w h e].
          k, v: [b m+1 w g e], the m memory segments and the block itself, each key rotated by its
            offset in its own block.
          blocks_since_reset: [b], number of the document's blocks before this one.
          offset: [b], added to all positions (B.2.2).
          key: PRNG key of attention dropout.
          extra: further keys and values, of this block alone: [b s ...].

        Returns:
          [b w h e].
        """
        b, w = q.shape[:2]
        m = self.segments
        distance = jnp.arange(m, -1, -1)
        if self.stop_gradient:
            k, v = (jnp.concatenate([jax.lax.stop_gradient(a[:, :m]), a[:, m:]], 1) for a in (k, v))
        k = self.qkv.rotate(k, -w * distance[:, None])
        k, v = (a.reshape(b, (m + 1) * w, *a.shape[3:]) for a in (k, v))
        visible = jnp.repeat(blocks_since_reset[:, None] >= distance, w, axis=-1)[:, None]
        mask = visible & self.window_mask(-w * distance)
        if extra is not None:
            split = m * w
            k, v = (
                join_keys(a[:, :split], more, a[:, split:], axis=1)
                for a, more in ((k, extra.k), (v, extra.v))
            )
            mask = join_keys(mask[..., :split], extra.mask(w), mask[..., split:], axis=-1)
        q, k = (self.qkv.shift(a, offset) for a in (q, k))
        return self.qkv.attend(q, k, v, mask, key)

    def attention_inputs(
        self, inputs: BlockInputs, state: WindowState, ctx: Context, extra: ExtraKV | None = None
    ) -> tuple[Array, Array, Array, Array]:
        """Return queries, keys, values and the mask [b n w s] of every block."""
        # k: the keys as queries see them
        q, k, v, blocks = inputs.q, inputs.seen_k, inputs.v, inputs.blocks
        b, n, w = q.shape[:3]
        segment_k, segment_v, segment_mask = self.segment_kv(k, v, state, blocks)
        causal = self.window_mask(jnp.zeros(1, jnp.int32))
        segment_mask, causal = (
            jnp.broadcast_to(mask, (b, n, w, mask.shape[-1])) for mask in (segment_mask, causal)
        )
        extra_k, extra_v, extra_mask = (
            (None, None, None) if extra is None else (extra.k, extra.v, extra.mask(w))
        )
        return (
            self.qkv.shift(q, ctx.offset),
            self.qkv.shift(join_keys(segment_k, extra_k, k, axis=2), ctx.offset),
            join_keys(segment_v, extra_v, v, axis=2),
            join_keys(segment_mask, extra_mask, causal, axis=-1),
        )

    def attention_map(self, x: Array) -> Array:
        """Return the attention weights of a document in one call: [b n*w d] -> [b h n*w n*w]."""
        ctx, state = Context(), self.init_state(x.shape[0])
        q, keys, _, mask = self.attention_inputs(self.project_blocks(x, state, ctx), state, ctx)
        b, n, w, h, _ = q.shape
        weights = self.qkv.weights(q, keys, mask)  # [b n h w m*w+w]
        # block i attends to blocks i-m to i; the first m are before the document
        rows = [
            jnp.pad(weights[:, i], ((0, 0), (0, 0), (0, 0), (i * w, (n - 1 - i) * w)))
            for i in range(n)
        ]
        return jnp.stack(rows, 2).reshape(b, h, n * w, -1)[..., self.segments * w :]

    def block_weights(
        self, x: Array, state: WindowState, ctx: Context, mlp: FeedForward
    ) -> BlockWeights:
        return self.weights(self.project_blocks(x, state, ctx), state, ctx)

    def weights(
        self, inputs: BlockInputs, state: WindowState, ctx: Context, extra: ExtraKV | None = None
    ) -> BlockWeights:
        """Return the attention weights of the queries of one block."""
        q, keys, _, mask = self.attention_inputs(inputs, state, ctx, extra)
        weights = self.qkv.weights(q, keys, mask)[:, 0]
        cuts = [self.segments * self.block_len, weights.shape[-1] - self.block_len]
        return BlockWeights(*jnp.split(weights, cuts, axis=-1))

    def final_state(self, k: Array, v: Array, state: WindowState, blocks: Blocks) -> WindowState:
        """Return the state after the call."""
        m, w = self.segments, self.block_len
        carried = jnp.where(blocks.fresh, 0, state.blocks)
        filled = jnp.minimum(m, carried + blocks.end - blocks.start).astype(jnp.int32)
        tail = jnp.take_along_axis(jnp.pad(blocks.valid, ((0, 0), (0, 1))), blocks.end[:, None], 1)
        tokens = tail[:, 0]
        occupied = jnp.arange(m)[None] >= m - filled[:, None]  # [b m]
        occupied = jnp.repeat(occupied[:, :, None], w, 2)
        occupied = jnp.concatenate([occupied, (jnp.arange(w) < tokens[:, None])[:, None]], 1)

        def append_latest(new: Array, old: Array) -> Array:
            entries = sequence_parallel.gather_last(
                old[:, :m].astype(new.dtype), new, blocks.end, m + 1
            )
            masked = jnp.where(occupied[..., None, None], entries, 0)
            return select_rows(blocks.all_padding, old, masked.astype(old.dtype))

        return WindowState(
            append_latest(k, state.k),
            append_latest(v, state.v),
            jnp.where(blocks.all_padding, state.blocks, filled),
            jnp.where(blocks.all_padding, state.tokens, tokens),
            self.final_before(k, state, blocks),
        )

    def final_before(self, k: Array, state: WindowState, blocks: Blocks) -> Array | None:
        """Return the state's `before` after the call."""
        if state.before is None:
            return None
        old = state.keys_before().astype(k.dtype)
        (last,) = jnp.moveaxis(sequence_parallel.gather_last(old, k[:, :, -1], blocks.end, 1), 1, 0)
        # keys of old blocks that are not filled are 0
        other_document = blocks.fresh & (blocks.end - self.segments - 1 < blocks.start)
        last = select_rows(other_document, 0, last).astype(state.before.dtype)
        return select_rows(blocks.all_padding, state.before, last)

    # one token: the same results, but the query is rotated for each frame, not its keys

    def step(
        self, x: Array, state: WindowState, ctx: Context, mlp: FeedForward
    ) -> tuple[Array, WindowState]:
        """Process one token per lane, at any position in its block: [b 1 d] -> [b 1 d]."""
        before = state
        state = start_documents(self, state, ctx)
        q, state = self.append_kv(x, state)
        y = self.qkv.output_projection(self.attend_token(q, state)[:, None], x)
        return y, select_valid(ctx, self.advance(state), before)

    def append_kv(self, x: Array, state: WindowState) -> tuple[Array, WindowState]:
        """Write the token's key and value to the current block; return q [b h e] unrotated."""
        q, k, v = self.qkv.project(x)
        k = self.qkv.rotate(k, state.tokens[:, None])
        lanes = jnp.arange(x.shape[0])
        index = (lanes, self.segments, state.tokens)
        return q[:, 0], state._replace(
            k=state.k.at[index].set(k[:, 0].astype(state.k.dtype)),
            v=state.v.at[index].set(v[:, 0].astype(state.v.dtype)),
        )

    def attend_token(self, q: Array, state: WindowState, *more: KVFrames) -> Array:
        """Attend with one token to the window and to further frames of keys: [b h e] -> [b h e]."""
        m, w = self.segments, self.block_len
        # tokens from each frame's start to the current block's
        frame_distance = w * jnp.arange(m, -1, -1)
        position = state.tokens[:, None] + frame_distance  # [b m+1]
        distance = position[..., None] - jnp.arange(w)  # [b m+1 w]
        filled = jnp.arange(m + 1) >= m - state.blocks[:, None]
        mask = (distance >= 0) & filled[..., None]
        if self.window is not None:
            mask &= distance < self.window
        frames = self.qkv.rotate(jnp.repeat(q[:, None], m + 1, 1), position)
        keys = self.smear_state(state)
        return attend_frames((frames, keys, state.v, mask), *more, cap=self.qkv.cap)

    def advance(self, state: WindowState) -> WindowState:
        """Advance by the token just written; a full block becomes the newest memory segment."""
        full = state.tokens + 1 == self.block_len

        def roll(x: Array) -> Array:
            shifted = jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :1])], 1)
            return select_rows(full, shifted, x)

        # true for one token in w: for the others the branch avoids a copy of all segments
        k, v = jax.lax.cond(
            full.any(), lambda kv: jax.tree.map(roll, kv), lambda kv: kv, (state.k, state.v)
        )
        blocks = jnp.minimum(state.blocks + full, self.segments)
        before = state.before
        if before is not None:
            before = select_rows(full, state.k[:, 0, -1], before)
        return WindowState(k, v, blocks, jnp.where(full, 0, state.tokens + 1), before)


class BlockwiseSpec(MixerSpec):
    """Base spec of mixers whose blocks attend to `model.memory_segments` earlier blocks."""

    keys: ClassVar[tuple[str, ...]] = ("model.memory_segments",)

    def keys_seen(self, model: ModelConfig) -> float:
        return (model.memory_segments + 0.5) * model.block_len

    def keys_computed(self, model: ModelConfig) -> float:
        return (model.memory_segments + 1) * model.block_len

    def remote_keys(self, model: ModelConfig, tokens: float) -> float:
        return model.memory_segments * model.block_len

    def state_bytes(self, model: ModelConfig) -> int:
        return kv_bytes(model) * (model.memory_segments + 1) * model.block_len

    def max_attention_weights(self, config: Config) -> int:
        return config.model.block_len**2 * (config.model.memory_segments + 1)

    def describe(self, model: ModelConfig) -> list[str]:
        return [f"blocks of {model.block_len}, memory segments {model.memory_segments}"]


class SmearedSpec(BlockwiseSpec):
    """Base spec of blockwise mixers that support `model.smeared_keys`."""

    switches: ClassVar[tuple[str, ...]] = ("model.smeared_keys",)

    def initial_param(self, model: ResolvedModelConfig, name: str, rngs: nnx.Rngs) -> Array:
        if name == "key_smear.weight":
            return init_for_pretrained(model.kv_heads)
        return super().initial_param(model, name, rngs)

    def count_params(self, model: ModelConfig) -> int:
        return sizes(model).g if model.smeared_keys else 0

    def constants(self, model: ModelConfig) -> dict[str, float]:
        return {"key_smear.across_blocks": 1.0} if model.smeared_keys else {}


class BswaSpec(SmearedSpec):
    title = "block sliding window attention"
    allows_post_norm = True
    has_attention_map = True
    formats = FORMATS
    stop_gradient = False

    def make(self, config: ResolvedModelConfig, rngs: nnx.Rngs) -> Mixer:
        return WindowAttention(
            config,
            rngs=rngs,
            segments=config.memory_segments,
            smeared_keys=config.smeared_keys,
            stop_gradient=self.stop_gradient,
        )


class BswaStopGradientSpec(BswaSpec):
    title = "block sliding window attention without gradients to memory segments"
    stop_gradient = True


class SwaSpec(MixerSpec):
    title = "sliding window attention"
    allows_post_norm = True
    keys = ("model.window",)
    switches = ("model.arch.local_rope_base",)
    is_local = True
    has_attention_map = True
    layer_type = "sliding_attention"
    formats = FORMATS

    def make(self, config: ResolvedModelConfig, rngs: nnx.Rngs) -> Mixer:
        segments = _window_segments(config.window, config.block_len)
        return WindowAttention(config, rngs=rngs, segments=segments, window=config.window)

    def keys_seen(self, model: ModelConfig) -> float:
        return model.window

    def keys_computed(self, model: ModelConfig) -> float:
        return (_window_segments(model.window, model.block_len) + 1) * model.block_len

    def remote_keys(self, model: ModelConfig, tokens: float) -> float:
        return _window_segments(model.window, model.block_len) * model.block_len

    def state_bytes(self, model: ModelConfig) -> int:
        blocks = _window_segments(model.window, model.block_len) + 1
        return kv_bytes(model) * blocks * model.block_len

    def max_attention_weights(self, config: Config) -> int:
        block = config.model.block_len
        return block * (config.model.window + block - 1)

    def window(self, model: ModelConfig) -> int:
        return model.window

    def describe(self, model: ModelConfig) -> list[str]:
        return [f"window {model.window:,}"]


def _window_segments(window: int, block_len: int) -> int:
    """Return the number of earlier blocks that a block's first token attends to."""
    return -(-(window - 1) // block_len)
