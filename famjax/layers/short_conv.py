"""A short causal convolution of the token embeddings, at the input of the first layer.

    x_i = E(token_i) + sum_j E(token_{i-j}) W_j      j = 1 ... k-1

Attention finds keys by content. With these sums the queries and keys of every layer, also those
that a memory is written with, tell which tokens came before a token, so that one layer can find
what followed the last occurrence of several tokens. Linear attention and state space models have
such convolutions in each layer (Fu et al. 2022, "Hungry Hungry Hippos", shift SSM; Gu and Dao 2023,
Mamba). Here there is one, before the first layer. W starts as 0: a model that is given this
convolution computes what it did before.

The convolution ends with its document, and is not passed on to the next (`Context.pass_state`).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig
from famjax.config.schema import ModelConfig
from famjax.core.types import Array, Context, compute_dtype
from famjax.ops.positions import document_positions
from famjax.parallel.sharding import register_parameter_axes

register_parameter_axes((r"short_conv/kernel$", (None, "embed", None)))


class ShortConv(nnx.Module):
    """Adds products of the embeddings of the k-1 tokens before each token to its own."""

    def __init__(self, config: ResolvedModelConfig):
        d = config.width
        self.before = config.short_conv - 1
        self.dtype = compute_dtype(config.dtype)
        self.kernel = nnx.Param(jnp.zeros((self.before, d, d)))

    def init_state(self, batch: int) -> Array:
        """Return the last tokens' embeddings [1 b k-1 d], oldest first; 0 where there is none.

        The leading axis is that of a stack's states.
        """
        return jnp.zeros((1, batch, *self.kernel.shape[:2]), self.dtype)

    def state_axes(self) -> Any:
        return (None, "batch", None, None)

    def __call__(self, x: Array, state: Array, ctx: Context) -> tuple[Array, Array]:
        """Add the products: embeddings [b t d] -> [b t d], and the state after the tokens."""
        b, t, _ = x.shape
        start, position, length = document_positions(jnp.zeros(b, jnp.int32), ctx, t)
        # those of the state, and the call's: token i of the call is at i + k-1
        embedded = jnp.concatenate([state[0].astype(x.dtype), x], 1)
        kernel = self.kernel[...].astype(self.dtype)
        y = x
        for j in range(1, self.before + 1):
            shifted = embedded[:, self.before - j :][:, :t]
            is_same_document = (start < 0) | (position >= j)
            y = y + jnp.where(is_same_document[..., None], shifted, 0) @ kernel[j - 1]
        return y, self._last(embedded, start[:, -1], length)[None].astype(state.dtype)

    def _last(self, embedded: Array, start: Array, length: Array) -> Array:
        """Return the embeddings of the last k-1 tokens of each row's newest document: [b k-1 d].

        Args:
          embedded: [b k-1+t d].
          start: [b] int32, index of its first token in the call; -1 before the call.
          length: [b] int32, number of its tokens in the call.
        """
        # a row of padding alone keeps its document, whatever its resets
        start = jnp.where(length > 0, start, -1)
        index = (jnp.maximum(start, 0) + length)[:, None] + jnp.arange(self.before)
        last = jnp.take_along_axis(embedded, index[..., None], 1)
        is_same_document = index - self.before >= start[:, None]
        return jnp.where(is_same_document[..., None] | (start < 0)[:, None, None], last, 0)


def count_params(config: ModelConfig) -> int:
    """Return the number of the convolution's parameters."""
    return max(config.short_conv - 1, 0) * config.width**2


def state_bytes(config: ModelConfig, size: int) -> int:
    """Return the bytes of a row's state.

    Args:
      size: bytes of a number in the compute dtype.
    """
    return max(config.short_conv - 1, 0) * config.width * size


def flops(config: ModelConfig) -> float:
    """Return the model FLOPs of one token."""
    return 2 * count_params(config)
