"""phi, the feature maps of linear attention (T2R 2.2, 2.3, 3.1)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig, sizes
from famjax.config.schema import ModelConfig
from famjax.core.types import Array, at_least_float32
from famjax.layers.linear import Linear
from famjax.parallel.sharding import register_parameter_axes

# signed features are scaled down, so that sums over few tokens are small compared with the
# denominator's minimum (EPS); SCALE in the authors' code
# (fairseq/random_feature_attention/utils.py)
_SCALE = 1e-2


# one map per key head and its query heads
register_parameter_axes(
    (r"map/kernel$", ("kv_heads", None, None)),
    (r"map/bias$", ("kv_heads", None)),
    (r"map/tau$", ("kv_heads",)),
)


def _elu_plus_one(x: Array) -> Array:
    return jax.nn.elu(x) + 1


# activations of W x + b (2.2 and its note 4)
LEARNED: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "learned_elu": _elu_plus_one,
    "cos": lambda x: _SCALE * jnp.cos(x),
    "tanh": lambda x: _SCALE * jnp.tanh(x),
}


def count_params(config: ModelConfig) -> int:
    """Return the number of parameters of a layer's feature map."""
    kind, s = config.linear.map, sizes(config)
    if kind == "rfa":
        return s.g
    return 0 if kind in ("elu", "performer") else s.g * (s.e + 1) * config.linear.features


def weight_fields(kind: str) -> tuple[str, ...]:
    """Return the fields of `LinearConfig` that a map's weights depend on; () if it has none."""
    if kind in LEARNED:
        return ("map", "features")
    return ("map",) if kind == "rfa" else ()


def num_vectors(config: ModelConfig) -> int:
    """Return the number of vectors that phi multiplies x with."""
    kind, k = config.linear.map, config.linear.features
    return {"elu": 0, "rfa": k // 2}.get(kind, k)


class FeatureMap(nnx.Module):
    """phi: [... g r e] -> [... g r k], one for each key head and its r query heads.

    Queries and keys share it, as in the paper's parameter count, k (e + 1) per head (2.2). Learned
    maps initialize W as N(0, 1/e) and b as 0.

    Attributes:
      kernel, bias: [g e k] and [g k], W and b of a learned map.
      tau: [g], the temperature of rfa.
      is_folded: whether the projections already return W x + b, see `fold_into`.
    """

    def __init__(self, config: ResolvedModelConfig, *, rngs: nnx.Rngs):
        self.kind = config.linear.map
        self.shape = g, e, k = config.kv_heads, config.head_dim, config.linear.features
        is_learned = self.kind in LEARNED
        init = jax.random.normal(rngs.params(), (g, e, k)) * e**-0.5 if is_learned else None
        self.kernel = nnx.Param(init) if is_learned else None
        self.bias = nnx.Param(jnp.zeros((g, k))) if is_learned else None
        self.tau = nnx.Param(jnp.ones(g)) if self.kind == "rfa" else None
        self.is_folded = False

    def fold_into(self, projection: Linear, gain: float = 1.0) -> None:
        """Fold W and b into the projection of this map's input (T2R, Equation 8).

            W' = gain W_q W          b' = gain b_q W + b

        Args:
          projection: [... d h e], of h = g r heads, with or without leading layer axes.
          gain: scale between projection and map.
        """
        assert self.kernel is not None
        assert self.bias is not None
        kernel, bias = self.kernel[...], self.bias[...]

        def multiply(x: Array, equation: str) -> Array:
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
        folded_bias = jnp.repeat(bias, h // bias.shape[-2], axis=-2)
        if projection.bias is not None:
            folded_bias = folded_bias + multiply(projection.bias[...], "...gre,...gek->...grk")
        projection.kernel = nnx.Param(multiply(projection.kernel[...], "...dgre,...gek->...dgrk"))
        # the old bias may have been None
        projection.bias = nnx.data(nnx.Param(folded_bias))

    def drop_weights(self) -> None:
        """Drop W and b after `fold_into`."""
        self.kernel, self.bias, self.is_folded = None, None, True

    def __call__(self, x: Array) -> Array:
        if self.is_folded:
            return LEARNED[self.kind](x)
        if self.kernel is not None and self.bias is not None:
            bias = self.bias[...].astype(x.dtype)[:, None]
            return LEARNED[self.kind](_project(x, self.kernel[...]) + bias)
        fixed = {
            "elu": _elu_plus_one,
            "rfa": self._random_fourier,
            "performer": self._positive_random,
        }[self.kind]
        return fixed(at_least_float32(x)).astype(x.dtype)

    def _random_fourier(self, x: Array) -> Array:
        """[sin(w_i x / tau), cos(w_i x / tau)] of x of length 1 (Peng et al., 2021, 3.1)."""
        g, e, k = self.shape
        # 1e-6 makes the gradient of the root finite at x = 0
        length = jnp.sqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)
        tau = self.tau[...][:, None, None]  # type: ignore[index]
        angle = _project(x / (length * tau), random_vectors(g, e, k // 2))
        return _SCALE * jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1)

    def _positive_random(self, x: Array) -> Array:
        """exp(w_i x - |x|^2 / 2) / sqrt(k) (Choromanski et al., 2021, Lemma 1).

        E[phi(q) phi(k)] = exp(q k / sqrt(e)) for x = q / e^(1/4). No maximum is subtracted: in
        causal attention it would differ for every key (T2R 3.1, note 7).
        """
        g, e, k = self.shape
        x = x * e**-0.25
        products = _project(x, orthogonal_vectors(g, e, k))
        exponent = products - jnp.square(x).sum(-1, keepdims=True) / 2
        return k**-0.5 * (jnp.exp(exponent) + 1e-4)


def _project(x: Array, kernel: Any) -> Array:
    """[... g r e] [g e k] -> [... g r k]."""
    return jnp.einsum("...gre,gek->...grk", x, jnp.asarray(kernel, x.dtype))


@functools.cache
def random_vectors(g: int, e: int, k: int) -> np.ndarray:
    """Return w [g e k] of N(0, 1), the same for all layers and models.

    So checkpoints need not store them: NumPy guarantees that `RandomState`'s stream never changes.
    """
    return np.random.RandomState(0).normal(size=(g, e, k))


@functools.cache
def orthogonal_vectors(g: int, e: int, k: int) -> np.ndarray:
    """Return w [g e k] like `random_vectors`, but in each head every e vectors are orthogonal."""
    n = -(-k // e)
    directions, lengths = random_vectors(2 * g, e, n * e).reshape(2, g, e, n, e).swapaxes(2, 3)
    q, r = np.linalg.qr(directions)
    # the unique factorization whose r has a positive diagonal, independent of the library
    q = q * np.sign(np.diagonal(r, axis1=-2, axis2=-1))[..., None, :]
    # the lengths of Gaussian vectors, independent of their directions
    q = q * np.linalg.norm(lengths, axis=-2, keepdims=True)
    return q.swapaxes(1, 2).reshape(g, e, n * e)[..., :k]
