"""A decoder-only language model over any stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.resolved import resolve_model
from famjax.config.schema import ModelConfig
from famjax.core.types import (
    Array,
    Context,
    Params,
    State,
    acc_dtype,
    compute_dtype,
    tree_bytes,
)
from famjax.layers.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from famjax.layers.linear import Linear
from famjax.layers.norm import Norm
from famjax.ops.attention import soft_cap
from famjax.ops.lookup import look_up
from famjax.ops.losses import chunked_cross_entropy, smoothed_token_losses, token_losses
from famjax.ops.weight_einsum import weight_einsum
from famjax.parallel.sharding import TOKENS, path_name
from famjax.parallel.traced import target_device, with_logical_constraint
from famjax.stacks import make_stack

# On CPU, layers of at least `_LARGE_LAYER` bytes are unstacked before a loop of `step`, if all
# weights together have at most `_LARGEST_COPY` bytes, since unstacking copies them. In the loop,
# slicing a layer out of the stack at every token takes twice as long as reading its weights, but no
# time for layers of 1 MiB. Small layers stay stacked, because programs with unstacked layers take
# longer to compile.
_LARGE_LAYER, _LARGEST_COPY = 2 << 20, 2 << 30


class LanguageModel(nnx.Module):
    """Token embedding, stack, final norm, head.

    Like all sequence models here, it is a function of a segment and a carried state:

        state = model.init_state(batch)
        logits, state = model(tokens, state)          # whole blocks
        logits, state = model.step(tokens, state)     # one token a lane

    Args:
      config: the model's config; its vocab_size, v, must not be 0.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        config = resolve_model(config)
        v, d = config.vocab_size, config.width
        self.dtype = compute_dtype(config.dtype)
        self.vocab_size, self.width = v, d
        self.embedding: nnx.Param | AdaptiveEmbedding
        if config.adaptive.cutoffs:
            self.embedding = AdaptiveEmbedding(config, rngs=rngs)
        else:
            self.embedding = nnx.Param(jax.random.normal(rngs.params(), (v, d)) * d**-0.5)
        self.stack = make_stack(config, rngs=rngs)
        self.norm = Norm(config.norm, d, config.arch) if config.arch.pre_norm else None
        self.embed_scale = config.arch.embed_scale
        self.logit_bias = nnx.Param(jnp.zeros((v,))) if config.arch.logit_bias else None
        self.logit_cap = config.arch.logit_cap
        self.head: Linear | AdaptiveSoftmax | None
        if config.adaptive.cutoffs:
            self.head = AdaptiveSoftmax(config, rngs=rngs)
        elif config.tied:
            self.head = None
        else:
            self.head = Linear("...d,dv->...v", (d, v), d, dtype=self.dtype, rngs=rngs)
        self.block_len = self.stack.block_len

    def init_state(self, batch: int, offset: Array | None = None) -> State:
        """Return the initial state.

        Args:
          offset: [b], as in `Context`, in training with random position offset.
        """
        return self.stack.init_state(batch, offset)

    def state_shapes(self) -> State:
        """Return the shapes of the state of one document, `jax.ShapeDtypeStruct`s."""
        return jax.eval_shape(lambda: self.init_state(1))

    def state_bytes(self) -> int:
        """Return the bytes of the state of one document."""
        return tree_bytes(self.state_shapes())

    def state_axes(self) -> State:
        return self.stack.state_axes()

    def unstack(self, state: State, copies: int = 1) -> State:
        """Return the state in the faster layout for a loop of `step` in one program.

        With stacked layers, each layer's state is sliced out and written back at every token; with
        unstacked layers, the weights are copied once, by `Stack.unstack_layers`. The layout is the
        one that avoids copying the larger of the two. On a CPU stacked weights are copied at every
        token, too, so large layers are unstacked in any case.

        Args:
          copies: number of copies of the state that the loop steps.
        """
        weights = tree_bytes(nnx.state(self.stack))
        on_cpu = target_device().platform == "cpu"
        is_large = weights / self.stack.repeats >= _LARGE_LAYER and weights <= _LARGEST_COPY
        unstacked = copies * tree_bytes(state) > weights or (on_cpu and is_large)
        return self.stack.unstack(state) if unstacked else state

    def restack(self, state: State) -> State:
        """Undo `unstack`."""
        return self.stack.restack(state)

    def embed(self, tokens: Array) -> Array:
        """Embed tokens [b t] int32: [b t d]. The looked-up rows are scaled, not the table."""
        if isinstance(self.embedding, AdaptiveEmbedding):
            return with_logical_constraint(self.embedding(tokens) * self.embed_scale, TOKENS)
        x = look_up(self.embedding[...], tokens).astype(self.dtype) * self.embed_scale
        return with_logical_constraint(x, TOKENS)

    def with_tokens(self, ctx: Context, tokens: Array) -> Context:
        """Return `ctx` with the call's tokens and `embed` if the stack has an n-gram memory.

        With other stacks it is `ctx` itself.
        """
        if not self.stack.reads_tokens:
            return ctx
        return ctx._replace(tokens=tokens, embed=self.embed)

    def logits(self, x: Array) -> Array:
        """Return logits [... v] of the stack's output x [... d], in float32 or wider.

        With an adaptive softmax they are log p.
        """
        if isinstance(self.embedding, AdaptiveEmbedding):
            assert isinstance(self.head, AdaptiveSoftmax)
            return self.head.log_probs(self._normalize(x), self.embedding)
        x = self._normalize(x)
        # not rounded to bfloat16, in which likely tokens often have equal logits
        out_dtype = acc_dtype(x)
        if self.head is None:
            table = self.embedding[...].astype(self.dtype)
            return self._cap_logits(weight_einsum("...d,dv->...v", x, table.T, out_dtype))
        return self._cap_logits(self.head(x, out_dtype))

    def _cap_logits(self, y: Array) -> Array:
        y = y if self.logit_bias is None else y + self.logit_bias[...]
        return soft_cap(y, self.logit_cap)

    def losses(self, x: Array, targets: Array) -> tuple[Array, Array]:
        """Return the losses of the stack's output x [b t d] for targets [b t], by chunked logits.

        Returns:
          nll [b t] in nats, -log p(target); correct [b t] bool, whether the target is the argmax.
        """

        def score(model: LanguageModel, x: Array, targets: Array) -> Any:
            if isinstance(model.embedding, AdaptiveEmbedding):
                assert isinstance(model.head, AdaptiveSoftmax)
                return model.head.losses(model._normalize(x), targets, model.embedding)
            return token_losses(model.logits(x), targets)

        return self._chunked_scores(score, x, targets)

    def smoothed_losses(
        self, x: Array, targets: Array, smoothing: float
    ) -> tuple[Array, Array, Array]:
        """Return `losses`, and the losses with label smoothing [b t] (`smoothed_token_losses`).

        An adaptive softmax has no such losses, since it never computes log p of all words.
        """
        assert not isinstance(self.embedding, AdaptiveEmbedding)

        def score(model: LanguageModel, x: Array, targets: Array) -> Any:
            return smoothed_token_losses(model.logits(x), targets, smoothing)

        return self._chunked_scores(score, x, targets)

    def _chunked_scores(
        self, score: Callable[[LanguageModel, Array, Array], Any], x: Array, targets: Array
    ) -> Any:
        """Return score(model, x, targets), computed in chunks of tokens.

        Args:
          score: (model, x, targets) -> results; it must not use `model.stack`.
        """
        graph, head, rest = cast(Any, nnx.split(self, _is_head_param, ...))

        def gather_tied(path: tuple[Any, ...], leaf: Array) -> Array:
            if self.head is not None or path_name(path) != "embedding":
                return leaf
            return with_logical_constraint(leaf.astype(self.dtype), ("vocab", None))

        def score_chunk(head: Params, x: Array, targets: Array) -> Any:
            return score(nnx.merge(graph, head, rest), x, targets)

        # a tied table is cast and gathered once here, not in every chunk
        head = jax.tree_util.tree_map_with_path(gather_tied, head)
        return chunked_cross_entropy(score_chunk, head, x, targets, self.vocab_size)

    def _normalize(self, x: Array) -> Array:
        return x.astype(self.dtype) if self.norm is None else self.norm(x, self.dtype)

    def __call__(
        self, tokens: Array, state: State, ctx: Context | None = None
    ) -> tuple[Array, State]:
        """Process whole blocks: tokens [b n*w] -> next-token logits [b n*w v], and the state."""
        ctx = self.with_tokens(ctx or Context(), tokens)
        x, state = self.stack(self.embed(tokens), state, ctx)
        return self.logits(x), state

    def step(self, tokens: Array, state: State, ctx: Context | None = None) -> tuple[Array, State]:
        """Process one token per lane: tokens [b 1] -> next-token logits [b 1 v], and the state."""
        ctx = self.with_tokens(ctx or Context(), tokens)
        x, state = self.stack.step(self.embed(tokens), state, ctx)
        return self.logits(x), state


def _is_head_param(path: tuple[Any, ...], _: Any) -> bool:
    """Return whether logits may depend on the variable; the embedding counts, as it may be tied."""
    return path[0] in ("embedding", "norm", "head", "logit_bias")
