"""Losses on logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from famjax.core.types import Array


def token_losses(logits: Array, targets: Array) -> Array:
    """Return -log softmax(logits)[target] for each token, in nats: [... v], [...] -> [...]."""
    # a masked sum rather than a gather: its gradient is a product, not a scatter
    chosen = jnp.arange(logits.shape[-1]) == targets[..., None]
    return jax.nn.logsumexp(logits, axis=-1) - jnp.where(chosen, logits, 0).sum(-1)
