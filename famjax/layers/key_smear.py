"""Smeared keys: the key of a token also tells which token came before it.

Olsson et al. 2022 (In-context Learning and Induction Heads, "smeared key" architecture). To find
what followed the last occurrence of a token takes two layers of attention, and a small model
learns it late or never; with smeared keys it takes one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.core.types import Array, param_dtype
from famjax.parallel.sharding import register_parameter_axes

register_parameter_axes((r"key_smear/weight$", ()))


class KeySmear(nnx.Module):
    """Smears keys: adds to each a share of the one before it, with one weight for each key head.

        k_j -> (1 - s) k_j + s k_{j-1},   s = sigmoid(a)

    The heads start at different s, from 0.12 to 0.88; a single head starts at 0.88. If the model
    was trained without smeared keys, see `init_for_pretrained` instead.
    """

    def __init__(self, heads: int):
        self.weight = nnx.Param(jnp.linspace(2.0, -2.0, heads)[::-1])

    def __call__(self, k: Array, previous: Array) -> Array:
        """Return smeared keys [... w g e].

        Args:
          k: [... w g e].
          previous: [... w g e], the key before each key (`previous_keys`). If keys are rotated, it
            must be rotated to the position of the key that it is smeared into.
        """
        s = jax.nn.sigmoid(self.weight[...])[:, None].astype(k.dtype)
        return (1 - s) * k + s * previous


def init_for_pretrained(heads: int) -> Array:
    """Return initial weights a [g] for a model that was trained without smeared keys.

    s is from 0.007 to 0.88, and below 0.5 in at least half of the heads, whose attention changes
    least. A single head has 0.18.
    """
    low, high = -5.0, 2.0
    spread = jnp.linspace(low, high, heads) if heads > 1 else jnp.array([(low + high) / 2])
    return spread.astype(param_dtype())


def previous_keys(k: Array, before: Array | None = None) -> Array:
    """Return the key before each key of blocks [... w g e]: [... w g e].

    Args:
      before: [... g e], the key before each block's first; None means 0.
    """
    first = jnp.zeros_like(k[..., :1, :, :]) if before is None else before[..., None, :, :]
    return jnp.concatenate([first.astype(k.dtype), k[..., :-1, :, :]], axis=-3)
