"""One token drawn from logits: temperature, top-k and nucleus (Holtzman et al. 2019)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from famjax.core.types import Array


class Sampling(NamedTuple):
    """How tokens are drawn; all are arguments of compiled programs, never constants.

    Attributes:
      key: a random key, the same for all tokens of a text.
      temperature, top_k, top_p: as in `sample`.
      size: of the vocabulary; a padded embedding table has rows that no text is made of.
    """

    key: Any
    temperature: Any
    top_k: Any
    top_p: Any
    size: Any

    def draw(self, logits: Array, position: Any) -> Array:
        """Return a token for each row of logits [b v] at a position of the text: [b 1] int32."""
        in_vocabulary = jnp.arange(logits.shape[-1]) < self.size
        logits = jnp.where(in_vocabulary, logits, -jnp.inf)
        return sample(logits, self.key, position, self.temperature, self.top_k, self.top_p)


def sample(
    logits: Array, key: Array, position: Array, temperature: Array, top_k: Array, top_p: Array
) -> Array:
    """Return a token for each row.

    Args:
      logits: [b v]; -inf is never taken.
      key: a random key, the same for all tokens of a text.
      position: folded into the key, so that a token's draw depends on nothing but its place.
      temperature: divides the logits; 0 takes the likeliest token.
      top_k: only so many of the likeliest tokens; 0 is all.
      top_p: only the likeliest tokens that together reach this probability (Holtzman et al. 2019),
        after the other two; 1 is all.

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

    # sorting a large vocabulary would take longer than a small model's step
    return jax.lax.cond(temperature > 0, draw_token, take_argmax)
