"""The residual stack: a repeated pattern of layers, scanned or unrolled with equal results."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig
from famjax.core.errors import UserError
from famjax.core.remat import remat_with_policy
from famjax.core.types import Array, Context, State
from famjax.layers.cross_attention import CrossAttention, EncodedSource, SourceKV
from famjax.layers.dropout import (
    EMBEDDING,
    LAYER,
    OUTPUT,
    apply_dropout,
    drop_layer,
    empty_key,
    make_dropout,
    split_key,
)
from famjax.layers.mlp import FeedForward
from famjax.layers.ngram_memory import NgramMemory
from famjax.layers.norm import Norm
from famjax.layers.positions import Positions
from famjax.layers.short_conv import ShortConv
from famjax.mixers import MIXERS, make_mixer
from famjax.mixers.full import lengthen_caches, shorten_caches
from famjax.mixers.mixer import MemoryLosses
from famjax.parallel.sharding import TOKENS, is_axes
from famjax.parallel.traced import fsdp_all_gather, with_logical_constraint, with_state_constraint
from famjax.stacks import memory_measures
from famjax.stacks.stack import Stack

# entries of the shortest cache that a loop computes with, a power of two
_SHORTEST_CACHE = 128


class Layer(nnx.Module):
    """A mixer and a feed-forward. The mixer may apply the feed-forward to its memory (FAM does).

    LayerDrop drops the layer's contribution to the residual stream, but its state is updated
    anyway, so that the memory has no gaps.
    """

    def __init__(self, name: str, config: ResolvedModelConfig, *, rngs: nnx.Rngs):
        self.mixer = make_mixer(name, config, rngs=rngs)
        self.applies_mlp = MIXERS[name].applies_mlp
        self.cross = CrossAttention(config, rngs=rngs) if config.encoder.layers else None
        self.mlp = FeedForward(config, rngs=rngs)
        self.layer_drop_rate = config.dropout.layer
        self.block_len = self.mixer.block_len

    def init_state(self, batch: int, prompt: Array) -> State:
        return self.mixer.init_state(batch, prompt)

    def state_axes(self) -> State:
        return self.mixer.state_axes()

    def encode_memory_prompt(self, prompt: Array, offset: Array | None = None) -> Array:
        return self.mlp(self.mixer.encode_memory_prompt(prompt, offset), prompt)

    def __call__(self, x: Array, state: State, ctx: Context) -> tuple[Array, State]:
        a, state = self.mixer(x, state, ctx, self.mlp)
        y = self.feed_forward(self.attend_source(a, ctx), x, ctx.key)
        return drop_layer(x, y, self.layer_drop_rate, ctx.key), state

    def step(self, x: Array, state: State, ctx: Context) -> tuple[Array, State]:
        a, state = self.mixer.step(x, state, ctx, self.mlp)
        return self.feed_forward(self.attend_source(a, ctx), x), state

    def attend_source(self, a: Array, ctx: Context) -> Array:
        """Attend to the encoder's output with the mixer's output, if there is an encoder."""
        return a if self.cross is None else self.cross(a, ctx.source, ctx.key)

    def feed_forward(self, a: Array, x: Array, key: Array | None = None) -> Array:
        """Apply the feed-forward to the mixer's output, unless the mixer has already done so."""
        return a if self.applies_mlp else self.mlp(a, x, key)

    def match_softmax(self, x: Array, state: State, ctx: Context) -> tuple[Array, Array]:
        """Return the layer's output with softmax attention, and `Mixer.match_softmax`'s errors."""
        a, error = self.mixer.match_softmax(x, state, ctx, self.mlp)
        return self.feed_forward(a, x), error

    def encode_prompt_with_softmax(self, prompt: Array, offset: Array | None = None) -> Array:
        """Return what `encode_memory_prompt` returns, computed with softmax attention."""
        return self.mlp(self.mixer.encode_prompt_with_softmax(prompt, offset), prompt)

    def measure(
        self,
        measure_mixer: Callable[[Array, State, Context, FeedForward], Any],
        x: Array,
        state: State,
        ctx: Context,
    ) -> tuple[Array, Any]:
        """Return the output, and what a method of the mixer measures in the same call."""
        return self(x, state, ctx)[0], measure_mixer(x, state, ctx, self.mlp)

    def measure_memory(
        self, x: Array, state: State, ctx: Context
    ) -> tuple[Array, tuple[Array | None, Array, Array | None]]:
        """Return the output, and measurements of the memory.

        These are the memory after the call, its share in what is read, and the rates at which
        tokens are written.
        """
        y, after = self(x, state, ctx)
        share = self.mixer.attention_mass(x, state, ctx, self.mlp)
        rates = self.mixer.token_rates(x, state, ctx, self.mlp)
        return y, (self.mixer.memory(after), share, rates)

    def call_with_losses(
        self, x: Array, state: State, ctx: Context
    ) -> tuple[Array, tuple[State, MemoryLosses | None]]:
        """Return the output, and the pair of the new state and the memory's auxiliary losses."""
        y, after = self(x, state, ctx)
        return y, (after, self.mixer.memory_losses(x, y, state, ctx, self.mlp))


# maps a layer to a function (x, state, ctx) -> (output, result)
LayerMethod = Callable[[Layer], Callable[[Array, State, Context], tuple[Array, Any]]]


class UnstackedState(NamedTuple):
    """A state with separate arrays for each layer.

    Attributes:
      repeats: for each repeat of the pattern, its layers' states [b ...].
      extra_state: what the stacked state has besides the layers' states.
    """

    repeats: tuple[State, ...]
    extra_state: State


class ResidualStack(Stack):
    """Layers on one residual stream, and the FAM prompt that initializes their memories (B.1).

    The parameters and states of all repeats of a pattern layer are stacked on a leading axis,
    whether the layers are scanned or not, so that checkpoints do not depend on that choice.
    """

    def __init__(self, config: ResolvedModelConfig, *, rngs: nnx.Rngs):
        names = config.mixer.split(",")
        self.repeats = config.layers // len(names)
        self.scanned = config.scan_layers
        self.remat = config.remat

        def make_layers(name: str) -> Layer:
            @nnx.split_rngs(splits=self.repeats)
            @nnx.vmap(in_axes=(0,))
            def make(rngs: nnx.Rngs) -> Layer:
                return Layer(name, config, rngs=rngs)

            return make(rngs)

        self.layers = nnx.List([make_layers(name) for name in names])
        arch = config.arch
        self.positions = Positions(config, rngs=rngs) if arch.positions != "none" else None
        self.short_conv = ShortConv(config) if config.short_conv else None
        self.ngram_memory = NgramMemory(config) if config.ngram_memory else None
        self.reads_tokens = self.ngram_memory is not None
        self.embed_norm = Norm(config.norm, config.width, arch) if arch.embed_norm else None
        self.block_len = math.lcm(*(layer.block_len for layer in self.layers))
        specs = [MIXERS[name] for name in names]
        self.capacity = config.capacity if any(spec.is_bounded for spec in specs) else None
        blocks = [layer.mixer.receptive_blocks for layer in self.layers]
        bounded = [count for count in blocks if count is not None]
        is_bounded = len(bounded) == len(blocks) and not self.reads_tokens
        is_bounded = is_bounded and self.positions is None  # which depend on all tokens before
        convolved_blocks = math.ceil(max(config.short_conv - 1, 0) / config.block_len)
        self.receptive_field = (
            (self.repeats * sum(bounded) + convolved_blocks) * config.block_len
            if is_bounded
            else None
        )
        prompt = jax.random.normal(rngs.params(), (config.fam_len, config.width))
        has_prompt = config.fam_init == "prompt" and any(spec.has_memory_prompt for spec in specs)
        self.prompt = nnx.Param(prompt) if has_prompt else None
        self.reads_prompt = any(layer.mixer.reads_prompt for layer in self.layers)
        # for each layer of the pattern
        self.has_memory_prompt = tuple(spec.has_memory_prompt for spec in specs)
        self.has_feature_map = tuple(spec.has_feature_map for spec in specs)
        self.rates = config.dropout
        self.key = empty_key() if any(vars(config.dropout).values()) else None
        # the layers' parameters by repeat, after `unstack_layers`
        self.layer_params = nnx.data(())

    def init_state(self, batch: int, offset: Array | None = None) -> State:
        """Return the initial states, [repeats b ...] for each layer of the pattern.

        After them come the states of the short convolution, of position embeddings and of the
        n-gram memory, if there are any.

        Args:
          offset: [b], as in `Context`, for encoding the FAM prompt.
        """
        return self._init_state(batch, lambda layer: layer.encode_memory_prompt, offset)

    def _init_state(
        self,
        batch: int,
        encode_prompt: Callable[[Layer], Callable[[Array, Array | None], Array]],
        offset: Array | None,
    ) -> State:
        """Return the initial states.

        Args:
          encode_prompt: maps a layer to the function (prompt, offset) -> prompt of the next layer.
        """

        def layers(prompt: Array, layers: list[Layer], _: None) -> tuple[Array, State]:
            states = []
            for layer in layers:
                states.append(
                    with_state_constraint(layer.init_state(batch, prompt), layer.state_axes())
                )
                if self.prompt is not None:
                    prompt = encode_prompt(layer)(prompt, offset)
            return prompt, tuple(states)

        # if all rows share a prompt, it has so few tokens that reducing their products is cheaper
        # than gathering the weights
        gather = self.prompt is not None and offset is not None
        states = self._scan_repeats(layers, self._prompt(offset), None, gather=gather)[1]
        return (*states, *(part.init_state(batch) for part in self._input_parts()))

    def _input_parts(self) -> list[ShortConv | Positions | NgramMemory]:
        """Return what adds to the embeddings and has a state, in the order of the states."""
        parts = (self.short_conv, self.positions, self.ngram_memory)
        return [part for part in parts if part is not None]

    def state_axes(self) -> State:
        def with_repeats(axes: tuple) -> tuple:
            return (None, *axes)

        axes = tuple(
            jax.tree.map(with_repeats, layer.state_axes(), is_leaf=is_axes) for layer in self.layers
        )
        return (*axes, *(part.state_axes() for part in self._input_parts()))

    def passable_state(self, state: State) -> State:
        layers, extra_state = self._split_state(state)
        passable = [
            layer.mixer.passable_state(s) for layer, s in zip(self.layers, layers, strict=True)
        ]
        return (*passable, *(() for _ in extra_state))

    def pass_state(self, fresh: State, saved: State) -> State:
        count = len(self.layers)
        passed = tuple(
            layer.mixer.pass_state(new, old)
            for layer, new, old in zip(self.layers, fresh[:count], saved[:count], strict=True)
        )
        return (*passed, *fresh[count:])

    def check_capacity(self, state: State, tokens: int, ctx: Context) -> None:
        """Raise a `UserError` if a call exceeds a layer's capacity, outside of jit.

        The mixer cannot raise it itself: within the stack its arrays are traced. With resets or
        padding nothing is raised, and the outputs at tokens beyond the capacity are NaN.
        """
        if ctx.reset is None and ctx.valid is None:
            for layer, old in zip(self.layers, state[: len(self.layers)], strict=True):
                layer.mixer.check_capacity(old, tokens)

    def __call__(self, x: Array, state: State, ctx: Context) -> tuple[Array, State]:
        """Process whole blocks: [b t d] -> [b t d], and the state after them.

        Raises:
          UserError: t is not a multiple of block_len, or a document exceeds the capacity.
        """
        if x.shape[1] % self.block_len:
            raise UserError(
                f"a call of {x.shape[1]} tokens: not a multiple of block_len={self.block_len}; pad "
                "it and set Context.valid, or process the remaining tokens with step"
            )
        self.check_capacity(state, x.shape[1], ctx)
        return self.run_layers(x, state, self._with_dropout_key(ctx), lambda layer: layer)

    def _with_dropout_key(self, ctx: Context) -> Context:
        """Return the context of a call in training, which draws dropout masks."""
        if self.key is None:
            return ctx
        return ctx._replace(key=jax.random.wrap_key_data(self.key[...]))

    def step(self, x: Array, state: State, ctx: Context) -> tuple[Array, State]:
        """Process one token per lane: [b 1 d] -> [b 1 d]; the state may be an unstacked one."""
        if not isinstance(state, UnstackedState):
            self.check_capacity(state, 1, ctx)
        encode_prompt = ctx.reset is not None
        return self.run_layers(x, state, ctx, lambda layer: layer.step, encode_prompt)

    def match_softmax(self, x: Array, ctx: Context) -> tuple[Array, Array]:
        """Process whole documents [b t d] with softmax attention in the linear layers.

        Returns:
          [b t d]; the errors of `Mixer.match_softmax` for the layers with a feature map, lowest
          first: [l b].
        """
        state = self._init_state(len(x), lambda layer: layer.encode_prompt_with_softmax, ctx.offset)
        state = self.shorten(state, 0)  # the final one is not used
        x, errors = self.run_layers(x, state, ctx, lambda layer: layer.match_softmax)
        matched = list(itertools.compress(errors, self.has_feature_map))
        stacked = jnp.stack(matched, 1)  # [repeats layers b]
        return x, stacked.reshape(-1, stacked.shape[-1])

    def project_source(self, source: Array) -> tuple[SourceKV, ...]:
        """Return the keys and values of an encoder's output [b s d] for each layer of the pattern.

        They are [repeats b s g ..].
        """

        def project(carry: None, layers: list[Layer], xs: None) -> tuple[None, Any]:
            return carry, tuple(layer.cross.project(source) for layer in layers if layer.cross)

        kv: tuple[SourceKV, ...] = self._scan_repeats(project, None, None)[1]
        return kv

    def summarize_source(self, source: EncodedSource) -> EncodedSource:
        cross = self.layers[0].cross
        assert cross is not None
        summarize = jax.vmap(cross.summarize, (0, None))
        return source._replace(kv=tuple(summarize(kv, source.mask) for kv in source.kv))

    def cache_sizes(self) -> tuple[int, ...]:
        if self.capacity is None:
            return (0,)
        doubled = range(_SHORTEST_CACHE.bit_length() - 1, (self.capacity - 1).bit_length())
        return (*(1 << i for i in doubled), self.capacity)

    def shorten(self, state: State, tokens: int) -> State:
        return shorten_caches(state, tokens)

    def lengthen(self, state: State, whole: State) -> State:
        return lengthen_caches(state, whole)

    def unstack(self, state: State) -> State:
        """Return the state for a loop of `step` in one program.

        Each layer then updates its own arrays in place. With stacked arrays the layer's whole state
        is sliced out and written back at every token, which for a KV cache costs many times as much
        as the attention.
        """
        layers, extra_state = self._split_state(state)
        return UnstackedState(
            tuple(_take_repeat(layers, r) for r in range(self.repeats)), extra_state
        )

    def unstack_layers(self, state: State) -> None:
        if isinstance(state, UnstackedState):
            _, params = nnx.split(self.layers)
            repeats = range(self.repeats)
            self.layer_params = nnx.data(tuple(_take_repeat(params, r) for r in repeats))

    def restack(self, state: State) -> State:
        if not isinstance(state, UnstackedState):
            return state
        return (*_stack_repeats(state.repeats), *state.extra_state)

    def row_axes(self, state: State) -> tuple[int, ...]:
        axes = super().row_axes(state)
        if not isinstance(state, UnstackedState):
            return axes
        count = len(axes) - len(jax.tree.leaves(state.extra_state))
        # each repeat has arrays of its own, without the repeats axis
        return tuple(axis - 1 for axis in axes[:count]) * self.repeats + axes[count:]

    def replace_memories(self, state: State, memories: list[Array]) -> State:
        """Return a state with other memories, given in the order of the method `memories`."""
        layers, extra_state = self._split_state(state)
        remaining = iter(memories)
        memory_layers = self.memory_layers(state)
        by_layer = tuple(
            next(remaining) if i in memory_layers else None for i in range(len(self.layers))
        )

        def replace(carry: None, layers: list[Layer], xs: Any) -> tuple[None, State]:
            new = [
                s if memory is None else layer.mixer.replace_memory(s, memory)
                for layer, s, memory in zip(layers, *xs, strict=True)
            ]
            return carry, tuple(new)

        states = self._scan_repeats(replace, None, (layers, by_layer))[1]
        return (*states, *extra_state)

    def call_with_losses(
        self, x: Array, state: State, ctx: Context
    ) -> tuple[Array, State, MemoryLosses]:
        """Process a call and return its memory losses, each a mean over the layers that have it.

        Returns:
          the output [b t d]; the state after the call; the losses.
        """
        ctx = self._with_dropout_key(ctx)
        x, results = self.run_layers(x, state, ctx, lambda layer: layer.call_with_losses)
        count = len(self.layers)
        states = tuple(after for after, _ in results[:count])
        losses = [losses for _, losses in results[:count] if losses is not None]
        return (
            x,
            (*states, *results[count:]),
            MemoryLosses(*map(_mean_known, zip(*losses, strict=True))),
        )

    def memory_metrics(self, x: Array, state: State, ctx: Context) -> dict[str, Array]:
        return memory_measures.memory_metrics(self, x, state, ctx)

    def memories(self, state: State) -> list[Array]:
        """Return the memories [repeats b f ...] of the layers that have one."""
        return [memory for memory in self._memories(state) if memory is not None]

    def memory_layers(self, state: State) -> list[int]:
        """Return the indices of the pattern layers that have a memory."""
        return [i for i, memory in enumerate(self._memories(state)) if memory is not None]

    def _memories(self, state: State) -> list[Array | None]:
        layers, _ = self._split_state(state)
        return [layer.mixer.memory(s) for layer, s in zip(self.layers, layers, strict=True)]

    def make_input(
        self, x: Array, states: tuple[Any, ...], ctx: Context
    ) -> tuple[Array, tuple[Any, ...]]:
        """Return the first layer's input for token embeddings [b t d], and the next states.

        Args:
          states: those that follow the layers' states, see `init_state`.
        """
        new = []
        for part, state in zip(self._input_parts(), states, strict=True):
            x, after = part(x, state, ctx)
            new.append(after)
        return (x if self.embed_norm is None else self.embed_norm(x, x.dtype)), tuple(new)

    def run_layers(
        self,
        x: Array,
        state: State,
        ctx: Context,
        layer_method: LayerMethod,
        encode_prompt: bool | None = None,
    ) -> tuple[Array, State]:
        """Apply one method of each layer, in order: the forward pass, a step or a measurement.

        Args:
          layer_method: maps a layer to a function (x, state, ctx) -> (output, result).
          encode_prompt: whether to pass the FAM prompt through the layers; None: if a mixer or a
            reset needs it.

        Returns:
          the output [b t d]; the layers' results, in the structure of a state.
        """
        if encode_prompt is None:  # in a call; `step` gives it
            encode_prompt = self.reads_prompt or ctx.reset is not None
        encode_prompt = encode_prompt and self.prompt is not None
        states, extra_state = self._split_state(state)
        x, extra_state = self.make_input(x, extra_state, ctx)
        x = apply_dropout(x, make_dropout(self.rates.embedding, ctx.key, EMBEDDING))

        def layers(carry, layers: list[Layer], xs: tuple[State, Array | None, Any]):
            x, prompt = carry
            states, keys, sources = xs
            new = []
            for i, (layer, old) in enumerate(zip(layers, states, strict=True)):
                context = ctx._replace(prompt=prompt, key=None if keys is None else keys[i])
                if sources is not None:
                    context = context._replace(source=ctx.source._replace(kv=sources[i]))
                x, out = layer_method(layer)(with_logical_constraint(x, TOKENS), old, context)
                new.append(out)
                prompt = layer.encode_memory_prompt(prompt, ctx.offset) if encode_prompt else prompt
            return (x, prompt), tuple(new)

        start = (x, self._prompt(ctx.offset) if encode_prompt else None)
        unstack = isinstance(state, UnstackedState)
        keys = split_key(ctx.key, LAYER, self.repeats, len(self.layers))
        sources = None if ctx.source is None else ctx.source.kv
        xs: Any = (states, keys, sources)
        if unstack:
            xs = [(old, None, _take_repeat(sources, r)) for r, old in enumerate(states)]
        # for single tokens of few rows, reducing products is cheaper than gathering weights; if the
        # rows are sharded, GSPMD gathers them all the same
        (x, _), states = self._scan_repeats(layers, start, xs, unstack, gather=x.shape[1] > 1)
        x = apply_dropout(
            with_logical_constraint(x, TOKENS), make_dropout(self.rates.output, ctx.key, OUTPUT)
        )
        return x, UnstackedState(states, extra_state) if unstack else (*states, *extra_state)

    def _split_state(self, state: State) -> tuple[State, State]:
        """Return the layers' states, stacked or by repeat, and the extra state."""
        count = len(self.layers)
        return state if isinstance(state, UnstackedState) else (state[:count], state[count:])

    def _prompt(self, offset: Array | None = None) -> Array | None:
        """Return the FAM prompt [f d], with an offset repeated for each row, [b f d]."""
        if self.prompt is None or offset is None:
            return None if self.prompt is None else self.prompt[...]
        rows = jnp.broadcast_to(self.prompt[...], (len(offset), *self.prompt.shape))
        return with_logical_constraint(rows, ("batch", None, None))

    def _scan_repeats(
        self, body: Any, carry: Any, xs: Any, unstack: bool = False, gather: bool = True
    ) -> tuple[Any, State]:
        """Run `body(carry, layers, xs) -> (carry, states)` over the repeats of the pattern.

        Args:
          xs: arrays with the repeats on their first axis; with `unstack`, a sequence of the
            repeats. The returned states have the same form.
          gather: whether to all-gather a layer's weights first, see `fsdp_all_gather`.
        """
        graph, params = nnx.split(self.layers)
        scanned = self.scanned and not unstack

        def scan_body(carry, xs):
            params, xs = xs
            params = fsdp_all_gather(params) if gather else params
            return body(carry, nnx.merge(graph, params), xs)

        scan_body = remat_with_policy(scan_body, self.remat, scanned=scanned and self.repeats > 1)
        if scanned:
            return jax.lax.scan(scan_body, carry, (params, xs), length=self.repeats)
        collected = []
        for r in range(self.repeats):
            xs_r = xs[r] if unstack else _take_repeat(xs, r)
            layer_params = self.layer_params[r] if self.layer_params else _take_repeat(params, r)
            carry, new = scan_body(carry, (layer_params, xs_r))
            collected.append(new)
        return carry, tuple(collected) if unstack else _stack_repeats(collected)


def _mean_known(values: tuple[Array | None, ...]) -> Array | None:
    """Return the mean of the values that are not None; None if all are."""
    known = [value for value in values if value is not None]
    return jnp.stack(known).mean() if known else None


def _take_repeat(stacked: Any, r: int) -> Any:
    """[repeats ...] -> [...]."""
    return jax.tree.map(operator.itemgetter(r), stacked)


def _stack_repeats(repeats: Sequence[Any]) -> Any:
    """Return the inverse of `_take_repeat`."""
    return jax.tree.map(lambda *a: jnp.stack(a), *repeats)
