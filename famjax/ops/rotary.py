"""Rotary position embedding (Su et al., 2024; TransformerFAM B.2.1), written for endless streams.

Attention scores depend on differences of positions only. So a key is stored rotated by its offset
within its own block, and whoever reads it from j blocks ahead turns it back by j blocks. No angle
ever grows with the length of the stream: the block at position 10^9 is computed with the very
numbers of the block at position 0.

Mixers without blocks (`full`, `linear`) rotate by the position in the document, `far_angles`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from famjax.core.config import ArchConfig
from famjax.core.types import Array

# of a position: 8 digits of 4 bits
_DIGITS, _BITS = 8, 4


def frequencies(head_dim: int, base: float, arch: ArchConfig, xp: Any = jnp) -> Any:
    """Return theta_i of the pairs that are rotated, as the family stretched them: [r/2], r <= e.

    Args:
      head_dim: e, even.
      base: theta_i = base^(-2i/r).
      arch: rotary_fraction, r / e; rope_scaling, with what it takes.
      xp: jax.numpy, or numpy, whose result is float64.
    """
    # in JAX float64 only where the oracles switched it on
    wide = np.float64 if xp is np else jnp.result_type(float)
    rotated = int(head_dim * arch.rotary_fraction)
    theta = base ** (-xp.arange(0, rotated, 2, dtype=wide) / rotated)
    if arch.rope_scaling == "none":
        return theta
    if arch.rope_scaling == "linear":
        return theta / arch.rope_factor
    # Llama 3: a ramp over the turns that a pair makes within the texts before stretching
    turns = arch.rope_length * theta / (2 * np.pi)
    ramp = xp.clip((turns - arch.rope_low) / (arch.rope_high - arch.rope_low), 0, 1)
    return theta * (ramp + (1 - ramp) / arch.rope_factor)


def angles(positions: Array, theta: Array) -> Array:
    """Return theta_i * position for every frequency.

    Args:
      positions: [...] integers or floats, in tokens.
      theta: [r/2], in radians a token.

    Returns:
      [... r/2], in radians.
    """
    return positions[..., None].astype(theta.dtype) * theta


def far_angles(positions: Array, theta: np.ndarray) -> Array:
    """Return `angles` of whole positions modulo 2 pi, as precise far away as at the beginning.

    A product position * theta in float32 is off by up to position * 2^-24 radians. Here the angle
    is a sum over the position's digits d_i of d_i * (16^i theta modulo 2 pi), the latter made in
    float64: off by less than 5e-5 radians at any position below 2^31.

    Args:
      positions: [...] integers, in tokens.
      theta: [r/2] float64, in radians a token.

    Returns:
      [... r/2], in radians.
    """
    wide = jnp.result_type(float)
    digit_angles = np.remainder(theta * 2.0 ** (_BITS * np.arange(_DIGITS)[:, None]), 2 * np.pi)
    digit_angles = np.where(digit_angles > np.pi, digit_angles - 2 * np.pi, digit_angles)
    far = jnp.abs(positions)
    total = jnp.zeros((*positions.shape, len(theta)), wide)
    for i in range(_DIGITS):
        digit = (far >> (_BITS * i)) & (2**_BITS - 1)
        total = total + digit[..., None].astype(wide) * jnp.asarray(digit_angles[i], wide)
    return jnp.sign(positions)[..., None].astype(wide) * total


def rotate(x: Array, angle: Array) -> Array:
    """Rotate each pair (x_i, x_{i + r/2}) of the first r elements of the last axis by its angle.

    Args:
      x: [... e], e >= r.
      angle: [... r/2] in radians, broadcast against x.

    Returns:
      [... e] in x's type; computed in float32 or wider.
    """
    wide = jnp.promote_types(x.dtype, jnp.float32)
    half = angle.shape[-1]
    x1, x2, rest = jnp.split(x.astype(wide), (half, 2 * half), axis=-1)
    cos, sin = jnp.cos(angle).astype(wide), jnp.sin(angle).astype(wide)
    turned = (x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def longest_wavelength(base: float) -> float:
    """Return 2 pi * base, the range of the random position offset (B.2.2), in tokens."""
    return 2 * np.pi * base
