"""The Feedback Transformer (arXiv 2002.09402, 3.3), and the Transformer of the same parts.

    z_t^l = Attn(x_t^l, {m_{t-tau}, ..., m_{t-1}})       m_t = sum_l softmax(w)_l x_t^l   (Eq. 1)

All layers attend to one memory that is made of all layers, so a token must be read to its end
before the next one begins: `famjax.ops.token_scan` is the loop, and its gradient. Where the memory
of a layer is its own input (composition "previous"), it is a Transformer; the class `Transformer`
reads the same parameters and states all tokens at once.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.core import sharding
from famjax.core.config import ModelConfig
from famjax.core.types import Array, Context, State
from famjax.layers.dropout import EMBEDDING, OUTPUT, apply_dropout, make_dropout, no_key
from famjax.layers.qkv import Keys
from famjax.stacks.feedback import ring, solve
from famjax.stacks.feedback.parts import (
    FeedbackLayer,
    Partitioned,
    Random,
    combine,
    partition,
)
from famjax.stacks.feedback.plan import Plan
from famjax.stacks.feedback.ring import FeedbackState, Pair, Reading
from famjax.stacks.feedback.step import slots_of, step


class Feedback(nnx.Module):
    """Layers that attend to a memory of earlier tokens, each token read after the one before it.

    Parameters of the layers are stacked on a leading axis.
    """

    parallel = False

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        c = config.feedback
        self.plan = Plan(config, "previous" if self.parallel else c.composition)

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=(0,))
        def make(rngs: nnx.Rngs) -> FeedbackLayer:
            return FeedbackLayer(config, rngs=rngs)

        self.layers = nnx.List([make(rngs)])
        self.keys = Keys(config, rngs=rngs) if c.shared_kv else None
        draw = jax.random.normal(rngs.params(), (self.plan.head_dim, c.span))
        self.distances = nnx.Param(draw) if c.positions == "learned" else None
        learned = self.plan.composition in ("all", "same_and_lower")
        logits = jnp.zeros((self.plan.memories, config.layers + 1))
        self.mix = nnx.Param(logits) if learned else None
        self.key = no_key() if any(vars(config.dropout).values()) else None
        self.block_len = 1
        self.capacity = None
        # tokens of a call that are enough: all that a call is padded with is read one by one too
        self.call_len = 1024 if self.parallel else 128
        # tokens before one that its output can depend on, at most; None is all
        self.receptive_field: int | None = c.span * config.layers if self.parallel else None

    def init_state(self, batch: int) -> FeedbackState:
        """Return the state of lanes that have read nothing."""
        return ring.empty(self.plan, batch)

    def state_axes(self) -> FeedbackState:
        return ring.axes(self.plan)

    def pass_state(self, fresh: FeedbackState, saved: State) -> FeedbackState:
        """Random state passing (TransformerFAM B.2.3) passes FAMs, of which there are none."""
        return fresh

    def __call__(self, x: Array, state: FeedbackState, ctx: Context) -> tuple[Array, FeedbackState]:
        """[b t d] -> [b t d]. A position offset changes nothing: all positions are relative."""
        # memories of all tokens are read, most of them one token after the other
        x = sharding.all_gather_tokens(x)
        plan, random = self.plan, self._random()
        key = None if random is None else random.key
        rates = plan.model.dropout
        x = apply_dropout(x, make_dropout(rates.embedding, key, EMBEDDING))
        reading = Reading.of(plan, state, ctx, x.shape[1])
        given = (plan, self._divided(), x, self._line(state), reading.first, random)
        if self.parallel:
            y, slots, memory = solve.at_once(*given)
        elif plan.config.sweeps:
            y, slots, memory = solve.fixed_point(*given)
        else:
            y, slots, memory = solve.sequential(*given)
        y = apply_dropout(y, make_dropout(rates.output, key, OUTPUT))
        keys = (
            (memory,)
            if plan.remembers_states
            else tuple(jnp.stack(of) for of in zip(*slots, strict=True))
        )
        return y, ring.final_state(plan, state, keys, reading)

    def step(self, x: Array, state: FeedbackState, ctx: Context) -> tuple[Array, FeedbackState]:
        """[b 1 d] -> [b 1 d]."""
        return step(self.plan, combine(*self._divided()), x, state, ctx)

    def report(self, x: Array, state: FeedbackState, ctx: Context) -> dict[str, Array]:
        """Return the mean of learned spans, in tokens, and by how much the last sweep still changed
        the memory of a call; what there is of them."""
        found = {}
        if (spans := self.spans()) is not None:
            found["mean_span"] = spans.mean()
        if self.plan.config.sweeps:
            reading = Reading.of(self.plan, state, ctx, x.shape[1])
            given = (self._divided(), x, self._line(state), reading.first, None)
            found["sweep_change"] = solve.sweep(self.plan, *given)[1]
        return found

    def shares(self) -> Array:
        """Return what share of each state a memory is made of (Equation 1): [j L+1]."""
        return self.plan.mix(None if self.mix is None else self.mix[...])

    def spans(self) -> Array | None:
        """Return the tokens that each head sees, [L h], where they are learned."""
        share = self.layers[0].span
        return None if share is None else share[...] * self.plan.span

    def loss(self) -> Array:
        """Return adaptive span's loss: its coefficient times the mean span, summed over layers."""
        spans = self.spans()
        return jnp.zeros(()) if spans is None else self.plan.config.span_loss * spans.mean(1).sum()

    def attention_span(self, margin: float = 0.0, to: int = 64) -> tuple[int, ...]:
        """Return how many slots the layers of each set need to look at, in steps of `to`.

        Computed outside of compiled functions, whose shapes it decides (`set_attention_span`).

        Args:
          margin: tokens by which spans may have grown until it is asked again.
        """
        spans, c = self.spans(), self.plan.config
        if spans is None:
            return self.plan.spans
        longest = [float(x) + c.span_ramp + margin for x in jax.device_get(spans.max(1))]
        if self.plan.sets == 1:
            longest = [max(longest)]
        return tuple(min(c.span, -(-math.ceil(x) // to) * to) for x in longest)

    def set_attention_span(self, slots: tuple[int, ...]) -> None:
        """Look at the newest slots only, so many for each set; () is all."""
        self.plan = dataclasses.replace(self.plan, attention_span=slots)

    def with_memory_cache(self) -> None:
        """Let the state be the memory, one vector a token, and not keys and values (v1 5.3)."""
        config = dataclasses.replace(self.plan.config, cache="memory")
        model = dataclasses.replace(self.plan.model, feedback=config)
        self.plan = dataclasses.replace(self.plan, model=model)

    @property
    def approximate(self) -> bool:
        """Tell whether calls are not exact."""
        return self.plan.config.sweeps > 0

    def _divided(self) -> Partitioned:
        distances = None if self.distances is None else self.distances[...]
        return partition(self.plan, self.layers[0], self.keys, distances, self.shares())

    def _line(self, state: FeedbackState) -> list[Pair]:
        """Return what the layers look at of the slots before a call: [b g n e], of each set."""
        plan = self.plan
        line = state._replace(slots=ring.line(plan, state))
        pairs = slots_of(plan, combine(*self._divided()), line)
        return [
            (k[:, :, plan.span - n :], v[:, :, plan.span - n :])
            for (k, v), n in zip(pairs, plan.spans, strict=True)
        ]

    def _random(self) -> Random | None:
        if self.key is None:
            return None
        key = jax.random.wrap_key_data(self.key[...])
        rate, count = self.plan.model.dropout.layer, self.plan.model.layers
        return Random(key, jax.random.bernoulli(jax.random.fold_in(key, 2**30), rate, (count,)))


class Transformer(Feedback):
    """The Transformer of the same parts: each layer remembers what it reads, all tokens at once."""

    parallel = True
