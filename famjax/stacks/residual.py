"""The residual stack: a pattern of layers repeated, scanned or unrolled to the same numbers."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.core.config import ModelConfig
from famjax.core.errors import UserError
from famjax.core.remat import remat_with_policy
from famjax.core.sharding import (
    TOKENS,
    fsdp_all_gather,
    with_logical_constraint,
    with_state_constraint,
)
from famjax.core.types import Array, Context, State, param_dtype
from famjax.layers.dropout import (
    EMBEDDING,
    LAYER,
    OUTPUT,
    apply_dropout,
    make_dropout,
    no_key,
    split,
)
from famjax.layers.mlp import FeedForward
from famjax.layers.positions import Positions
from famjax.mixers import make_mixer
from famjax.mixers.fam import Fam, FamState
from famjax.mixers.full import Full
from famjax.mixers.linear import Linear


class Layer(nnx.Module):
    """A mixer and a feed-forward. The mixer may use the feed-forward on its memory (FAM does).

    What LayerDrop leaves out of a call is what the layer adds to the stream: its state is what it
    would have been, so that the memory has no holes.
    """

    def __init__(self, name: str, config: ModelConfig, *, rngs: nnx.Rngs):
        self.mixer = make_mixer(name, config, rngs=rngs)
        self.mlp = FeedForward(config, rngs=rngs)
        self.rate = config.dropout.layer
        self.block_len = self.mixer.block_len

    def init_state(self, batch: int, prompt: Array) -> State:
        return self.mixer.init_state(batch, prompt)

    def state_axes(self) -> State:
        return self.mixer.state_axes()

    def encode_memory_prompt(self, prompt: Array, offset: Array | None = None) -> Array:
        return self.mlp(self.mixer.encode_memory_prompt(prompt, offset), prompt)

    def __call__(self, x: Array, state: State, ctx: Context) -> tuple[Array, State]:
        a, state = self.mixer(x, state, ctx, self.mlp)
        y = self.mlp(a, x, ctx.key)
        if ctx.key is None or not self.rate:
            return y, state
        left_out = jax.random.bernoulli(jax.random.fold_in(ctx.key, LAYER), self.rate)
        return jnp.where(left_out, x, y), state

    def step(self, x: Array, state: State, ctx: Context) -> tuple[Array, State]:
        a, state = self.mixer.step(x, state, ctx, self.mlp)
        return self.mlp(a, x), state

    def match(self, x: Array, state: State, ctx: Context) -> tuple[Array, Array]:
        """Return what the layer gives with softmax in the place of phi, and `Linear.match`'s error.

        A layer of another mixer is as it is, its errors 0.
        """
        if not isinstance(self.mixer, Linear):
            return self(x, state, ctx)[0], jnp.zeros(len(x), param_dtype())
        a, error = self.mixer.match(x, ctx)
        return self.mlp(a, x), error

    def match_prompt(self, prompt: Array, offset: Array | None = None) -> Array:
        """Return `encode_memory_prompt` with softmax in the place of phi."""
        if not isinstance(self.mixer, Linear):
            return self.encode_memory_prompt(prompt, offset)
        return self.mlp(self.mixer.qkv.encode_memory_prompt(prompt, offset), prompt)

    def attention_map(self, x: Array) -> Array | None:
        """Return the attention of documents read in one call, [b t d] -> [b h t t].

        FAM's goes to memories beside tokens: None.
        """
        return None if isinstance(self.mixer, Fam) else self.mixer.attention_map(x)

    def attention_mass(self, x: Array, state: State, ctx: Context) -> tuple[Array, Array]:
        """Return the output, and the mean share of attention that goes to the FAM."""
        share = jnp.zeros(())
        if isinstance(self.mixer, Fam):
            share = self.mixer.attention_mass(x, state, ctx, self.mlp)
        return self(x, state, ctx)[0], share


def passable_state(state: State) -> State:
    """Return what of a stack's state `pass_state` reads: the FAMs, without the windows."""
    # the type of a state without a window is not worth a name
    return tuple(
        s._replace(window=()) if isinstance(s, FamState) else ()  # type: ignore[arg-type]
        for s in state
    )


class UnstackedState(NamedTuple):
    """A state whose layers have arrays of their own.

    Attributes:
      repeats: of each repeat of the pattern, over the pattern, [b ...].
      stood: as in the stacked state, what is not the layers'.
    """

    repeats: tuple[State, ...]
    extra_state: State


class ResidualStack(nnx.Module):
    """Layers on one residual stream, and the FAM prompt that gives each its initial memory (B.1).

    Parameters and states of equal layers are stacked on a leading axis r, the repeats of the
    pattern, whether the layers are scanned or not; so checkpoints do not depend on that choice.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        names = config.mixer.split(",")
        self.repeats = config.layers // len(names)
        self.scanned = config.scan_layers
        self.remat = config.remat

        def repeated(name: str) -> Layer:
            @nnx.split_rngs(splits=self.repeats)
            @nnx.vmap(in_axes=(0,))
            def make(rngs: nnx.Rngs) -> Layer:
                return Layer(name, config, rngs=rngs)

            return make(rngs)

        self.layers = nnx.List([repeated(name) for name in names])
        self.positions = Positions(config, rngs=rngs) if config.arch.learned_positions else None
        self.block_len = math.lcm(*(layer.block_len for layer in self.layers))
        # tokens a document may have; None is any number
        self.capacity = config.capacity if "full" in names else None
        reaches = [layer.mixer.receptive_field for layer in self.layers]
        # tokens before a block that its outputs can depend on, at most; None is all
        self.receptive_field = (
            None if None in reaches else self.repeats * sum(reaches) * config.block_len
        )
        prompt = jax.random.normal(rngs.params(), (config.fam_len, config.width))
        self.prompt = nnx.Param(prompt) if "fam" in names else None
        self.rates = config.dropout
        self.key = no_key() if any(vars(config.dropout).values()) else None

    def init_state(self, batch: int, offset: Array | None = None) -> State:
        """Return the states of lanes that have read nothing: over the pattern, [r b ...].

        Learned positions come last, if there are any.

        Args:
          offset: [b], that of `Context`, for the FAM prompt's way through the layers.
        """
        return self._init_state(batch, lambda layer: layer.encode_memory_prompt, offset)

    def _init_state(self, batch: int, encode: Any, offset: Array | None) -> State:
        def layers(prompt: Array, layers: list[Layer], _: None) -> tuple[Array, State]:
            states = []
            for layer in layers:
                states.append(
                    with_state_constraint(layer.init_state(batch, prompt), layer.state_axes())
                )
                if self.prompt is not None:
                    prompt = encode(layer)(prompt, offset)
            return prompt, tuple(states)

        # of one prompt's few tokens products are summed, which is less than to fetch all weights
        fetch = self.prompt is not None and offset is not None
        states = self._repeat(layers, self._prompt(offset), None, fetch=fetch)[1]
        return states if self.positions is None else (*states, self.positions.init_state(batch))

    def state_axes(self) -> State:
        def with_repeats(axes: tuple) -> tuple:
            return (None, *axes)

        leaf = lambda x: isinstance(x, tuple) and not hasattr(x, "_fields")  # noqa: E731
        axes = tuple(
            jax.tree.map(with_repeats, layer.state_axes(), is_leaf=leaf) for layer in self.layers
        )
        return axes if self.positions is None else (*axes, self.positions.state_axes())

    def pass_state(self, fresh: State, saved: State) -> State:
        """Random state passing (B.2.3): `fresh`, with what of `saved` a document may start from.

        `saved` is a state of this stack, or what `passable_state` keeps of one.
        """
        count = len(self.layers)
        passed = tuple(
            layer.mixer.pass_state(new, old) if hasattr(layer.mixer, "pass_state") else new
            for layer, new, old in zip(self.layers, fresh[:count], saved[:count], strict=True)
        )
        return (*passed, *fresh[count:])

    def refuse(self, state: State, tokens: int, ctx: Context) -> None:
        """Raise a `UserError` where full attention has no room for a call, if Python can see it.

        The mixer itself cannot: within the stack its arrays are traced. Where lanes reset or are
        padded, what does not fit gives NaN.
        """
        for layer, old in zip(self.layers, state[: len(self.layers)], strict=True):
            if isinstance(layer.mixer, Full) and ctx.reset is None and ctx.valid is None:
                layer.mixer.check_capacity(old.length + tokens - 1)

    def __call__(self, x: Array, state: State, ctx: Context) -> tuple[Array, State]:
        """[b t d] -> [b t d], t a multiple of block_len, or a `UserError`."""
        if x.shape[1] % self.block_len:
            raise UserError(
                f"a call of {x.shape[1]} tokens does not fill blocks of {self.block_len}; pad them "
                "and say so in Context.valid, or read the rest with step"
            )
        self.refuse(state, x.shape[1], ctx)
        if self.key is not None:
            ctx = ctx._replace(key=jax.random.wrap_key_data(self.key[...]))
        return self._run(x, state, ctx, lambda layer: layer)

    def step(self, x: Array, state: State, ctx: Context) -> tuple[Array, State]:
        """[b 1 d] -> [b 1 d]; the state as `init_state` or as `unstack` returns it."""
        if not isinstance(state, UnstackedState):
            self.refuse(state, 1, ctx)
        return self._run(x, state, ctx, lambda layer: layer.step)

    def match(self, x: Array, ctx: Context) -> tuple[Array, Array]:
        """Read whole documents [b t d] with softmax in the place of linear layers' phi.

        Returns:
          [b t d], and what phi would have made of it by linear layer, the lowest first, and row:
          `Linear.match`'s errors [l b].
        """
        state = self._init_state(len(x), lambda layer: layer.match_prompt, ctx.offset)
        x, errors = self._run(x, state, ctx, lambda layer: layer.match)
        linear = [isinstance(layer.mixer, Linear) for layer in self.layers]
        of = jnp.stack(list(itertools.compress(errors, linear)), 1)  # [r p b]
        return x, of.reshape(-1, of.shape[-1])

    def unstack(self, state: State) -> UnstackedState:
        """Return the state for a loop of `step`, within one program.

        A layer writes to arrays of its own where they lie. In stacked ones it would be a copy of
        the layer's whole state out and back at every token: of a cache, many times the attention.
        """
        layers, extra_state = self._parted(state)
        return UnstackedState(
            tuple(_repeat_of(layers, r) for r in range(self.repeats)), extra_state
        )

    def restack(self, state: UnstackedState) -> State:
        """Undo `unstack`."""
        return (*_stacked(state.repeats), *state.extra_state)

    def attention_mass(self, x: Array, state: State, ctx: Context) -> Array:
        """Return the mean share of attention that goes to the FAM, by layer: [l]."""
        _, shares = self._run(x, state, ctx, lambda layer: layer.attention_mass)
        return jnp.stack(shares[: len(self.layers)], 1).reshape(-1)

    def report(self, x: Array, state: State, ctx: Context) -> dict[str, Array]:
        """Return how large the FAMs are behind a call, and how much attention they had in it."""
        if self.prompt is None:
            return {}
        mass = self.attention_mass(x, state, ctx)
        fams = self.feedback(self(x, state, ctx)[1])
        norms = jnp.stack([jnp.sqrt(jnp.square(fam).mean()) for fam in fams])
        # over the layers that have a FAM; the others have no mass on it
        return {"state_norm": norms.mean(), "fam_attention": mass.sum() / sum(map(len, fams))}

    def loss(self) -> Array:
        """Return what the stack adds to the training loss: nothing."""
        return jnp.zeros(())

    def feedback(self, state: State) -> list[Array]:
        """Return the FAMs of a state: [r b f d] for each FAM layer of the pattern."""
        return [s.fam for s in state if isinstance(s, FamState)]

    def _run(self, x: Array, state: State, ctx: Context, read: Any) -> tuple[Array, State]:
        follow = self.prompt is not None and ctx.reset is not None
        states, extra_state = self._parted(state)
        if self.positions is not None:
            x, after = self.positions(x, extra_state[0], ctx)
            extra_state = (after,)
        x = apply_dropout(x, make_dropout(self.rates.embedding, ctx.key, EMBEDDING))

        def layers(carry, layers: list[Layer], xs: tuple[State, Array | None]):
            x, prompt = carry
            states, keys = xs
            new = []
            for i, (layer, old) in enumerate(zip(layers, states, strict=True)):
                context = ctx._replace(prompt=prompt, key=None if keys is None else keys[i])
                x, out = read(layer)(with_logical_constraint(x, TOKENS), old, context)
                new.append(out)
                prompt = layer.encode_memory_prompt(prompt, ctx.offset) if follow else prompt
            return (x, prompt), tuple(new)

        start = (x, self._prompt(ctx.offset) if follow else None)
        unstack = isinstance(state, UnstackedState)
        keys = split(ctx.key, LAYER, self.repeats, len(self.layers))
        given = [(old, None) for old in states] if unstack else (states, keys)
        (x, _), states = self._repeat(layers, start, given, unstack)
        x = apply_dropout(
            with_logical_constraint(x, TOKENS), make_dropout(self.rates.output, ctx.key, OUTPUT)
        )
        return x, UnstackedState(states, extra_state) if unstack else (*states, *extra_state)

    def _parted(self, state: State) -> tuple[State, State]:
        """Return the layers' states, stacked or by repeat, and the rest."""
        count = len(self.layers)
        return state if isinstance(state, UnstackedState) else (state[:count], state[count:])

    def _prompt(self, offset: Array | None = None) -> Array | None:
        """Return the FAM prompt at the embedding: [f d], with an offset one for each row."""
        if self.prompt is None or offset is None:
            return None if self.prompt is None else self.prompt[...]
        rows = jnp.broadcast_to(self.prompt[...], (len(offset), *self.prompt.shape))
        return with_logical_constraint(rows, ("batch", None, None))

    def _repeat(
        self, body: Any, carry: Any, given: Any, unstack: bool = False, fetch: bool = True
    ) -> tuple[Any, State]:
        """Run `body(carry, layers, given) -> (carry, states)` over the repeats of the pattern.

        Args:
          given: has the repeats on the first axis, or with `unstack` is a sequence of them. So is
            what is returned.
          fetch: a layer's weights are brought together first, see `fsdp_all_gather`.
        """
        graph, params = nnx.split(self.layers)
        scanned = self.scanned and not unstack

        def one(carry, xs):
            params, given = xs
            params = fsdp_all_gather(params) if fetch else params
            return body(carry, nnx.merge(graph, params), given)

        one = remat_with_policy(one, self.remat, scanned=scanned and self.repeats > 1)
        if scanned:
            return jax.lax.scan(one, carry, (params, given), length=self.repeats)
        collected = []
        for r in range(self.repeats):
            of = given[r] if unstack else _repeat_of(given, r)
            carry, new = one(carry, (_repeat_of(params, r), of))
            collected.append(new)
        return carry, tuple(collected) if unstack else _stacked(collected)


def _repeat_of(stacked: Any, r: int) -> Any:
    """[r ...] -> [...]."""
    return jax.tree.map(operator.itemgetter(r), stacked)


def _stacked(repeats: Sequence[Any]) -> Any:
    """Undo `_repeat_of`."""
    return jax.tree.map(lambda *a: jnp.stack(a), *repeats)
