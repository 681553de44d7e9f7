"""The layers of a Feedback Transformer, and their partition into arrays for `token_scan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig
from famjax.core.types import Array, Params, PyTree, acc_dtype
from famjax.layers.cross_attention import CrossAttention, EncodedSource
from famjax.layers.dropout import ATTENTION_WEIGHTS, LAYER, make_dropout
from famjax.layers.linear import MATMUL_PARAMS
from famjax.layers.mlp import FeedForward
from famjax.layers.qkv import QKV, KVProjection
from famjax.ops import relative
from famjax.ops.weight_einsum import weight_einsum
from famjax.stacks.feedback.ring import KV
from famjax.stacks.feedback.spec import FeedbackSpec


class FeedbackLayer(nnx.Module):
    """Attention to a memory, and to the encoder's output if there is one, and a feed-forward."""

    def __init__(self, config: ResolvedModelConfig, *, rngs: nnx.Rngs):
        feedback = config.feedback
        self.qkv = QKV(config, rngs=rngs, keys=not feedback.shared_kv)
        self.cross = CrossAttention(config, rngs=rngs) if config.encoder.layers else None
        self.mlp = FeedForward(config, rngs=rngs)
        start = jnp.full((config.heads,), float(feedback.span_start))
        # fraction of the maximum span, for each head
        self.span = nnx.Param(start) if feedback.adaptive_span else None

    def __call__(
        self,
        x: Array,
        attend: Callable[[Array], Array],
        key: Array | None = None,
        source: EncodedSource | None = None,
    ) -> Array:
        """Apply the layer: [... d] -> [... d]; `attend` maps queries [... h e] to outputs."""
        q = self.qkv.project_query(self.qkv.normalize(x))
        a = self.qkv.output_projection(attend(q), x, key)
        if self.cross is not None:
            a = self.cross(a, source, key)
        return self.mlp(a, x, key)


class DropoutRng(NamedTuple):
    """PRNG keys and masks of one call, or of one token.

    Attributes:
      key: PRNG key of dropout.
      layers: [l] bool, which layers LayerDrop drops.
    """

    key: Array
    layers: Array


class Parts(NamedTuple):
    """A stack's modules and arrays.

    Attributes:
      layers: l layers.
      keys: the shared key and value projections; None if each layer has its own.
      distances: [e span], relative position embeddings of keys, farthest first; or None.
      mixing_weights: [j l+1], weights of the layers' states in each memory.
    """

    layers: list[FeedbackLayer]
    keys: KVProjection | None
    distances: Array | None
    mixing_weights: Array

    def apply_layer(
        self,
        spec: FeedbackSpec,
        i: int,
        x: Array,
        attend: Any,
        rng: DropoutRng | None = None,
        source: EncodedSource | None = None,
    ) -> Array:
        """Apply layer i to x [... d].

        Args:
          attend: maps queries and the dropout function of the weights to attention outputs.
        """
        key = None if rng is None else jax.random.fold_in(rng.key, LAYER + i)
        drop = make_dropout(spec.model.dropout.attention, key, ATTENTION_WEIGHTS)
        own = None if source is None else layer_source(source, i)
        y = self.layers[i](x, lambda q: attend(q, drop), key, own)
        return y if rng is None else jnp.where(rng.layers[i], x, y)

    def mix_memory(self, states: list[Array]) -> Array:
        """Return m (Equation 1): l+1 states [... d] -> [j ... d]."""
        mixing_weights = self.mixing_weights.astype(states[0].dtype)
        return jnp.einsum("jl,l...->j...", mixing_weights, jnp.stack(states))

    def project_memory(self, memory: Array, layer: int | None = None) -> list[KV]:
        """Return keys and values of memories [j ... d], unrotated: [... g e], for each set.

        Args:
          layer: if given, return only this layer's set; `memory` then holds only its memory.
        """
        if self.keys is not None:
            return [self.keys(m) for m in memory]
        layers = self.layers if layer is None else [self.layers[layer]]
        inputs = [block.qkv.normalize(memory[i % len(memory)]) for i, block in enumerate(layers)]
        return [block.qkv.project_kv(m) for block, m in zip(layers, inputs, strict=True)]

    def distance_bias(self, spec: FeedbackSpec, i: int, q: Array, tokens: int) -> Array:
        """Return layer i's attention bias by distance, farthest first.

        Args:
          q: [... h e].
          tokens: maximum distance; the minimum is 1.

        Returns:
          [... h tokens], or [h tokens] if it does not depend on q.
        """
        bias = jnp.zeros((q.shape[-2], tokens), acc_dtype(q))
        if self.distances is not None:
            near = self.distances[:, self.distances.shape[1] - tokens :]
            scores = weight_einsum("...e,ep->...p", q, near)
            bias = scores.astype(bias.dtype) * q.shape[-1] ** -0.5
        if (share := self.layers[i].span) is not None:
            c = spec.config
            bias = bias + relative.log_span_mask(share[...] * c.span, tokens, c.span_ramp)
        return bias


def layer_source(source: EncodedSource, i: int) -> EncodedSource:
    """Return layer i's part of a source with the keys and values of all layers, [l b s ..]."""
    return source._replace(kv=jax.tree.map(lambda a: a[i], source.kv))


class Partitioned(NamedTuple):
    """A stack's arrays as arguments of `famjax.ops.token_scan`.

    Attributes:
      graphs: graph definitions of a layer and of the shared keys.
      matmul_params: kernels of matrix products.
      other_params: other parameters.
      non_diff: arrays without gradients.
    """

    graphs: Any
    matmul_params: Params
    other_params: Params
    non_diff: PyTree


def partition(
    spec: FeedbackSpec,
    layers: nnx.Module,
    keys: KVProjection | None,
    distances: Array | None,
    mixing_weights: Array,
) -> Partitioned:
    """Partition a stack into arrays for `token_scan`; `combine` is the inverse.

    Args:
      layers: a `FeedbackLayer` whose arrays have the layers on their first axis. The arrays are
        split by layer once here; if they were split within the scan, they would be copied for every
        token.
    """
    split: Any = nnx.split(layers, MATMUL_PARAMS, nnx.Param, ...)
    parts = [_unstack_layers(part, spec.model.layers) for part in split[1:]]
    shared: Any = (None,) * 4 if keys is None else nnx.split(keys, MATMUL_PARAMS, nnx.Param, ...)
    matmul_params = (parts[0], shared[1], distances)
    # cast once, not for every token
    cast = jax.tree.map(lambda a: a.astype(spec.dtype), matmul_params)
    return Partitioned(
        (split[0], shared[0]), cast, (parts[1], shared[2], mixing_weights), (parts[2], shared[3])
    )


def combine(graphs: Any, matmul_params: Params, other_params: Params, non_diff: PyTree) -> Parts:
    """Return the inverse of `partition`."""
    graph, shared = graphs
    layers = [
        nnx.merge(graph, *arrays)
        for arrays in zip(matmul_params[0], other_params[0], non_diff[0], strict=True)
    ]
    keys = (
        None
        if shared is None
        else nnx.merge(shared, matmul_params[1], other_params[1], non_diff[1])
    )
    return Parts(layers, keys, matmul_params[2], other_params[2])


def _unstack_layers(tree: PyTree, count: int) -> list[Any]:
    """Return one tree per layer, from a tree whose arrays have the layers on their first axis."""
    flat, structure = jax.tree.flatten(tree)
    # one split per array: its gradient is one concatenation, not a sum of padded layers
    layers = [[piece[0] for piece in jnp.split(leaf, count)] for leaf in flat]
    return [jax.tree.unflatten(structure, [pieces[i] for pieces in layers]) for i in range(count)]
