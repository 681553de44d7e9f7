"""Rotary position embedding (Su et al., 2024; TransformerFAM B.2.1), for endless streams.

Attention scores depend only on differences of positions. So a key is stored rotated by its offset
within its block, and when a block that is j blocks later attends to it, it is rotated by -j blocks.
No angle grows with the length of the stream: the block at position 10^9 has the same angles as the
block at position 0.

Mixers without blocks (`full`, `linear`) rotate by the position in the document
(`long_range_angles`).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Integer, Num

from famjax.config.schema import ArchConfig
from famjax.core.types import Array, acc_dtype

# a position is 8 digits of 4 bits
_DIGITS, _BITS = 8, 4


def frequencies(head_dim: int, base: float, arch: ArchConfig, xp: Any = jnp) -> Any:
    """Return theta_i of the rotated pairs, with the model family's RoPE scaling: [pairs].

    Args:
      head_dim: e, even.
      base: theta_i = base^(-i/pairs).
      arch: has rotary_fraction, which is 2 pairs / e, and rope_scaling with its parameters.
      xp: jax.numpy, or numpy for a float64 result.
    """
    # float64 in JAX only if x64 is enabled (the oracle tests)
    dtype = np.float64 if xp is np else jnp.result_type(float)
    rotated = int(head_dim * arch.rotary_fraction)
    theta = base ** (-xp.arange(0, rotated, 2, dtype=dtype) / rotated)
    if arch.rope_scaling == "none":
        return theta
    if arch.rope_scaling == "linear":
        return theta / arch.rope_factor
    # Llama 3: a ramp over a pair's number of rotations within the original context length
    rotations = arch.rope_length * theta / (2 * np.pi)
    ramp = xp.clip((rotations - arch.rope_low) / (arch.rope_high - arch.rope_low), 0, 1)
    return theta * (ramp + (1 - ramp) / arch.rope_factor)


def angles(
    positions: Num[Array, "*lead"], theta: Float[Array | np.ndarray, "pairs"]
) -> Float[Array, "*lead pairs"]:
    """Return theta_i * position for every frequency.

    Args:
      positions: [...] integers or floats, in tokens.
      theta: [pairs], in radians a token.

    Returns:
      [... pairs], in radians.
    """
    return positions[..., None].astype(theta.dtype) * theta


def long_range_angles(
    positions: Integer[Array, "*lead"], theta: Float[np.ndarray, "pairs"]
) -> Float[Array, "*lead pairs"]:
    """Return `angles` of integer positions modulo 2 pi, with precision independent of the position.

    A product position * theta in float32 has an error of up to position * 2^-24 radians. Here the
    angle is a sum over the position's digits d_i of d_i * (16^i theta modulo 2 pi), the latter
    computed in float64: the error is below 5e-5 radians at any position below 2^31.

    Args:
      positions: [...] integers, in tokens.
      theta: [pairs] float64, in radians a token.

    Returns:
      [... pairs], in radians.
    """
    dtype = jnp.result_type(float)
    digit_angles = np.remainder(theta * 2.0 ** (_BITS * np.arange(_DIGITS)[:, None]), 2 * np.pi)
    digit_angles = np.where(digit_angles > np.pi, digit_angles - 2 * np.pi, digit_angles)
    magnitude = jnp.abs(positions)
    total = jnp.zeros((*positions.shape, len(theta)), dtype)
    for i in range(_DIGITS):
        digit = (magnitude >> (_BITS * i)) & (2**_BITS - 1)
        total = total + digit[..., None].astype(dtype) * jnp.asarray(digit_angles[i], dtype)
    return jnp.sign(positions)[..., None].astype(dtype) * total


def rotate(x: Float[Array, "*lead e"], angle: Float[Array, "... pairs"]) -> Float[Array, "*lead e"]:
    """Rotate each pair (x_i, x_{i + pairs}), i < pairs, of the last axis by its angle.

    Args:
      x: [... e], e >= 2 pairs.
      angle: [... pairs] in radians, broadcast against x.

    Returns:
      [... e] in x's dtype; computed in float32 or wider.
    """
    dtype = acc_dtype(x)
    half = angle.shape[-1]
    x1, x2, rest = jnp.split(x.astype(dtype), (half, 2 * half), axis=-1)
    # without the barrier XLA fuses cos and sin into the product and computes them for each head
    # and lane
    cos, sin = jax.lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))
    cos, sin = cos.astype(dtype), sin.astype(dtype)
    rotated = (x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def longest_wavelength(base: float) -> float:
    """Return 2 pi * base, the range of the random position offset (B.2.2), in tokens."""
    return 2 * np.pi * base
