"""Block sliding window attention with an associative memory of all earlier blocks.

    out_i = SelfAttention(q_i, K^_i, V^_i) + gain S_{tau-1}^T phi(q_i)

S is the memory of `famjax.layers.delta_memory`. A block reads the memory that the blocks before it
have written, and then writes its own tokens. Keys are written without positions, so that what is
stored means the same at any distance. As in `famjax.mixers.fam`, all blocks are projected in
parallel, a scan over the blocks updates the memory, and then all blocks attend in parallel.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import jax
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig, sizes
from famjax.config.schema import Config, ModelConfig
from famjax.core.lanes import select_rows, select_valid
from famjax.core.remat import tag_small
from famjax.core.types import Array, Context
from famjax.layers import delta_memory
from famjax.layers.delta_memory import DeltaMemory, Writes, write
from famjax.layers.mlp import FeedForward
from famjax.layers.qkv import QKV
from famjax.mixers.blocks import (
    BlockInputs,
    from_block_major,
    memory_resets,
    start_documents,
    to_block_major,
)
from famjax.mixers.mixer import (
    FORMATS,
    BlockWeights,
    MemoryLosses,
    Mixer,
    mean_where,
    norm_share,
)
from famjax.mixers.window import SmearedSpec, WindowAttention, WindowState
from famjax.parallel import sequence_parallel
from famjax.parallel.traced import sequence_shards, target_device


class DeltaState(NamedTuple):
    """The window's state, and the memory.

    Attributes:
      window: memory segments and the block being filled.
      s: [b g k e] float32, S after the document's blocks before the one being filled.
    """

    window: WindowState
    s: Array


def computes_in_scan(blocks: int) -> bool:
    """Return whether features are computed within the scan, rather than for the whole call at once.

    They are several times as large as keys. On a CPU those of one block stay in the cache, and a
    training step takes three quarters of the time (docs/design.md). Accelerators need the blocks in
    parallel; so do shards of a sequence, which scan twice.

    Args:
      blocks: number of blocks of the call.
    """
    return target_device().platform == "cpu" and sequence_shards(blocks) == 1


class DeltaAttention(Mixer):
    """Block sliding window attention with a delta-rule memory."""

    def __init__(self, config: ResolvedModelConfig, *, rngs: nnx.Rngs):
        self.window = WindowAttention(
            config,
            rngs=rngs,
            segments=config.memory_segments,
            smeared_keys=config.smeared_keys,
        )
        self.delta_memory = DeltaMemory(config)
        self.block_len = config.block_len
        self.remat = config.remat != "none"

    @property
    def qkv(self) -> QKV:  # type: ignore[override]  # a property: the window owns it
        return self.window.qkv

    def init_state(self, batch: int, prompt: Array | None = None) -> DeltaState:
        return DeltaState(self.window.init_state(batch), self.delta_memory.init_state(batch))

    def state_axes(self) -> DeltaState:
        s: Any = ("batch", "kv_heads", None, None)
        return DeltaState(self.window.state_axes(), s)

    def memory(self, state: DeltaState) -> Array:
        return state.s

    def replace_memory(self, state: DeltaState, memory: Array) -> DeltaState:
        return state._replace(s=memory)

    def passable_state(self, state: DeltaState) -> DeltaState:
        """Return S without the window."""
        # a separate type is not worthwhile
        return state._replace(window=())  # type: ignore[arg-type]

    def pass_state(self, fresh: DeltaState, saved: DeltaState) -> DeltaState:
        return saved._replace(window=fresh.window)

    def __call__(
        self, x: Array, state: DeltaState, ctx: Context, mlp: FeedForward
    ) -> tuple[Array, DeltaState]:
        """Process whole blocks: [b n*w d] -> [b n*w d]. All lanes are at the start of a block."""
        inputs = self.window.project_blocks(x, state.window, ctx)
        recalled, s = self.scan_memory(inputs, state.s, ctx)
        attended = self.window.attend_blocks(inputs, state.window, ctx)
        y = self.qkv.output_projection(attended + recalled.reshape(attended.shape), x, ctx.key)
        window = self.window.final_state(inputs.k, inputs.v, state.window, inputs.blocks)
        return y, DeltaState(window, s)

    def attention_mass(self, x: Array, state: DeltaState, ctx: Context, mlp: FeedForward) -> Array:
        inputs = self.window.project_blocks(x, state.window, ctx)
        recalled, _ = self.scan_memory(inputs, state.s, ctx)
        attended = self.window.attend_blocks(inputs, state.window, ctx)
        return norm_share(recalled.reshape(attended.shape), attended, ctx.valid)

    def block_weights(
        self, x: Array, state: DeltaState, ctx: Context, mlp: FeedForward
    ) -> BlockWeights:
        """Return the attention weights of the window; reading the memory involves no weights."""
        return self.window.block_weights(x, state.window, ctx, mlp)

    def token_rates(self, x: Array, state: DeltaState, ctx: Context, mlp: FeedForward) -> Array:
        """Return the write rates beta of all tokens: [b n*w d] -> [b n*w g]."""
        inputs = self.window.project_blocks(x, state.window, ctx)
        return self.rates(inputs).reshape(*x.shape[:2], -1)

    def memory_losses(
        self, x: Array, y: Array, state: DeltaState, ctx: Context, mlp: FeedForward
    ) -> MemoryLosses:
        inputs = self.window.project_blocks(x, state.window, ctx)
        is_written = inputs.blocks.valid == self.block_len
        return MemoryLosses(writing=mean_where(self.rates(inputs), is_written))

    def rates(self, inputs: BlockInputs) -> Array:
        """Return the write rates beta of a call's tokens: [b n w g]."""
        return self.delta_memory.rates(*self._memory_kv(inputs.k, inputs.v))

    def _memory_kv(self, k: Array, v: Array) -> tuple[Array, Array]:
        """Return the unrotated keys and the values of the heads that have a memory."""
        # calls, too, start from rotated keys: `step` has no others, and both must write the same
        select_heads = self.delta_memory.key_heads
        return select_heads(self.window.unrotate(k)), select_heads(v)

    def make_writes(self, k: Array, v: Array) -> Writes:
        """Return what whole blocks write, from their keys and values [... w g e]."""
        return self.delta_memory.make_writes(*self._memory_kv(k, v))

    def scan_memory(self, inputs: BlockInputs, s: Array, ctx: Context) -> tuple[Array, Array]:
        """Scan the blocks: each reads S, and then writes its tokens.

        Args:
          s: [b g k e], S before the call.

        Returns:
          what the blocks read [b n w h e]; S after the last block.
        """
        s = s.mT  # as `write` and `recall` take it
        reset = memory_resets(inputs.blocks, ctx, self.block_len)
        full = inputs.blocks.valid == self.block_len
        memory, every_q = self.delta_memory, inputs.unrotated_q
        q = memory.query_heads(every_q)
        writes = self.make_writes(inputs.k, inputs.v)
        in_scan = computes_in_scan(full.shape[1])
        blocks = (writes, q) if in_scan else memory.make_updates(writes)
        xs = to_block_major((blocks, reset, full))
        # saved for the backward pass: S before each block, or without remat before each chunk
        write_block = jax.checkpoint(write) if self.remat else write

        # read_and_write uses no parameters (the gain is applied after the scan): on a mesh of CPUs,
        # their gradients would be all-reduced in every iteration
        @jax.checkpoint
        def read_and_write(s: Array, writes: Writes, q: Array) -> tuple[Array, Array]:
            return write(s, memory.make_updates(writes)), memory.recall(q, s)

        def body(_: tuple[()], s: Array, x: Any) -> tuple[Array, Array]:
            block, reset, full = x
            s = select_rows(reset, 0, s)
            if not in_scan:
                return select_rows(full, write_block(s, block), s), s
            # saved, or else the backward pass of a layer would begin with another scan
            s = tag_small(s)
            new, recalled = read_and_write(s, *block)
            return select_rows(full, new, s), recalled

        s, ys = sequence_parallel.ring_scan(body, (), s, xs)
        ys = from_block_major(ys)
        return memory.scale(ys if in_scan else memory.recall(q, ys), every_q), s.mT

    def step(
        self, x: Array, state: DeltaState, ctx: Context, mlp: FeedForward
    ) -> tuple[Array, DeltaState]:
        """Process one token per lane, at any position in its block: [b 1 d] -> [b 1 d]."""
        before = state
        state = start_documents(self, state, ctx)
        q, window = self.window.append_kv(x, state.window)
        attended = self.window.attend_token(q, window)
        recalled = self.delta_memory.read(q[:, None], state.s)
        y = self.qkv.output_projection(attended[:, None] + recalled, x)
        full = window.tokens + 1 == self.block_len
        # a branch, since only one token in w completes a block
        s = jax.lax.cond(
            full.any(),
            lambda s: select_rows(full, self.commit_block(s, window), s),
            lambda s: s,
            state.s,
        )
        return y, select_valid(ctx, DeltaState(self.window.advance(window), s), before)

    def commit_block(self, s: Array, window: WindowState) -> Array:
        """Write the block that was just filled into S."""
        writes = self.make_writes(window.k[:, -1], window.v[:, -1])
        return write(s.mT, self.delta_memory.make_updates(writes)).mT


class DeltaSpec(SmearedSpec):
    title = "block sliding window attention with a delta-rule memory"
    allows_post_norm = True
    keys = ("model.memory_segments", "model.delta_order", "model.delta_heads")
    switches = ("model.smeared_keys", "train.rsp", "train.write_loss")
    passes_memory = True
    formats = FORMATS

    def make(self, config: ResolvedModelConfig, rngs: nnx.Rngs) -> Mixer:
        return DeltaAttention(config, rngs=rngs)

    def initial_param(self, model: ResolvedModelConfig, name: str, rngs: nnx.Rngs) -> Array:
        if not name.startswith("delta_memory."):
            return super().initial_param(model, name, rngs)
        # from `DeltaMemory` alone: `make` would also create the projections of a large model
        return attrgetter(name.removeprefix("delta_memory."))(DeltaMemory(model))[...]

    def has_write_gates(self, model: ModelConfig) -> bool:
        return True

    def count_params(self, model: ModelConfig) -> int:
        return delta_memory.count_params(model) + super().count_params(model)

    def constants(self, model: ModelConfig) -> dict[str, float]:
        return {**delta_memory.CONSTANTS, **super().constants(model)}

    def check(self, config: Config) -> Iterator[str]:
        yield from super().check(config)
        order, heads = config.model.delta_order, config.model.delta_heads
        s = sizes(config.model)
        if heads > s.g:
            yield f"model.delta_heads={heads}: there are only {s.g} key heads; give at most {s.g}"
        # larger offsets only give products that are 0 or repeat others: y_i and y_{i+e} are the
        # positive parts of x_i and -x_i
        if not 1 <= order < s.e:
            yield (
                f"model.delta_order={order}: must be from 1 to {s.e - 1}, since a key's features "
                f"are products of two of its {s.e} elements that are at most delta_order apart"
            )

    def flops(self, model: ModelConfig, computed: bool = False) -> float:
        return super().flops(model, computed) + delta_memory.flops(model)

    def state_bytes(self, model: ModelConfig) -> int:
        return super().state_bytes(model) + delta_memory.state_bytes(model)

    def describe(self, model: ModelConfig) -> list[str]:
        s = sizes(model)
        heads_written = model.delta_heads or s.g
        heads = "a head" if heads_written == s.g else f"in {heads_written} of {s.g} key heads"
        memory = f"a memory of {2 * model.delta_order * s.e} x {s.e} {heads}"
        return [*super().describe(model), memory]
