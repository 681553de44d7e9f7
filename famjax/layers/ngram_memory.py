"""A memory of what followed the latest tokens the last time, at the input of the first layer.

    x_i = E(token_i) + sum_k [f_k(i) exists] (E(f_k(i)) W_k + b_k)      k = 1, 2, 3, 4, 6, 8 ...

E is the token embedding, and f_k(i) is the token that followed the last earlier occurrence of the k
tokens that end with i, anywhere in the document (`famjax.ops.ngrams`). k has o values. W and b
start as 0: a model that is given this memory computes what it did before.

The layers see what an n-gram cache would predict, and learn when to believe it. What to remember is
not learned: every token is written, and old contexts are overwritten. So there is no gradient
through the table, nor to the embeddings of what is recalled. It is not passed on from one document
to the next (`Context.pass_state`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig
from famjax.config.schema import ModelConfig
from famjax.core.types import Array, Context, compute_dtype
from famjax.ops import ngrams
from famjax.ops.ngrams import NgramState
from famjax.parallel.sharding import register_parameter_axes

register_parameter_axes(
    (r"ngram_memory/kernel$", (None, "embed", None)),
    (r"ngram_memory/bias$", (None, None)),
)
# bytes of a slot: a hash and a token
_SLOT_BYTES = 8


class NgramMemory(nnx.Module):
    """Adds what followed each token's contexts to its embedding."""

    def __init__(self, config: ResolvedModelConfig):
        o, d = config.ngram_memory, config.width
        self.count, self.slots = o, config.ngram_slots
        self.dtype = compute_dtype(config.dtype)
        self.kernel = nnx.Param(jnp.zeros((o, d, d)))
        self.bias = nnx.Param(jnp.zeros((o, d)))

    def init_state(self, batch: int) -> NgramState:
        """Return the state of empty documents, with a leading axis of size 1."""
        state = ngrams.init_state(batch, self.count, self.slots)
        return jax.tree.map(lambda a: a[None], state)

    def state_axes(self) -> NgramState:
        table: Any = (None, "batch", None, None)
        recent: Any = (None, "batch", None)
        return NgramState(table, table, recent)

    def __call__(self, x: Array, state: NgramState, ctx: Context) -> tuple[Array, NgramState]:
        """Add what is recalled: embeddings [b t d] -> [b t d], and the state after the tokens."""
        # set by LanguageModel.with_tokens
        assert ctx.tokens is not None
        assert ctx.embed is not None
        before = jax.tree.map(lambda a: a[0], state)
        found, after = ngrams.recall(before, ctx.tokens, ctx.reset, ctx.valid)
        for i in range(self.count):
            recalled = self._project(i, ctx.embed(jnp.maximum(found[..., i], 0)))
            x = jnp.where(found[..., i, None] == ngrams.ABSENT, x, x + recalled)
        return x, jax.tree.map(lambda a: a[None], after)

    def _project(self, i: int, embedded: Array) -> Array:
        # without a gradient to the embedding, which would take as long as that of the output layer
        embedded = jax.lax.stop_gradient(embedded)
        kernel, bias = (a[...][i].astype(self.dtype) for a in (self.kernel, self.bias))
        return embedded @ kernel + bias


def count_params(config: ModelConfig) -> int:
    """Return the number of the memory's parameters."""
    return config.ngram_memory * (config.width**2 + config.width)


def state_bytes(config: ModelConfig) -> int:
    """Return the bytes of a row's table."""
    return _SLOT_BYTES * config.ngram_memory * config.ngram_slots


def flops(config: ModelConfig) -> float:
    """Return the model FLOPs of one token."""
    return 2 * config.ngram_memory * config.width**2
