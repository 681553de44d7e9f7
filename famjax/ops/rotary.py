"""Rotary position embedding (Su et al., 2024; TransformerFAM B.2.1), written for endless streams.

Attention scores depend on differences of positions only. So a key is stored rotated by its offset
within its own block, and whoever reads it from j blocks ahead turns it back by j blocks. No angle
ever grows with the length of the stream: the block at position 10^9 is computed with the very
numbers of the block at position 0.
"""

from __future__ import annotations

import jax.numpy as jnp

from famjax.core.types import Array


def angles(positions: Array, head_dim: int, base: float) -> Array:
    """Return theta_i * position for every frequency.

    Args:
      positions: [...] integers or floats, in tokens.
      head_dim: e, even.
      base: theta_i = base^(-2i/e).

    Returns:
      [... e/2] float32, in radians.
    """
    wide = jnp.result_type(float)  # float64 only where the oracles switched it on
    frequencies = base ** (-jnp.arange(0, head_dim, 2, dtype=wide) / head_dim)
    return positions[..., None].astype(wide) * frequencies


def rotate(x: Array, angle: Array) -> Array:
    """Rotate each pair (x_i, x_{i + e/2}) of the last axis by its angle.

    Args:
      x: [... e].
      angle: [... e/2] in radians, broadcast against x.

    Returns:
      [... e] in x's type; computed in float32 or wider.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    x1, x2 = jnp.split(x.astype(wide), 2, axis=-1)
    cos, sin = jnp.cos(angle).astype(wide), jnp.sin(angle).astype(wide)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


def longest_wavelength(base: float) -> float:
    """Return 2 pi * base, the range of the random position offset (B.2.2), in tokens."""
    return 2 * jnp.pi * base
