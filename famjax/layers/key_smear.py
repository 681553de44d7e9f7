"""Smeared keys: the key of a token also tells which token came before it.

Olsson et al. 2022 (In-context Learning and Induction Heads, "smeared key" architecture). To find
what followed the last occurrence of a token takes two layers of attention, and a small model
learns it late or never; with smeared keys it takes one.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig
from famjax.core.types import Array
from famjax.parallel.sharding import register_parameter_axes

register_parameter_axes((r"key_smear/weight$", ()))


class KeySmear(nnx.Module):
    """Blends each key of a block with the one before it, by one weight for each key head.

        k_j -> (1 - s) k_j + s k_{j-1},   s = sigmoid(a),   k_{-1} = 0 before the block's first key

    The heads start at different s, from 0.12 to 0.88; a single one at 0.88.
    """

    def __init__(self, config: ResolvedModelConfig):
        self.weight = nnx.Param(jnp.linspace(2.0, -2.0, config.kv_heads)[::-1])

    def __call__(self, k: Array, advance: Callable[[Array], Array]) -> Array:
        """[... w g e] -> [... w g e], keys of whole blocks, each rotated to its own position.

        Args:
          advance: rotates keys by one position.
        """
        s = jax.nn.sigmoid(self.weight[...])[:, None].astype(k.dtype)
        before = jnp.roll(advance(k), 1, axis=-3).at[..., 0, :, :].set(0)
        return (1 - s) * k + s * before
