"""Sampling of tokens from logits: temperature, top-k and nucleus (Holtzman et al. 2019)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from famjax.core.types import Array


class Sampling(NamedTuple):
    """Sampling parameters, passed to compiled programs as arguments rather than constants.

    Attributes:
      key: a random key, the same for all tokens of a text.
      temperature, top_k, top_p: as in `sample`.
      output_size: ids from this one on are never drawn.
    """

    key: Any
    temperature: Any
    top_k: Any
    top_p: Any
    output_size: Any

    def draw(self, logits: Array, position: Any) -> Array:
        """Sample a token for each row of logits [b v] at a position of the text: [b 1] int32."""
        is_allowed = jnp.arange(logits.shape[-1]) < self.output_size
        logits = jnp.where(is_allowed, logits, -jnp.inf)
        return sample(logits, self.key, position, self.temperature, self.top_k, self.top_p)


def sample(
    logits: Array, key: Array, position: Array, temperature: Array, top_k: Array, top_p: Array
) -> Array:
    """Sample a token for each row.

    Args:
      logits: [b v]; -inf is never sampled.
      key: a random key, the same for all tokens of a text.
      position: folded into the key, so that a token's randomness depends on its position only.
      temperature: divides the logits; 0 is greedy.
      top_k: sample only from the `top_k` likeliest tokens; 0 = all.
      top_p: sample only from the likeliest tokens that together reach this probability (Holtzman et
        al. 2019), computed after temperature and top_k; 1 = all.

    Returns:
      [b 1] int32.
    """

    def draw_token() -> Array:
        order = jnp.argsort(logits, axis=-1, descending=True)
        sorted_logits = jnp.take_along_axis(logits, order, -1) / jnp.maximum(temperature, 1e-6)
        rank = jnp.arange(logits.shape[-1])
        sorted_logits = jnp.where((top_k == 0) | (rank < top_k), sorted_logits, -jnp.inf)
        probabilities = jax.nn.softmax(sorted_logits)
        before = jnp.cumsum(probabilities, -1) - probabilities
        sorted_logits = jnp.where((before < top_p) | (rank == 0), sorted_logits, -jnp.inf)
        chosen = jax.random.categorical(jax.random.fold_in(key, position), sorted_logits)[:, None]
        return jnp.take_along_axis(order, chosen, -1).astype(jnp.int32)

    def take_argmax() -> Array:
        return logits.argmax(-1).astype(jnp.int32)[:, None]

    # without sampling, skip sorting the vocabulary, which can take longer than a model's step
    return jax.lax.cond(temperature > 0, draw_token, take_argmax)
