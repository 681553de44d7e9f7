"""The Feedback Transformer (arXiv 2002.09402, 3.3), and a Transformer with the same layers.

    z_t^l = Attn(x_t^l, {m_{t-tau}, ..., m_{t-1}})       m_t = sum_l softmax(w)_l x_t^l   (Eq. 1)

All layers attend to one memory that depends on all layers, so tokens must be processed
sequentially: `famjax.ops.token_scan` has the scan and its gradient. If the memory of a layer is its
own input (composition "previous"), the model is a Transformer; the class `Transformer` computes it
for all tokens in parallel, with the same parameters and states.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig
from famjax.core.types import Array, Context
from famjax.layers.cross_attention import EncodedSource, SourceKV
from famjax.layers.dropout import EMBEDDING, OUTPUT, apply_dropout, empty_key, make_dropout
from famjax.layers.qkv import KVProjection
from famjax.parallel import sharding, traced
from famjax.stacks.feedback import ring, solve
from famjax.stacks.feedback.parts import (
    DropoutRng,
    FeedbackLayer,
    Partitioned,
    combine,
    partition,
)
from famjax.stacks.feedback.ring import KV, CallIndices, FeedbackState
from famjax.stacks.feedback.spec import FeedbackSpec
from famjax.stacks.feedback.step import ring_kv, step
from famjax.stacks.stack import Stack

# adaptive span; relative positions; the mixing weights of Equation 1
sharding.register_parameter_axes(
    (r"layers/0/span$", (None,)), (r"distances$", (None, None)), (r"mix$", (None, None))
)

# the site of LayerDrop's key, far from LAYER + i, which the layers fold in
_LAYER_DROP = 2**30

# the entries that layers with learned spans attend to are a multiple of this, so that few programs
# are compiled
ENTRIES = 64


class Feedback(Stack):
    """Layers that attend to a memory of earlier tokens, which are processed sequentially.

    The layers' parameters are stacked on a leading axis.
    """

    parallel = False

    def __init__(self, config: ResolvedModelConfig, *, rngs: nnx.Rngs):
        c = config.feedback
        self.spec = FeedbackSpec(config, "previous" if self.parallel else c.composition)

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=(0,))
        def make(rngs: nnx.Rngs) -> FeedbackLayer:
            return FeedbackLayer(config, rngs=rngs)

        self.layers = nnx.List([make(rngs)])
        self.keys = KVProjection(config, rngs=rngs) if c.shared_kv else None
        draw = jax.random.normal(rngs.params(), (self.spec.head_dim, c.span))
        self.distances = nnx.Param(draw) if c.positions == "learned" else None
        learned = self.spec.composition in ("all", "same_and_lower")
        logits = jnp.zeros((self.spec.memories, config.layers + 1))
        # logits; existing checkpoints use this name
        self.mix = nnx.Param(logits) if learned else None
        self.key = empty_key() if any(vars(config.dropout).values()) else None
        self.block_len = 1
        self.capacity = None
        # an efficient number of tokens per call: padding is processed sequentially, too
        self.call_len = 1024 if self.parallel else 128
        # maximum number of earlier tokens that an output depends on; None means unbounded
        self.receptive_field = c.span * config.layers if self.parallel else None

    def init_state(self, batch: int, offset: Array | None = None) -> FeedbackState:
        return ring.init_state(self.spec, batch)

    def state_axes(self) -> FeedbackState:
        return ring.state_axes(self.spec)

    def __call__(self, x: Array, state: FeedbackState, ctx: Context) -> tuple[Array, FeedbackState]:
        """Process any number of tokens: [b t d] -> [b t d].

        A position offset has no effect, since all positions are relative.
        """
        # every token attends to memories of all tokens, which are mostly computed sequentially
        x = traced.all_gather_tokens(x)
        spec, rng = self.spec, self._dropout_rng()
        key = None if rng is None else rng.key
        rates = spec.model.dropout
        x = apply_dropout(x, make_dropout(rates.embedding, key, EMBEDDING))
        indices = CallIndices.from_context(spec, state, ctx, x.shape[1])
        args = (spec, self._partition(), x, self._history(state), indices.first, rng, ctx.source)
        if self.parallel:
            y, entries, memory = solve.parallel(*args)
        elif spec.config.sweeps:
            y, entries, memory = solve.fixed_point(*args)
        else:
            y, entries, memory = solve.sequential(*args)
        y = apply_dropout(y, make_dropout(rates.output, key, OUTPUT))
        keys = (
            (memory,)
            if spec.caches_memory
            else tuple(jnp.stack(arrays) for arrays in zip(*entries, strict=True))
        )
        return y, ring.final_state(spec, state, keys, indices)

    def step(self, x: Array, state: FeedbackState, ctx: Context) -> tuple[Array, FeedbackState]:
        """Process one token per lane: [b 1 d] -> [b 1 d]."""
        return step(self.spec, combine(*self._partition()), x, state, ctx)

    def project_source(self, source: Array) -> SourceKV:
        """Return each layer's keys and values of an encoder's output: [b s d] -> [l b s g ..]."""
        cross = [layer.cross for layer in combine(*self._partition()).layers]
        kv = [attention.project(source) for attention in cross if attention is not None]
        return jax.tree.map(lambda *a: jnp.stack(a), *kv)

    def summarize_source(self, source: EncodedSource) -> EncodedSource:
        cross = combine(*self._partition()).layers[0].cross
        assert cross is not None
        summarize = jax.vmap(cross.summarize, (0, None))
        return source._replace(kv=summarize(source.kv, source.mask))

    def memory_metrics(self, x: Array, state: FeedbackState, ctx: Context) -> dict[str, Array]:
        """Return the metrics of the memory that apply to the model.

        mean_span: the mean learned span, in tokens.
        sweep_change: the relative change of the memory in the last sweep.
        """
        metrics = {}
        if (spans := self.spans()) is not None:
            metrics["mean_span"] = spans.mean()
        if self.spec.config.sweeps:
            indices = CallIndices.from_context(self.spec, state, ctx, x.shape[1])
            args = (self._partition(), x, self._history(state), indices.first, None, ctx.source)
            metrics["sweep_change"] = solve.sweep(self.spec, *args)[1]
        return metrics

    def mixing_weights(self) -> Array:
        """Return the weights of the layers' states in each memory (Equation 1): [j l+1]."""
        return self.spec.mixing_weights(None if self.mix is None else self.mix[...])

    def spans(self) -> Array | None:
        """Return the learned span of each head in tokens, [l h]; None if spans are not learned."""
        share = self.layers[0].span
        return None if share is None else share[...] * self.spec.span

    def auxiliary_loss(self) -> Array:
        """Return the adaptive-span loss: coefficient times mean span, summed over layers."""
        spans = self.spans()
        return jnp.zeros(()) if spans is None else self.spec.config.span_loss * spans.mean(1).sum()

    def attention_span(self, margin: float = 0.0) -> tuple[int, ...]:
        """Return how many entries the layers of each set of keys must attend to.

        Results are multiples of `ENTRIES`, or the maximum span. It must be called outside of jit,
        since the result determines shapes (`set_attention_span`).

        Args:
          margin: number of tokens by which spans may grow until the next call of this.
        """
        spans, c = self.spans(), self.spec.config
        if spans is None:
            return self.spec.spans
        longest = [float(x) + c.span_ramp + margin for x in jax.device_get(spans.max(1))]
        if self.spec.sets == 1:
            longest = [max(longest)]
        return tuple(min(c.span, -(-math.ceil(x) // ENTRIES) * ENTRIES) for x in longest)

    def set_attention_span(self, entries: tuple[int, ...]) -> None:
        """Attend only to the newest `entries` of each set of keys from now on; () means all."""
        self.spec = dataclasses.replace(self.spec, attention_span=entries)

    def use_memory_cache(self) -> None:
        """Cache memories, one vector per token, instead of keys and values (v1 5.3)."""
        config = dataclasses.replace(self.spec.config, cache="memory")
        model = dataclasses.replace(self.spec.model, feedback=config)
        self.spec = dataclasses.replace(self.spec, model=model)

    @property
    def is_approximate(self) -> bool:
        """Return whether calls are approximate."""
        return self.spec.config.sweeps > 0

    def _partition(self) -> Partitioned:
        distances = None if self.distances is None else self.distances[...]
        return partition(self.spec, self.layers[0], self.keys, distances, self.mixing_weights())

    def _history(self, state: FeedbackState) -> list[KV]:
        """Return the entries before a call that the layers attend to: [b g s e], for each set."""
        spec = self.spec
        unrolled = state._replace(slots=ring.unroll_ring(spec, state))
        pairs = ring_kv(spec, combine(*self._partition()), unrolled)
        return [
            (k[:, :, spec.span - n :], v[:, :, spec.span - n :])
            for (k, v), n in zip(pairs, spec.spans, strict=True)
        ]

    def _dropout_rng(self) -> DropoutRng | None:
        if self.key is None:
            return None
        key = jax.random.wrap_key_data(self.key[...])
        rate, count = self.spec.model.dropout.layer, self.spec.model.layers
        layer_key = jax.random.fold_in(key, _LAYER_DROP)
        return DropoutRng(key, jax.random.bernoulli(layer_key, rate, (count,)))


class Transformer(Feedback):
    """A Transformer with the same layers.

    Memories are the layers' inputs, so tokens are processed in parallel.
    """

    parallel = True
