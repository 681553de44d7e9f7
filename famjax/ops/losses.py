"""Losses on logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from famjax.core.types import Array


def token_losses(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Return -log softmax(logits)[target] in nats, and whether no logit exceeds the target's.

    Args:
      logits: [... v]; targets: [...].

    Returns:
      Two [...], float and bool.
    """
    # masked sum and maximum rather than gather and argmax: no scatter in the gradient, no index
    chosen = jnp.arange(logits.shape[-1]) == targets[..., None]
    logit = jnp.where(chosen, logits, 0).sum(-1)
    return jax.nn.logsumexp(logits, axis=-1) - logit, logit >= logits.max(-1)
