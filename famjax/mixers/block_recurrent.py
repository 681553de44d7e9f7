"""The layer of the Block-Recurrent Transformer with a recurrent state (arXiv 2203.07852, 3).

    y_i = SelfAttention(q_i, K^_i, V^_i) + o_i + x_i

The attention to the window is implemented in `famjax.mixers.window`; o_i, which token i reads from
the recurrent states, and the update of the states are in `famjax.layers.recurrent_cell`. The paper
has one such layer, the third from the top, in a stack of Transformer-XL layers. Here it is part of
a pattern in `model.mixer`, which is repeated over the layers: with six layers
"bswa,bswa,bswa,block_recurrent,bswa,bswa" is the paper's.

As in `famjax.mixers.fam`, all blocks are projected in parallel, a scan over the blocks updates only
the states, and then all blocks attend in parallel. FAM began as this layer (TransformerFAM C.1),
but it needs no weights of its own, and its memory passes through the feed-forward.

Like the FAM, the states are float32 regardless of the compute dtype.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig, sizes
from famjax.config.schema import ModelConfig
from famjax.core.lanes import select_rows, select_state, select_valid
from famjax.core.types import Array, Context, param_dtype
from famjax.layers import recurrent_cell
from famjax.layers.mlp import FeedForward
from famjax.layers.qkv import QKV
from famjax.layers.recurrent_cell import RecurrentCell
from famjax.mixers.blocks import (
    BlockInputs,
    from_block_major,
    memory_resets,
    start_documents,
    to_block_major,
)
from famjax.mixers.mixer import BlockWeights, Mixer, kv_bytes, norm_share
from famjax.mixers.window import SmearedSpec, WindowAttention, WindowState
from famjax.parallel import sequence_parallel


class BlockRecurrentState(NamedTuple):
    """The window's state, and the state vectors.

    Attributes:
      window: memory segments and the block being filled.
      states: [b f d] float32, the state vectors after the document's blocks before the one being
        filled.
      k, v: [b f g e], keys and values of the state vectors.
    """

    window: WindowState
    states: Array
    k: Array
    v: Array


class BlockRecurrentAttention(Mixer):
    """Block sliding window attention with recurrent state vectors."""

    def __init__(self, config: ResolvedModelConfig, *, rngs: nnx.Rngs):
        self.window = WindowAttention(
            config,
            rngs=rngs,
            segments=config.memory_segments,
            smeared_keys=config.smeared_keys,
        )
        self.recurrent_cell = RecurrentCell(config, rngs=rngs)
        self.block_len = config.block_len
        self.remat = config.remat != "none"

    @property
    def qkv(self) -> QKV:  # type: ignore[override]  # a property: the window owns it
        return self.window.qkv

    def init_state(self, batch: int, prompt: Array | None = None) -> BlockRecurrentState:
        initial = self.recurrent_cell.initial[...].astype(param_dtype())
        states = jnp.broadcast_to(initial, (batch, *initial.shape))
        k, v = self.recurrent_cell.keys_values(states)
        return BlockRecurrentState(self.window.init_state(batch), states, k, v)

    def state_axes(self) -> BlockRecurrentState:
        states: Any = ("batch", None, None)
        kv: Any = ("batch", None, "kv_heads", None)
        return BlockRecurrentState(self.window.state_axes(), states, kv, kv)

    def memory(self, state: BlockRecurrentState) -> Array:
        return state.states

    def replace_memory(self, state: BlockRecurrentState, memory: Array) -> BlockRecurrentState:
        k, v = self.recurrent_cell.keys_values(memory)
        return state._replace(states=memory, k=k, v=v)

    def passable_state(self, state: BlockRecurrentState) -> BlockRecurrentState:
        """Return the state vectors without the window."""
        # a separate type is not worthwhile
        return state._replace(window=())  # type: ignore[arg-type]

    def pass_state(
        self, fresh: BlockRecurrentState, saved: BlockRecurrentState
    ) -> BlockRecurrentState:
        return saved._replace(window=fresh.window)

    def __call__(
        self, x: Array, state: BlockRecurrentState, ctx: Context, mlp: FeedForward
    ) -> tuple[Array, BlockRecurrentState]:
        """Process whole blocks: [b n*w d] -> [b n*w d]. All lanes are at the start of a block."""
        inputs = self.window.project_blocks(x, state.window, ctx)
        recalled, states = self.scan_states(x, inputs, state, ctx)
        attended = self.window.attend_blocks(inputs, state.window, ctx)
        y = self.qkv.output_projection(attended, x + recalled, ctx.key)
        k, v = self.recurrent_cell.keys_values(states)
        window = self.window.final_state(inputs.k, inputs.v, state.window, inputs.blocks)
        return y, BlockRecurrentState(window, states, k, v)

    def attention_mass(
        self, x: Array, state: BlockRecurrentState, ctx: Context, mlp: FeedForward
    ) -> Array:
        inputs = self.window.project_blocks(x, state.window, ctx)
        recalled, _ = self.scan_states(x, inputs, state, ctx)
        attended = self.qkv.out(self.window.attend_blocks(inputs, state.window, ctx))
        return norm_share(recalled, attended, ctx.valid)

    def block_weights(
        self, x: Array, state: BlockRecurrentState, ctx: Context, mlp: FeedForward
    ) -> BlockWeights:
        """Return the attention weights of the window; the states are read by another attention."""
        return self.window.block_weights(x, state.window, ctx, mlp)

    def scan_states(
        self, x: Array, inputs: BlockInputs, state: BlockRecurrentState, ctx: Context
    ) -> tuple[Array, Array]:
        """Return what each token reads from the states before its block, and the final states.

        Returns:
          [b n*w d]; [b f d].
        """
        blocks, w = inputs.blocks, self.block_len
        reset = memory_resets(blocks, ctx, w)
        full = blocks.valid == w
        by_block = (self.window.unrotate(inputs.k), inputs.v, reset, full)
        xs = to_block_major(by_block)
        graph, params = nnx.split(self.recurrent_cell)

        def body(params: Any, states: Array, x: Any) -> tuple[Array, tuple[Array, Array]]:
            cell = nnx.merge(graph, params)
            block_k, block_v, reset, full = x
            initial = jnp.broadcast_to(cell.initial[...], states.shape).astype(states.dtype)
            states = select_rows(reset, initial, states)
            k, v = cell.keys_values(states)
            return select_rows(full, cell.update(states, k, v, block_k, block_v), states), (k, v)

        scanned = jax.checkpoint(body) if self.remat else body
        states, kv = sequence_parallel.ring_scan(scanned, params, state.states, xs)
        k, v = from_block_major(kv)
        b, t, d = x.shape
        tokens = self.qkv.normalize(x).reshape(b, t // w, w, d)
        recalled = self.recurrent_cell.read(tokens, k, v)
        return recalled.reshape(x.shape).astype(x.dtype), states

    def step(
        self, x: Array, state: BlockRecurrentState, ctx: Context, mlp: FeedForward
    ) -> tuple[Array, BlockRecurrentState]:
        """Process one token per lane, at any position in its block: [b 1 d] -> [b 1 d]."""
        before = state
        state = start_documents(self, state, ctx)
        q, window = self.window.append_kv(x, state.window)
        attended = self.window.attend_token(q, window)
        recalled = self.recurrent_cell.read(self.qkv.normalize(x), state.k, state.v)
        y = self.qkv.output_projection(attended[:, None], x + recalled.astype(x.dtype))
        full = window.tokens + 1 == self.block_len
        # a branch, since only one token in w completes a block
        state = jax.lax.cond(
            full.any(),
            lambda state: select_state(full, self.commit_block(state, window), state),
            lambda state: state,
            state,
        )
        return y, select_valid(ctx, state._replace(window=self.window.advance(window)), before)

    def commit_block(self, state: BlockRecurrentState, window: WindowState) -> BlockRecurrentState:
        """Update the states with the block that was just filled."""
        block_k, block_v = self.window.unrotate(window.k[:, -1]), window.v[:, -1]
        states = self.recurrent_cell.update(state.states, state.k, state.v, block_k, block_v)
        return self.replace_memory(state, states)


class BlockRecurrentSpec(SmearedSpec):
    title = "a block-recurrent state"
    keys = ("model.memory_segments", "model.fam_len", "model.recurrent_gate")
    switches = ("model.smeared_keys", "train.rsp")
    passes_memory = True

    def make(self, config: ResolvedModelConfig, rngs: nnx.Rngs) -> Mixer:
        return BlockRecurrentAttention(config, rngs=rngs)

    def initial_param(self, model: ResolvedModelConfig, name: str, rngs: nnx.Rngs) -> Array:
        if not name.startswith("recurrent_cell."):
            return super().initial_param(model, name, rngs)
        path = name.removeprefix("recurrent_cell.")
        value: Array = attrgetter(path)(RecurrentCell(model, rngs=rngs))[...]
        # zero, so that a pretrained model starts with its window attention unchanged
        return jnp.zeros_like(value) if path == "token_out.kernel" else value

    def count_params(self, model: ModelConfig) -> int:
        return recurrent_cell.count_params(model) + super().count_params(model)

    def flops(self, model: ModelConfig, computed: bool = False) -> float:
        return super().flops(model, computed) + recurrent_cell.flops(model)

    def recurrent_share(self, model: ModelConfig) -> float:
        return model.fam_len / (model.block_len + model.fam_len)

    def state_bytes(self, model: ModelConfig) -> int:
        states = model.fam_len * (4 * sizes(model).d + kv_bytes(model))  # float32
        return super().state_bytes(model) + states

    def describe(self, model: ModelConfig) -> list[str]:
        return [*super().describe(model), f"a recurrent state of {model.fam_len} vectors"]
