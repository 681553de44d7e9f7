"""Feedback Attention Memory (TransformerFAM 2.2, Algorithm 2, B.1, B.2.1).

A block attends to its memory segments, to the previous FAM and to itself. The FAM, as a query,
attends to its own previous value and to the whole block, with the layer's norm, projections and
feed-forward:

    A_tau^F = SelfAttention(Q_{tau-1}^F, Concat(K_{tau-1}^F, K_tau), ...) + F_{tau-1}
    F_tau   = FF(PreLN(A_tau^F)) + A_tau^F

Within a layer the recurrence needs only the keys and values of each block. So all blocks are
projected in parallel, a scan over the blocks (`famjax.mixers.fam_scan`) updates only the f memory
tokens, and then all blocks attend in parallel: of the f + w tokens per block, only f are processed
sequentially.

With this update (`model.fam_update=sum`) the FAM is a sum over all blocks. Its norm grows with the
document, and its direction, all that PreLN keeps of it, changes less and less (docs/memory.md). The
bounded update (`gated`) moves each memory token towards what the block would add to it, by a
learned gate g:

    N_tau = FF(PreLN(A_tau^F)) + A_tau^F,   U_tau = N_tau - F_{tau-1}: what the block adds
    F_tau = F_{tau-1} + g (U_tau - F_{tau-1}),   g from A_tau^F (`famjax.layers.memory_gate`)

At the first block of a document the residual is 0 and F_tau = N_tau. A closed gate leaves its
memory token unchanged, bit for bit.

Static summary tokens (`static`, C.3, "SUM FAM") are an alternative that the paper rejects. The
query of every update is the learned prompt S at the layer's input, without "FAM copy"; the only
feedback is that it attends to the previous FAM:

    A_tau^F = SelfAttention(Q(S), Concat(K_{tau-1}^F, K_tau), ...) + S,   F_tau = FF(PreLN(A)) + A

C.3 specifies neither a layer's summary tokens nor their residual. Here S is propagated through the
layers like the initial FAM (B.1), without text: "a static query". The residual is the summary token
itself, as everywhere in a Transformer; the zero residual of B.1 is for a copy that carries no
context.

Two more variants that the paper rejects: with `model.fam_init=prefix` each layer learns its own
first FAM, instead of the prompt that is propagated through the layers (B.1, B.4.4), and
`model.fam_position` sets the positions of the FAM's tokens (B.2.1, B.4.1). They are relative to the
first token of the next block, which is P tokens after the document's start:

    last  -f, ..., -1          between  -1 + j / (f + 1), j = 1, ..., f          zero  -P

The FAM is float32 regardless of the compute dtype: in bfloat16 small changes would be rounded away.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig, sizes
from famjax.config.schema import Config, ModelConfig
from famjax.core.lanes import select_rows, select_state, select_valid
from famjax.core.types import Array, Context, param_dtype
from famjax.layers import memory_gate
from famjax.layers.memory_gate import MemoryGate
from famjax.layers.mlp import FeedForward
from famjax.layers.qkv import QKV
from famjax.mixers import fam_measures, fam_scan
from famjax.mixers.blocks import BlockInputs, start_documents
from famjax.mixers.fam_scan import BlockFams
from famjax.mixers.mixer import (
    FORMATS,
    BlockWeights,
    MemoryLosses,
    Mixer,
    attention_flops,
    kv_bytes,
    layer_weights,
)
from famjax.mixers.window import SmearedSpec, WindowAttention, WindowState
from famjax.ops.attention import KVFrames
from famjax.parallel import sequence_parallel


class FamState(NamedTuple):
    """The window's state, and the feedback memory.

    Attributes:
      window: memory segments and the block being filled.
      fam: [b f d] float32, F.
      k, v: [b p f g e], keys and values of the last p FAMs, oldest first; the last are those of
        `fam`. Each is rotated to its position as the block after that FAM sees it.
      updates: [b] int32, number of updates since the document's start; at 0 the FAM is the learned
        initial one. It is capped at p, beyond which it has no effect, unless fam_position=zero.
      summary: [b f d] float32, the learned prompt at the layer's input, which is the query of
        every update of static summary tokens. `step` reads it; calls read `Context.prompt`. None
        with the other updates.
    """

    window: WindowState
    fam: Array
    k: Array
    v: Array
    updates: Array
    summary: Array | None = None


class Fam(Mixer):
    """Block sliding window attention with feedback memory."""

    def __init__(self, config: ResolvedModelConfig, *, rngs: nnx.Rngs):
        self.window = WindowAttention(
            config,
            rngs=rngs,
            segments=config.memory_segments,
            smeared_keys=config.smeared_keys,
        )
        self.block_len = config.block_len
        self.fam_len = config.fam_len
        self.previous = config.fam_previous
        self.memory_gate = MemoryGate(config) if config.fam_update == "gated" else None
        self.reads_prompt = config.fam_update == "static"
        self.position = config.fam_position
        at_zero = self.position == "zero"
        # block_len * updates, a position, must fit into int32
        self.max_updates = (2**31 - 1) // self.block_len if at_zero else self.previous
        has_prefix = config.fam_init == "prefix"
        self.prefix = nnx.Param(init_prefix(config, rngs)) if has_prefix else None
        # without remat all products of the scan are saved anyway, and a deferred scan, which
        # saves only F, would compute them again (docs/design.md)
        self.defer_weight_gradients = config.remat != "none"

    @property
    def qkv(self) -> QKV:  # type: ignore[override]  # a property: the window owns it
        return self.window.qkv

    def init_state(self, batch: int, prompt: Array | None = None) -> FamState:
        """Return the initial state, from the FAM prompt at this layer's input (B.1), or the prefix.

        Args:
          prompt: [f d], or [b f d] if each lane has its own; ignored with a prefix.
        """
        prompt = self.first_memory(prompt)
        assert prompt is not None  # the stack has one
        fam = prompt.astype(param_dtype())
        _, k, v = self.project(fam, jnp.zeros(fam.shape[:-2], jnp.int32))
        older = ((0, 0), (self.previous - 1, 0), (0, 0), (0, 0), (0, 0))

        def broadcast_rows(x: Array) -> Array:
            return x if prompt.ndim == 3 else jnp.broadcast_to(x, (batch, *x.shape))

        return FamState(
            self.window.init_state(batch),
            broadcast_rows(fam),
            jnp.pad(broadcast_rows(k)[:, None], older),
            jnp.pad(broadcast_rows(v)[:, None], older),
            jnp.zeros((batch,), jnp.int32),
            broadcast_rows(fam) if self.reads_prompt else None,
        )

    def state_axes(self) -> FamState:
        kv: Any = ("batch", None, None, "kv_heads", None)
        fam: Any = ("batch", None, None)
        lanes: Any = ("batch",)
        summary = fam if self.reads_prompt else None
        return FamState(self.window.state_axes(), fam, kv, kv, lanes, summary)

    def memory(self, state: FamState) -> Array:
        return state.fam

    def passable_state(self, state: FamState) -> FamState:
        """Return the FAM without the window."""
        # a separate type is not worthwhile
        return state._replace(window=(), summary=None)  # type: ignore[arg-type]

    def pass_state(self, fresh: FamState, saved: FamState) -> FamState:
        """Return the state of a document that starts with another document's FAM (B.2.3).

        The window is empty (random state passing).
        """
        return saved._replace(window=fresh.window, summary=fresh.summary)

    def first_memory(self, prompt: Array | None) -> Array | None:
        """Return the FAM before a document's first block: the prefix, else `Context.prompt`."""
        return prompt if self.prefix is None else self.prefix[...]

    def project(self, fam: Array, updates: Array) -> tuple[Array, Array, Array]:
        """Return QKV(PreLN(F)), rotated to the positions at which the next block sees F (B.2.1).

        Args:
          fam: [... f d].
          updates: [...] int32, number of updates of F; used only if fam_position=zero.

        Returns:
          q [... f h e], k and v [... f g e].
        """
        f = self.fam_len
        q, k, v = self.qkv.project(fam)
        if self.position == "zero":
            positions = jnp.repeat(-self.block_len * updates[..., None], f, -1)
        elif self.position == "between":
            positions = jnp.arange(1, f + 1) / (f + 1) - 1
        else:
            positions = jnp.arange(-f, 0)
        rotate = functools.partial(self.qkv.rotate, long_range=self.position == "zero")
        return rotate(q, positions), rotate(k, positions), v

    def update_memory(
        self,
        fam: Array,
        projected: tuple[Array, Array, Array],
        updates: Array,
        k: Array,
        v: Array,
        mlp: FeedForward,
        key: Array | None = None,
        offset: Array | None = None,
        summary: Array | None = None,
    ) -> Array:
        """Return F_tau [b f d] from F_{tau-1} and the block's keys and values [b w g e].

        Args:
          projected: `project(fam, updates)`.
          key: PRNG key of the layer's dropout, which also applies to the update.
          offset: [b], added to all positions (B.2.2).
          summary: [b f d] or [f d], the static summary tokens; ignored by the other updates.
        """
        if self.reads_prompt:
            assert summary is not None
            summary = jnp.broadcast_to(summary, fam.shape).astype(fam.dtype)
            projected = (self.project(summary, updates)[0], *projected[1:])
            return mlp(self.attend_block(summary, projected, k, v, key, offset), summary, key)
        # the initial FAM carries no context: the first residual is zero (B.1)
        residual = select_rows(updates > 0, fam, 0)
        attended = self.attend_block(residual, projected, k, v, key, offset)
        new = mlp(attended, fam, key)
        if self.memory_gate is None:
            return new
        gated = fam + self.memory_gate(attended) * (new - residual - fam)
        return select_rows(updates > 0, gated, new)

    def attend_block(
        self,
        residual: Array,
        projected: tuple[Array, Array, Array],
        k: Array,
        v: Array,
        key: Array | None = None,
        offset: Array | None = None,
    ) -> Array:
        """Return A_tau^F [b f d]: the FAM's attention to itself and the block, and the residual."""
        q, fam_k, fam_v = projected
        keys, values = jnp.concatenate([fam_k, k], 1), jnp.concatenate([fam_v, v], 1)
        q, keys = self.qkv.shift(q, offset), self.qkv.shift(keys, offset)
        attended = self.qkv.attend(q, keys, values, key=key)
        return self.qkv.output_projection(attended, residual, key)

    def __call__(
        self, x: Array, state: FamState, ctx: Context, mlp: FeedForward
    ) -> tuple[Array, FamState]:
        """Process whole blocks: [b n*w d] -> [b n*w d]. All lanes are at the start of a block."""
        inputs, fams, extra = fam_scan.scan_call(self, x, state, ctx, mlp)
        attended = self.window.attend_blocks(inputs, state.window, ctx, extra)
        y = self.qkv.output_projection(attended, x, ctx.key)
        return y, self.final_state(inputs, fams, state, self.first_memory(ctx.prompt))

    def attention_mass(self, x: Array, state: FamState, ctx: Context, mlp: FeedForward) -> Array:
        return fam_measures.attention_mass(self, x, state, ctx, mlp)

    def block_weights(
        self, x: Array, state: FamState, ctx: Context, mlp: FeedForward
    ) -> BlockWeights:
        return fam_measures.block_weights(self, x, state, ctx, mlp)

    def memory_gates(
        self, x: Array, state: FamState, ctx: Context, mlp: FeedForward
    ) -> Array | None:
        return fam_measures.memory_gates(self, x, state, ctx)

    def memory_losses(
        self, x: Array, y: Array, state: FamState, ctx: Context, mlp: FeedForward
    ) -> MemoryLosses:
        return fam_measures.memory_losses(self, x, y, state, ctx, mlp)

    def replace_memory(self, state: FamState, memory: Array) -> FamState:
        """Return a state with another FAM.

        Memory tokens that differ from the current FAM's replace the keys and values of all p FAMs.
        """
        _, k, v = self.project(memory, state.updates)
        differs = (memory != state.fam).any(-1)[:, None]  # [b 1 f]
        newest = jnp.arange(self.previous) == self.previous - 1
        replaced = (differs | newest[:, None])[..., None, None]  # [b p f 1 1]

        def replace(old: Array, new: Array) -> Array:
            """[b p f g e], [b f g e] -> [b p f g e]."""
            return jnp.where(replaced, new[:, None].astype(old.dtype), old)

        return state._replace(fam=memory, k=replace(state.k, k), v=replace(state.v, v))

    def final_state(
        self, inputs: BlockInputs, fams: BlockFams, state: FamState, prompt: Array | None
    ) -> FamState:
        """Return the state after the call."""
        blocks, older = inputs.blocks, self.previous - 1
        _, *latest = self.project(fams.last, fams.last_updates)
        holds = jnp.arange(older) >= older - fams.last_updates[:, None]  # [b p-1]

        def append_latest(old: Array, new: Array, last: Array) -> Array:
            entries = sequence_parallel.gather_last(
                old[:, :-1].astype(new.dtype), new, blocks.end, older
            )
            entries = jnp.where(holds[..., None, None, None], entries, 0)
            return select_rows(
                blocks.all_padding, old, jnp.concatenate([entries, last[:, None]], 1)
            )

        summary = state.summary
        if summary is not None and prompt is not None:
            current = jnp.broadcast_to(prompt, summary.shape).astype(summary.dtype)
            summary = select_rows(blocks.all_padding, summary, current)
        return FamState(
            self.window.final_state(inputs.k, inputs.v, state.window, blocks),
            fams.last,
            append_latest(state.k, fams.k, latest[0]),
            append_latest(state.v, fams.v, latest[1]),
            fams.last_updates,
            summary,
        )

    def step(
        self, x: Array, state: FamState, ctx: Context, mlp: FeedForward
    ) -> tuple[Array, FamState]:
        """Process one token per lane, at any position in its block: [b 1 d] -> [b 1 d]."""
        before = state
        state = start_documents(self, state, ctx)
        q, window = self.window.append_kv(x, state.window)
        attended = self.window.attend_token(q, window, self.kv_frames(q, state))
        y = self.qkv.output_projection(attended[:, None], x)
        full = window.tokens + 1 == self.block_len
        # a branch, since only one token in w completes a block
        state = jax.lax.cond(
            full.any(),
            lambda state: select_state(full, self.commit_block(state, window, mlp), state),
            lambda state: state,
            state,
        )
        return y, select_valid(ctx, state._replace(window=self.window.advance(window)), before)

    def kv_frames(self, q: Array, state: FamState) -> KVFrames:
        """Return the last p FAMs for one token, as an argument of `attend_frames`."""
        p, f = self.previous, self.fam_len
        distance = jnp.arange(p - 1, -1, -1)
        position = state.window.tokens[:, None] + self.block_len * distance
        visible = state.updates[:, None] >= distance
        return (
            self.qkv.rotate(jnp.repeat(q[:, None], p, 1), position),
            state.k,
            state.v,
            jnp.broadcast_to(visible[..., None], (*visible.shape, f)),
        )

    def commit_block(self, state: FamState, window: WindowState, mlp: FeedForward) -> FamState:
        """Update the FAM with the block that was just filled."""
        k, v = self.window.smear_state(window)[:, -1], window.v[:, -1]
        projected = self.project(state.fam, state.updates)
        fam = self.update_memory(
            state.fam, projected, state.updates, k, v, mlp, summary=state.summary
        )
        updates = jnp.minimum(state.updates + 1, self.max_updates)
        _, fam_k, fam_v = self.project(fam, updates)
        return state._replace(
            fam=fam,
            k=jnp.concatenate([state.k[:, 1:], fam_k[:, None].astype(state.k.dtype)], 1),
            v=jnp.concatenate([state.v[:, 1:], fam_v[:, None].astype(state.v.dtype)], 1),
            updates=updates,
        )


def init_prefix(config: ResolvedModelConfig, rngs: nnx.Rngs) -> Array:
    """Return the initial value of a prefix [f d], at the scale of tokens at the first layer."""
    return jax.random.normal(rngs.params(), (config.fam_len, config.width))


class FamSpec(SmearedSpec):
    title = "feedback attention memory"
    keys = (
        "model.memory_segments",
        "model.fam_len",
        "model.fam_previous",
        "model.fam_update",
        "model.fam_init",
        "model.fam_position",
        "model.fam_min_timescale",
        "model.fam_max_timescale",
        "model.fam_gate_threshold",
    )
    switches = (
        *("model.smeared_keys", "train.rsp"),
        *("train.diversity_loss", "train.reconstruction_loss", "train.write_loss"),
    )
    has_memory_prompt = True
    passes_memory = True
    formats = FORMATS
    # with the paper's sum, finetuned models forget passkeys (docs/memory.md)
    convert_settings = MappingProxyType({"fam_update": "gated"})

    def make(self, config: ResolvedModelConfig, rngs: nnx.Rngs) -> Mixer:
        return Fam(config, rngs=rngs)

    def has_write_gates(self, model: ModelConfig) -> bool:
        return model.fam_update == "gated"

    def unexportable_setting(self, model: ModelConfig) -> str:
        # the paper's rejected variants are not in the PyTorch code
        default = ModelConfig()
        for name in ("fam_init", "fam_position"):
            if (value := getattr(model, name)) != getattr(default, name):
                return f"model.{name}={value}"
        return ""

    def initial_param(self, model: ResolvedModelConfig, name: str, rngs: nnx.Rngs) -> Array:
        # not from `make`, which would also create the projections of a large model
        if name == "prefix":
            return init_prefix(model, rngs)
        if name.startswith("memory_gate."):
            return getattr(MemoryGate(model), name.removeprefix("memory_gate."))[...]
        return super().initial_param(model, name, rngs)

    def count_params(self, model: ModelConfig) -> int:
        gate = memory_gate.count_params(model) if model.fam_update == "gated" else 0
        prefix = model.fam_len * sizes(model).d if model.fam_init == "prefix" else 0
        return gate + prefix + super().count_params(model)

    def constants(self, model: ModelConfig) -> dict[str, float]:
        # a key since 2026-11-29; memory files have it as a constant
        gates = {"memory_gate.threshold": model.fam_gate_threshold}
        return (gates if model.fam_update == "gated" else {}) | super().constants(model)

    def check(self, config: Config) -> Iterator[str]:
        yield from super().check(config)
        m = config.model
        low, high, threshold = m.fam_min_timescale, m.fam_max_timescale, m.fam_gate_threshold
        if low <= 1:
            yield f"model.fam_min_timescale={low:g}: is a number of blocks; must be greater than 1"
        if high < low:
            yield (
                f"model.fam_max_timescale={high:g}: is less than model.fam_min_timescale={low:g}; "
                "set it to at least that"
            )
        if high * threshold >= 1:
            yield (
                f"model.fam_max_timescale={high:g}: such a gate would never open (a gate opens by "
                f"1 / timescale, and is closed below model.fam_gate_threshold={threshold:g}); must "
                f"be less than {1 / threshold:g}, or the threshold lower"
            )

    def keys_seen(self, model: ModelConfig) -> float:
        return super().keys_seen(model) + model.fam_previous * model.fam_len

    def keys_computed(self, model: ModelConfig) -> float:
        return super().keys_computed(model) + model.fam_previous * model.fam_len

    def flops(self, model: ModelConfig, computed: bool = False) -> float:
        # FAM's queries attend to the previous FAM and the block, never to memory segments (2.2)
        keys = model.fam_len + model.block_len
        update = 2 * layer_weights(model) + attention_flops(model, keys)
        return super().flops(model, computed) + model.fam_len / model.block_len * update

    def weight_flops(self, model: ModelConfig) -> float:
        return (1 + model.fam_len / model.block_len) * super().weight_flops(model)

    def recurrent_share(self, model: ModelConfig) -> float:
        return model.fam_len / (model.block_len + model.fam_len)

    def state_bytes(self, model: ModelConfig) -> int:
        fam = sizes(model).d * 4  # float32
        copies = 2 if model.fam_update == "static" else 1
        memory = model.fam_len * (copies * fam + model.fam_previous * kv_bytes(model))
        return super().state_bytes(model) + memory

    def describe(self, model: ModelConfig) -> list[str]:
        return [*super().describe(model), f"feedback memory of {model.fam_len} tokens"]
