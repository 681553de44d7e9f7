"""Stacks that process a document in segments, with memory tokens before and after each segment.

    [_; Y; W] = Transformer([M; X; T])

A segment is one sequence with causal attention and rotary positions from 0 on: the memory M, the
segment's w tokens X, and f writing tokens T, whose outputs W become the new memory N = Norm(W). The
next segment sees nothing else of this one. In the Recurrent Memory Transformer
(`famjax.stacks.rmt`) N replaces M, in AutoCompressors (`famjax.stacks.autocompressor`) N is
appended to M.

Both papers take W after a norm: Transformer-XL is post-norm, and with OPT and Llama W is the output
of the final norm. Without a norm, a memory that is read and written by the same residual stream
would be a sum over all segments.
"""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.derived import kept_segments, segment_transformer
from famjax.config.resolved import ResolvedModelConfig
from famjax.core.errors import UserError
from famjax.core.lanes import select_state
from famjax.core.types import Array, Context, State, compute_dtype, param_dtype
from famjax.layers.norm import Norm
from famjax.mixers.full import truncate_cache
from famjax.parallel.traced import all_gather_tokens, with_state_constraint
from famjax.stacks.residual import ResidualStack
from famjax.stacks.stack import Stack


class SegmentState(NamedTuple):
    """The state within a segment. As in the layers' states, lanes are on axis 1.

    Attributes:
      memory: [1 b f d] float32, N of the previous segment; None if the state holds only its keys
        and values.
      read: [1 b] int32, number of tokens of M.
      tokens: [1 b] int32, number of the segment's tokens that were read so far, less than w.
      caches: keys and values of M and of these tokens, [repeats b ...].
    """

    memory: Array | None
    read: Array
    tokens: Array
    caches: State


class SegmentStack(Stack):
    """A Transformer that processes one segment after the other.

    A state holds the keys and values of M, so that `step` processes one token as in any
    Transformer.

    Args:
      config: block_len w, fam_len f.
      mutual: whether the tokens of N attend to each other in both directions, and those of T, too.
      held: whether states hold N itself, from which T is made, and not only its keys and values.
    """

    def __init__(self, config: ResolvedModelConfig, *, rngs: nnx.Rngs, mutual: bool, held: bool):
        self.transformer = ResidualStack(segment_transformer(config), rngs=rngs)
        self.memory_norm = Norm(config.norm, config.width, config.arch)
        self.prompt = nnx.Param(jax.random.normal(rngs.params(), (config.fam_len, config.width)))
        self.block_len, self.memory_len = config.block_len, config.fam_len
        self.mutual, self.held = mutual, held
        self.dtype = compute_dtype(config.dtype)
        self.max_read = kept_segments(config) * config.fam_len
        self.capacity = None
        self.receptive_field = None

    @abc.abstractmethod
    def writing_tokens(self, state: SegmentState) -> Array:
        """Return the writing tokens T, [b f d]."""

    @abc.abstractmethod
    def kept_tokens(self, read: Array) -> Array:
        """Return how many tokens of M the next segment keeps, before N: [b] -> [b].

        Args:
          read: [b], number of tokens of M.
        """

    def empty_state(self, batch: int) -> SegmentState:
        """Return a state that has read nothing, not even a memory; a held memory is zero."""
        zero = jnp.zeros((1, batch), jnp.int32)
        held = jnp.zeros((1, batch, *self.prompt.shape), param_dtype()) if self.held else None
        state = SegmentState(held, zero, zero, self.transformer.init_state(batch))
        return with_state_constraint(state, self.state_axes())

    def read_memory(self, state: SegmentState, memory: Array) -> SegmentState:
        """Return the state at the start of the next segment.

        Args:
          memory: [b f d], N of the segment that `state` is in.
        """
        b, f, _ = memory.shape
        kept = self.kept_tokens(state.read[0])
        ctx = Context(mutual=jnp.ones((b, f), bool) if self.mutual else None)
        caches = _truncate(state.caches, kept)
        _, caches = self.transformer(memory.astype(self.dtype), caches, ctx)
        held = memory[None] if self.held else None
        return SegmentState(held, (kept + f)[None], jnp.zeros_like(state.tokens), caches)

    def state_axes(self) -> State:
        lanes: Any = (None, "batch")
        memory: Any = (None, "batch", None, None)
        held = memory if self.held else None
        return SegmentState(held, lanes, lanes, self.transformer.state_axes())

    def memories(self, state: SegmentState) -> list[Array]:
        return [] if state.memory is None else [state.memory]

    def passable_state(self, state: SegmentState) -> SegmentState:
        return state

    def pass_state(self, fresh: SegmentState, saved: SegmentState) -> SegmentState:
        """Return `saved` at the start of its segment, so that only M of its document is passed."""
        caches = _truncate(saved.caches, saved.read[0])
        return saved._replace(tokens=jnp.zeros_like(saved.tokens), caches=caches)

    def __call__(self, x: Array, state: SegmentState, ctx: Context) -> tuple[Array, SegmentState]:
        """Process whole segments: [b t d] -> [b t d], and the state after them.

        Raises:
          UserError: t is not a multiple of block_len, or a document exceeds the capacity.
        """
        b, t, d = x.shape
        w = self.block_len
        if t % w:
            raise UserError(
                f"a call of {t} tokens: not a multiple of block_len={w}; pad it and set "
                "Context.valid, or process the remaining tokens with step"
            )
        self.check_capacity(state, t, ctx)
        fresh = None if ctx.reset is None else self.init_state(b)

        def split(a: Array) -> Array:
            """[b t ...] -> [n b w ...]."""
            return a.reshape(b, t // w, w, *a.shape[2:]).swapaxes(0, 1)

        def segment(state: SegmentState, xs: tuple[Array, Context]) -> tuple[SegmentState, Array]:
            x, own = xs
            state = self._start(state, fresh, own)
            valid = jnp.ones((b, w), bool) if own.valid is None else own.valid
            y, state = self._process(x, state, valid, valid.all(-1))
            return state, y

        # segments are read one after the other: sharded tokens would not save time
        masks = Context(ctx.reset, ctx.valid, pass_state=ctx.pass_state)
        xs = jax.tree.map(split, (all_gather_tokens(x), masks))
        state, y = jax.lax.scan(segment, state, xs)
        return y.swapaxes(0, 1).reshape(b, t, d), state

    def step(self, x: Array, state: SegmentState, ctx: Context) -> tuple[Array, SegmentState]:
        """Process one token per lane: [b 1 d] -> [b 1 d]."""
        self.check_capacity(state, 1, ctx)
        valid = jnp.ones(x.shape[:2], bool) if ctx.valid is None else ctx.valid
        if ctx.reset is not None:
            resets = ctx._replace(reset=ctx.reset & valid)
            state = self._start(state, self.init_state(x.shape[0]), resets)
        y, caches = self.transformer.step(x, state.caches, Context(valid=valid))
        y = self._without_excess(y, state, valid)
        state = state._replace(tokens=state.tokens + valid[:, 0], caches=caches)
        ends = state.tokens[0] == self.block_len

        def write(state: SegmentState) -> SegmentState:
            return self._process(x[:, :0], state, valid[:, :0], ends)[1]

        # most tokens end no segment
        return y, jax.lax.cond(ends.any(), write, lambda state: state, state)

    def _start(self, state: SegmentState, fresh: SegmentState | None, ctx: Context) -> SegmentState:
        """Return the state before tokens that may start a document."""
        if ctx.reset is None:
            return state
        assert fresh is not None
        if ctx.pass_state is not None:
            fresh = select_state(ctx.pass_state[:, 0], self.pass_state(fresh, state), fresh, axis=1)
        return select_state(ctx.reset[:, 0], fresh, state, axis=1)

    def _process(
        self, x: Array, state: SegmentState, valid: Array, ends: Array
    ) -> tuple[Array, SegmentState]:
        """Process tokens of a segment; in lanes where the segment ends, also read the next memory.

        Args:
          x: [b t d].
          valid: [b t] bool.
          ends: [b] bool, whether the segment ends with these tokens.
        """
        t, f = x.shape[1], self.memory_len
        tokens = jnp.concatenate([x, self.writing_tokens(state).astype(x.dtype)], 1)
        writes = jnp.repeat(ends[:, None], f, 1)
        ctx = Context(
            valid=jnp.concatenate([valid, writes], 1),
            mutual=jnp.concatenate([jnp.zeros_like(valid), writes], 1) if self.mutual else None,
        )
        y, caches = self.transformer(tokens, state.caches, ctx)
        count = valid.sum(-1, dtype=jnp.int32)
        after = state._replace(tokens=state.tokens + count, caches=caches)
        memory = self.memory_norm(y[:, t:], param_dtype())
        after = select_state(ends, self.read_memory(after, memory), after, axis=1)
        return self._without_excess(y[:, :t], state, valid), after

    def check_capacity(self, state: SegmentState, tokens: int, ctx: Context) -> None:
        """Raise a `UserError` if a call exceeds the capacity.

        Under jit, and with masks, nothing is raised, and the outputs at tokens beyond it are NaN.
        """
        masked = ctx.reset is not None or ctx.valid is not None
        if self.capacity is None or masked or isinstance(state.read, jax.core.Tracer):
            return
        read = state.read // self.memory_len * self.block_len + state.tokens
        if (longest := int(read.max()) + tokens) > self.capacity:
            raise UserError(
                f"token {longest} of a document is beyond model.capacity={self.capacity}, the "
                "number of tokens whose summaries are kept; raise it, or use model.stack=rmt"
            )

    def _without_excess(self, y: Array, state: SegmentState, valid: Array) -> Array:
        """Return outputs [b t d], with NaN at tokens beyond the capacity."""
        if self.capacity is None:
            return y
        excess = valid & (state.read[0] == self.max_read)[:, None]
        return jnp.where(excess[..., None], jnp.nan, y)


def _truncate(caches: State, length: Array) -> State:
    """Return the first `length` [b] tokens of all layers' caches."""
    return tuple(truncate_cache(cache, length) for cache in caches)
