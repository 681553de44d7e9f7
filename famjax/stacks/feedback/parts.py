"""The layers of a Feedback Transformer, and a stack of them taken apart for its loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.core.config import ModelConfig
from famjax.core.types import Array
from famjax.layers.dropout import ATTENTION, LAYER, make_dropout
from famjax.layers.linear import MATMUL_PARAMS
from famjax.layers.mlp import FeedForward
from famjax.layers.qkv import QKV, Keys
from famjax.ops import relative
from famjax.ops.weight_einsum import weight_einsum
from famjax.stacks.feedback.plan import Plan
from famjax.stacks.feedback.ring import Pair


class FeedbackLayer(nnx.Module):
    """Attention to a memory, and a feed-forward."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        feedback = config.feedback
        self.qkv = QKV(config, rngs=rngs, keys=not feedback.shared_kv)
        self.mlp = FeedForward(config, rngs=rngs)
        start = jnp.full((config.heads,), float(feedback.span_start))
        # of each head, a share of the longest span
        self.span = nnx.Param(start) if feedback.adaptive_span else None

    def __call__(
        self, x: Array, attend: Callable[[Array], Array], key: Array | None = None
    ) -> Array:
        """[... d] -> [... d]; `attend` takes queries [... h e] to what they find."""
        q = self.qkv.project_query(self.qkv.normalize(x))
        return self.mlp(self.qkv.output_projection(attend(q), x, key), x, key)


class Random(NamedTuple):
    """The random numbers of one call, or of one token of it.

    Attributes:
      key: of dropout.
      layers: [L] bool, layers that LayerDrop leaves out.
    """

    key: Array
    layers: Array


class Parts(NamedTuple):
    """A stack's modules and arrays.

    Attributes:
      layers: L of them.
      keys: of all layers; None where each has its own.
      distances: [e span], added to the keys by distance, far first; or None.
      mix: [j L+1], what share of each state a memory is made of.
    """

    layers: list[FeedbackLayer]
    keys: Keys | None
    distances: Array | None
    mix: Array

    def layer(
        self, plan: Plan, i: int, x: Array, attend: Any, random: Random | None = None
    ) -> Array:
        """Return what layer i makes of x [... d]; `attend` also takes the dropout of weights."""
        key = None if random is None else jax.random.fold_in(random.key, LAYER + i)
        drop = make_dropout(plan.model.dropout.attention, key, ATTENTION)
        y = self.layers[i](x, lambda q: attend(q, drop), key)
        return y if random is None else jnp.where(random.layers[i], x, y)

    def memory(self, states: list[Array]) -> Array:
        """Return m (Equation 1): L+1 states [... d] -> [j ... d]."""
        mix = self.mix.astype(states[0].dtype)
        return jnp.einsum("jl,l...->j...", mix, jnp.stack(states))

    def remember(self, memory: Array, layer: int | None = None) -> list[Pair]:
        """Return keys and values of memories [j ... d], not yet rotated: [... g e], of each set.

        Args:
          layer: the only one whose set is wanted, and whose memory is given.
        """
        if self.keys is not None:
            return [self.keys(m) for m in memory]
        layers = self.layers if layer is None else [self.layers[layer]]
        read = [of.qkv.normalize(memory[i % len(memory)]) for i, of in enumerate(layers)]
        return [of.qkv.project_kv(m) for of, m in zip(layers, read, strict=True)]

    def bias(self, plan: Plan, i: int, q: Array, tokens: int) -> Array:
        """Return what layer i adds to scores by distance, far first.

        Args:
          q: [... h e].
          tokens: distances, from 1 on.

        Returns:
          [... h tokens], or [h tokens] where it does not depend on q.
        """
        bias = jnp.zeros((q.shape[-2], tokens), jnp.promote_types(q.dtype, jnp.float32))
        if self.distances is not None:
            near = self.distances[:, self.distances.shape[1] - tokens :]
            scores = weight_einsum("...e,ep->...p", q, near)
            bias = scores.astype(bias.dtype) * q.shape[-1] ** -0.5
        if (share := self.layers[i].span) is not None:
            c = plan.config
            bias = bias + relative.log_span_mask(share[...] * c.span, tokens, c.span_ramp)
        return bias


class Partitioned(NamedTuple):
    """A stack's arrays by how a loop over tokens treats them (`famjax.ops.token_scan`).

    Attributes:
      graphs: of a layer and of the common keys.
      heavy: weights of products.
      light: the other weights.
      rest: what has no gradient.
    """

    graphs: Any
    matmul_params: Any
    other_params: Any
    non_diff: Any


def partition(
    plan: Plan, layers: nnx.Module, keys: Keys | None, distances: Array | None, mix: Array
) -> Partitioned:
    """Take a stack apart.

    Args:
      layers: a `FeedbackLayer` whose arrays have the layers on their first axis. They are cut here,
        once: within the loop they would be copied for every token.
    """
    split: Any = nnx.split(layers, MATMUL_PARAMS, nnx.Param, ...)
    parts = [_layers(part, plan.model.layers) for part in split[1:]]
    common: Any = (None,) * 4 if keys is None else nnx.split(keys, MATMUL_PARAMS, nnx.Param, ...)
    wide = (parts[0], common[1], distances)
    # once for all tokens
    cast = jax.tree.map(lambda a: a.astype(plan.dtype), wide)
    return Partitioned(
        (split[0], common[0]), cast, (parts[1], common[2], mix), (parts[2], common[3])
    )


def combine(graphs: Any, matmul_params: Any, other_params: Any, non_diff: Any) -> Parts:
    """Put together what `partition` took apart."""
    graph, common = graphs
    layers = [
        nnx.merge(graph, *of)
        for of in zip(matmul_params[0], other_params[0], non_diff[0], strict=True)
    ]
    keys = (
        None
        if common is None
        else nnx.merge(common, matmul_params[1], other_params[1], non_diff[1])
    )
    return Parts(layers, keys, matmul_params[2], other_params[2])


def _layers(tree: Any, count: int) -> list[Any]:
    """Return the layers of a tree whose arrays have them on their first axis."""
    flat, structure = jax.tree.flatten(tree)
    # one cut for each array: its gradient is one joint, not a sum of padded layers
    cut = [[piece[0] for piece in jnp.split(leaf, count)] for leaf in flat]
    return [jax.tree.unflatten(structure, [pieces[i] for pieces in cut]) for i in range(count)]
