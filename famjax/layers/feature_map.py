"""phi, the feature maps of linear attention (T2R 2.2, 2.3, 3.1)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.core.config import ModelConfig
from famjax.core.types import Array
from famjax.layers.linear import Linear
from famjax.layers.qkv import head_dim

# what may be negative is small beside the least denominator, until many tokens agree; so in the
# authors' code (fairseq/random_feature_attention/utils.py, SCALE)
_SMALL = 1e-2


def _above_zero(x: Array) -> Array:
    return jax.nn.elu(x) + 1


# of W x + b (2.2 and its note 4)
LEARNED: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "learned_elu": _above_zero,
    "cos": lambda x: _SMALL * jnp.cos(x),
    "tanh": lambda x: _SMALL * jnp.tanh(x),
}


def size(config: ModelConfig) -> int:
    """Return k, the elements of phi(x)."""
    return head_dim(config) if config.linear.map == "elu" else config.linear.features


def shaping(kind: str) -> tuple[str, ...]:
    """Return the fields of `LinearConfig` that say what weights a map has; () if it has none."""
    if kind in LEARNED:
        return ("map", "features")
    return ("map",) if kind == "rfa" else ()


def multiplied(config: ModelConfig) -> int:
    """Return the vectors that x is multiplied with for phi(x)."""
    kind, k = config.linear.map, config.linear.features
    return {"elu": 0, "rfa": k // 2}.get(kind, k)


class FeatureMap(nnx.Module):
    """phi: [... g r e] -> [... g r k], one for each key head and the r query heads that read it.

    Queries and keys share it, as the paper counts its parameters: k (e + 1) a head (2.2). In the
    matrix W of learned maps each element starts as N(0, 1/e), and b as 0.

    Attributes:
      kernel, bias: [g e k] and [g k], W and b of a learned map.
      tau: [g], the temperature of rfa.
      folded: W x + b is what the projections give already, see `fold`.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.kind = config.linear.map
        self.shape = g, e, k = (config.kv_heads or config.heads, head_dim(config), size(config))
        learned = self.kind in LEARNED
        start = jax.random.normal(rngs.params(), (g, e, k)) * e**-0.5 if learned else None
        self.kernel = nnx.Param(start) if learned else None
        self.bias = nnx.Param(jnp.zeros((g, k))) if learned else None
        self.tau = nnx.Param(jnp.ones(g)) if self.kind == "rfa" else None
        self.folded = False

    def fold(self, projection: Linear, gain: float = 1.0) -> None:
        """Fold W and b into a projection whose output this map reads (T2R, Equation 8).

            W' = gain W_q W          b' = gain b_q W + b

        Args:
          projection: [... d h e], of h = g r heads, with leading axes of layers or without.
          gain: what stands between both.
        """
        assert self.kernel is not None
        assert self.bias is not None
        kernel, bias = self.kernel[...], self.bias[...]

        def times(x: Array, equation: str) -> Array:
            *lead, h, e = x.shape
            g, _, k = kernel.shape[-3:]
            y = jnp.einsum(
                equation,
                x.reshape(*lead, g, h // g, e),
                kernel,
                precision=jax.lax.Precision.HIGHEST,
            )
            return gain * y.reshape(*lead, h, k)

        h = projection.kernel.shape[-2]
        folded = jnp.repeat(bias, h // bias.shape[-2], axis=-2)
        if projection.bias is not None:
            folded = folded + times(projection.bias[...], "...gre,...gek->...grk")
        projection.kernel = nnx.Param(times(projection.kernel[...], "...dgre,...gek->...dgrk"))
        # there may have been none
        projection.bias = nnx.data(nnx.Param(folded))

    def drop(self) -> None:
        """Leave W and b to the projections that they were folded into."""
        self.kernel, self.bias, self.folded = None, None, True

    def __call__(self, x: Array) -> Array:
        if self.folded:
            return LEARNED[self.kind](x)
        if self.kernel is not None and self.bias is not None:
            bias = self.bias[...].astype(x.dtype)[:, None]
            return LEARNED[self.kind](_times(x, self.kernel[...]) + bias)
        fixed = {"elu": _above_zero, "rfa": self._sines, "performer": self._positive}[self.kind]
        return fixed(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)

    def _sines(self, x: Array) -> Array:
        """[sin(w_i x / tau), cos(w_i x / tau)] of x of length 1 (Peng et al., 2021, 3.1)."""
        g, e, k = self.shape
        # the root's gradient is finite at x = 0 too
        length = jnp.sqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)
        tau = self.tau[...][:, None, None]  # type: ignore[index]
        angle = _times(x / (length * tau), random_vectors(g, e, k // 2))
        return _SMALL * jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)

    def _positive(self, x: Array) -> Array:
        """exp(w_i x - |x|^2 / 2) / sqrt(k) (Choromanski et al., 2021, Lemma 1).

        The mean of phi(q) phi(k) is exp(q k / sqrt(e)) for x = q / e^(1/4). No maximum is
        subtracted: in causal attention it would be another for every key (T2R 3.1, note 7).
        """
        g, e, k = self.shape
        x = x * e**-0.25
        products = _times(x, orthogonal_vectors(g, e, k))
        exponent = products - jnp.square(x).sum(-1, keepdims=True) / 2
        return k**-0.5 * (jnp.exp(exponent) + 1e-4)


def _times(x: Array, kernel: Any) -> Array:
    """[... g r e] [g e k] -> [... g r k]."""
    return jnp.einsum("...gre,gek->...grk", x, jnp.asarray(kernel, x.dtype))


@functools.cache
def random_vectors(g: int, e: int, k: int) -> np.ndarray:
    """Return w [g e k] of N(0, 1), always the same ones, for all layers.

    So no checkpoint holds them. NumPy keeps the numbers of `RandomState` as they are for ever.
    """
    return np.random.RandomState(0).normal(size=(g, e, k))


@functools.cache
def orthogonal_vectors(g: int, e: int, k: int) -> np.ndarray:
    """Return w [g e k] as `random_vectors`, but orthogonal within each e of a head's k vectors."""
    n = -(-k // e)
    directions, lengths = random_vectors(2 * g, e, n * e).reshape(2, g, e, n, e).swapaxes(2, 3)
    q, r = np.linalg.qr(directions)
    # the one factorisation whose r has a positive diagonal, whatever the library chose
    q = q * np.sign(np.diagonal(r, axis1=-2, axis2=-1))[..., None, :]
    # as long as Gaussian vectors are, independently of their directions
    q = q * np.linalg.norm(lengths, axis=-2, keepdims=True)
    return q.swapaxes(1, 2).reshape(g, e, n * e)[..., :k]
