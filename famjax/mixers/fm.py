"""Feedback memory segments (TransformerFAM C.2, Figure 9), an alternative to FAM.

The paper rejects it in favor of FAM.

Block sliding window attention whose memory segments hold the layer's *outputs* O of the last m
blocks, not its inputs I:

    K^_t = Concat(K(O_{tau-m : tau-1}), K(I_{tau : t}))          V^_t likewise
    a_t  = SelfAttention(q_t, K^_t, V^_t) + i_t
    o_t  = FF(PreLN(a_t)) + a_t

So, within one layer, every block depends on all blocks before it, and the layer must process its
blocks sequentially: each iteration of the scan processes the w tokens of a block, where FAM's
processes only f memory tokens.

C.2 has no equations. These are the choices made here where it leaves something open:

- Which output. "The Transformer outputs of the previous block" are those of the same layer, after
  the feed-forward. FAM is fed back within its layer, too (Figure 2b, to which C.2 refers), and the
  output of attention is not in the representation of the layer's inputs, which the feed-forward
  restores (C.1). Using outputs of higher layers would be Staircase Attention, of which the paper
  calls FM "a specific variant".
- Projections. The layer's own PreLN and QKV, as for FAM: the paper adds no weights.
- Positions. Those of the tokens, as in `bswa`, since a segment's outputs stand for its tokens.
- The current block. Its tokens attend to keys and values of the block's inputs, as in `bswa`. With
  the block's outputs, every token would have to wait for the one before it.
- Gradients flow into the memory segments, as in BSWA (3.2 advises against stopping them).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig, sizes
from famjax.config.schema import Config, ModelConfig
from famjax.core.lanes import select_rows, select_valid
from famjax.core.types import Array, Context
from famjax.layers.dropout import FEEDBACK, split_key
from famjax.layers.mlp import FeedForward
from famjax.layers.qkv import QKV
from famjax.mixers.blocks import Blocks, from_block_major, start_documents, to_block_major
from famjax.mixers.mixer import BlockWeights, Mixer, kv_bytes
from famjax.mixers.window import BlockwiseSpec, WindowAttention, WindowState
from famjax.parallel import sequence_parallel


class FmState(NamedTuple):
    """Keys and values of past blocks' outputs, and of the inputs of the block being filled.

    Attributes:
      outputs: keys and values of the layer's outputs, for the m memory segments and for the block
        being filled, to whose outputs the next block attends.
      k, v: [b w g e], keys and values of the inputs of the block being filled, which its own
        tokens attend to; each key rotated by its offset in the block. Empty entries are zero.
    """

    outputs: WindowState
    k: Array
    v: Array


class FeedbackSegments(Mixer):
    """Block sliding window attention to the layer's own outputs of the past blocks.

    It applies the feed-forward itself and returns the layer's outputs, of which its memory is made.
    """

    def __init__(self, config: ResolvedModelConfig, *, rngs: nnx.Rngs):
        self.window = WindowAttention(config, rngs=rngs, segments=config.memory_segments)
        self.block_len = config.block_len
        self.recompute_blocks = self.window.sequential_blocks

    @property
    def qkv(self) -> QKV:  # type: ignore[override]  # a property: the window owns it
        return self.window.qkv

    def init_state(self, batch: int, prompt: Array | None = None) -> FmState:
        """Return the empty state. `prompt` is unused; see `famjax.mixers.fam`."""
        outputs = self.window.init_state(batch)
        return FmState(outputs, outputs.k[:, -1], outputs.v[:, -1])

    def state_axes(self) -> FmState:
        kv: Any = ("batch", None, "kv_heads", None)
        return FmState(self.window.state_axes(), kv, kv)

    def __call__(
        self, x: Array, state: FmState, ctx: Context, mlp: FeedForward
    ) -> tuple[Array, FmState]:
        """Process whole blocks: [b n*w d] -> [b n*w d]. All lanes are at the start of a block."""
        inputs = self.window.project_blocks(x, state.outputs, ctx)
        q, k, v, blocks = inputs.q, inputs.k, inputs.v, inputs.blocks
        b, n, w = q.shape[:3]
        before = blocks.blocks_since_reset(state.outputs.blocks)
        offset = None if ctx.offset is None else jnp.broadcast_to(ctx.offset, (n, b))
        by_block = to_block_major((x.reshape(b, n, w, -1), q, k, v, before))
        xs = (*by_block, offset, split_key(ctx.key, FEEDBACK, n))
        past = state.outputs.k[:, :-1].astype(k.dtype), state.outputs.v[:, :-1].astype(v.dtype)
        graph, params = nnx.split(nnx.List([self, mlp]))

        def body(params: Any, past: tuple[Array, Array], x: Any) -> Any:
            layer, mlp = cast(tuple[FeedbackSegments, FeedForward], nnx.merge(graph, params))
            return layer.scan_body(mlp, past, x)

        body = jax.checkpoint(body) if self.recompute_blocks else body
        _, ys = sequence_parallel.ring_scan(body, params, past, xs)
        y, out_k, out_v = from_block_major(ys)
        return y.reshape(x.shape), self.final_state(inputs.k, inputs.v, out_k, out_v, state, blocks)

    def scan_body(
        self, mlp: FeedForward, past: tuple[Array, Array], x: Any
    ) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
        """Process one block.

        Args:
          past: keys and values of the outputs of the m blocks before it, [b m w g e].

        Returns:
          `past` of the next block; the block's outputs [b w d], their keys and values [b w g e].
        """
        x, q, k, v, before, offset, key = x
        window_k, window_v = (
            jnp.concatenate([a, own[:, None]], 1) for a, own in zip(past, (k, v), strict=True)
        )
        attended = self.window.attend_block(q, window_k, window_v, before, offset, key)
        y = mlp(self.qkv.output_projection(attended, x, key), x, key)
        _, out_k, out_v = self.qkv.project(y)
        out_k = self.qkv.rotate(out_k, jnp.arange(self.block_len))
        past_k, past_v = (
            jnp.concatenate([a[:, 1:], own[:, None]], 1)
            for a, own in zip(past, (out_k, out_v), strict=True)
        )
        return (past_k, past_v), (y, out_k, out_v)

    def final_state(
        self, k: Array, v: Array, out_k: Array, out_v: Array, state: FmState, blocks: Blocks
    ) -> FmState:
        """Return the state after the call; keys and values are [b n w g e]."""
        outputs = self.window.final_state(out_k, out_v, state.outputs, blocks)
        written = jnp.arange(self.block_len) < outputs.tokens[:, None]

        def last(new: Array, old: Array) -> Array:
            """Return the entries of the block being filled; 0 if the last block is full."""
            entries = sequence_parallel.gather_last(new[:, :0], new, blocks.end, 1)[:, 0]
            entries = jnp.where(written[..., None, None], entries, 0).astype(old.dtype)
            return select_rows(blocks.all_padding, old, entries)

        return FmState(outputs, last(k, state.k), last(v, state.v))

    def block_weights(
        self, x: Array, state: FmState, ctx: Context, mlp: FeedForward
    ) -> BlockWeights:
        return self.window.block_weights(x, state.outputs, ctx, mlp)

    def step(
        self, x: Array, state: FmState, ctx: Context, mlp: FeedForward
    ) -> tuple[Array, FmState]:
        """Process one token per lane, at any position in its block: [b 1 d] -> [b 1 d]."""
        before = state
        state = start_documents(self, state, ctx)
        outputs, m = state.outputs, self.window.segments
        # what the token attends to: outputs of the segments, inputs of its own block
        window = outputs._replace(
            k=outputs.k.at[:, m].set(state.k), v=outputs.v.at[:, m].set(state.v)
        )
        q, window = self.window.append_kv(x, window)
        attended = self.window.attend_token(q, window)[:, None]
        y = mlp(self.qkv.output_projection(attended, x), x)
        _, outputs = self.window.append_kv(y, outputs)
        full = outputs.tokens + 1 == self.block_len
        k, v = (select_rows(full, 0, a[:, m]) for a in (window.k, window.v))
        return y, select_valid(ctx, FmState(self.window.advance(outputs), k, v), before)


class FmSpec(BlockwiseSpec):
    title = "feedback memory segments"
    applies_mlp = True

    def make(self, config: ResolvedModelConfig, rngs: nnx.Rngs) -> Mixer:
        return FeedbackSegments(config, rngs=rngs)

    def check(self, config: Config) -> Iterator[str]:
        yield from super().check(config)
        if config.model.memory_segments < 1:
            yield (
                f"model.memory_segments={config.model.memory_segments}: model.mixer=fm needs at "
                "least one memory segment; set it to 1 or more, or use model.mixer=bswa"
            )

    def flops(self, model: ModelConfig, computed: bool = False) -> float:
        return super().flops(model, computed) + self._second_projection(model)

    def weight_flops(self, model: ModelConfig) -> float:
        return super().weight_flops(model) + self._second_projection(model)

    @staticmethod
    def _second_projection(model: ModelConfig) -> float:
        """Return the FLOPs of projecting keys and values again: from outputs, not from inputs."""
        s = sizes(model)
        return 2 * s.d * 2 * s.g * s.e

    def recurrent_share(self, model: ModelConfig) -> float:
        return 1.0

    def state_bytes(self, model: ModelConfig) -> int:
        return super().state_bytes(model) + kv_bytes(model) * model.block_len
