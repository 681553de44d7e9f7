"""An associative memory of constant size: a matrix for a key head, written by the delta rule.

    S_j   = S_{j-1} + beta_j phi(k~_j) (v_j - S_{j-1}^T phi(k~_j))^T
    out_i = gain S^T phi(q_i)
    k~_j  = (1 - s) k_j + s k_{j-1}
    beta_j = max(0, sigmoid(a w . x_j / rms(x_j) + b) - c) / (1 - c)         x_j = [k_j, v_j]

At the first token of a block k_{j-1} is 0.

The last n of a layer's g key heads have such a memory (`model.delta_heads`), and the n h / g query
heads of these key heads read it. s, w and b of each key head and the gain of each query head are
learned. A value is written under its token's key, smeared with the previous token's key
(`KeySmear`), so that the memory can recall what followed a token.

phi has unit norm (less for keys near 0), so that after a write with beta = 1, reading S with the
same key k~_j returns v_j. Its features are those of DPFP (Schlag et al. 2021, arXiv 2102.11174,
5.3): with y = relu([x, -x]), the products y_i y_{i-o} for offsets o from 1 to `delta_order`. Most
of them are 0, so that keys interfere less with each other than they would in e dimensions.

The write rate beta can be exactly 0: tokens that a head has learned to ignore leave S unchanged,
bit for bit, however many there are. There is no other forgetting: a write replaces what its key
returned before, so S does not grow with the document.
"""

from __future__ import annotations

import functools
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig, sizes
from famjax.config.schema import ModelConfig
from famjax.core.types import Array, param_dtype
from famjax.layers.key_smear import KeySmear, previous_keys
from famjax.ops.delta_rule import CPU_CHUNK, DeltaUpdate, chunk_len, delta_update
from famjax.parallel.sharding import register_parameter_axes

register_parameter_axes(
    (r"delta_memory/rate_weight$", ("kv_heads", None)),
    (r"delta_memory/rate_bias$", ("kv_heads",)),
    (r"delta_memory/gain$", ("heads",)),
)

# the initial gain; 1 disturbs an already trained window at first, and with 0.1 the memory learns
# later
_GAIN = 0.3
# the factor a: rates change this many times as fast as their weights; with 1 they do not close in
# time
_RATE_SCALE = 5.0
# the initial b, for a rate of 0.09: heads that write every token at first still write most tokens
# at the end of training, and overwrite what a long document needs (docs/memory.md)
_RATE_BIAS = -1.5
# the threshold c: a sigmoid below it is a rate of 0
_RATE_THRESHOLD = 0.1
# the constants that determine the memory's function besides the parameters (`MixerSpec.constants`)
CONSTANTS = MappingProxyType(
    {"delta_memory.rate_scale": _RATE_SCALE, "delta_memory.rate_threshold": _RATE_THRESHOLD}
)
# how many chunks of a block the scan unrolls; without unrolling it takes a quarter longer on CPU
_UNROLLED = 4


class Writes(NamedTuple):
    """What the tokens of blocks write into S.

    Attributes:
      k: [... w g e], smeared keys k~.
      v: [... w g e], values.
      rates: [... w g], beta.
    """

    k: Array
    v: Array
    rates: Array


class DeltaMemory(nnx.Module):
    """The parameters of the memory, and its reads and writes; the caller holds the state.

    Methods take the keys, values and queries of the heads that have a memory (`key_heads`,
    `query_heads`); `read` takes the queries of all heads.
    """

    def __init__(self, config: ResolvedModelConfig):
        g, e = config.delta_heads, config.head_dim
        self.order = config.delta_order
        self.key_smear = KeySmear(g)
        self.rate_weight = nnx.Param(jnp.zeros((g, 2 * e)))
        self.rate_bias = nnx.Param(jnp.full(g, _RATE_BIAS))
        self.gain = nnx.Param(jnp.full(g * config.heads // config.kv_heads, _GAIN))

    def key_heads(self, k: Array) -> Array:
        """Return the keys or values [... e] of the key heads that have a memory: [... g e]."""
        return k[..., -self.rate_bias.shape[0] :, :]

    def query_heads(self, q: Array) -> Array:
        """Return the queries [... e] of the heads that read a memory: [... h e]."""
        return q[..., -self.gain.shape[0] :, :]

    def init_state(self, batch: int) -> Array:
        """Return the empty memory S [b g k e], float32 regardless of the compute dtype."""
        g, width = self.rate_weight[...].shape
        return jnp.zeros((batch, g, self.order * width, width // 2), param_dtype())

    def features(self, x: Array) -> Array:
        """Return phi(x), of unit norm: [... e] -> [... k], k = 2 e delta_order."""
        return _features(self.order, x.astype(param_dtype()))

    def rates(self, k: Array, v: Array) -> Array:
        """Return the write rates beta of tokens with keys k and values v: [... g e] -> [... g]."""
        x = jnp.concatenate([k, v], -1).astype(param_dtype())
        rms = jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
        logits = _RATE_SCALE * (x / rms * self.rate_weight[...]).sum(-1) + self.rate_bias[...]
        return jax.nn.relu(jax.nn.sigmoid(logits) - _RATE_THRESHOLD) / (1 - _RATE_THRESHOLD)

    def make_writes(self, k: Array, v: Array) -> Writes:
        """Return what the tokens of blocks write, from their keys and values [... w g e].

        Args:
          k: keys without positions.
        """
        smeared = self.key_smear(k, previous_keys(k))
        return Writes(smeared, v.astype(param_dtype()), self.rates(k, v))

    def make_updates(self, writes: Writes) -> DeltaUpdate:
        """Return the updates of S by blocks, for each of their chunks in order.

        Returns:
          Arrays of [... n_c g c ...], n_c chunks of c tokens.
        """
        c = chunk_len(writes.rates.shape[-2])

        def chunks(x: Array) -> Array:
            """[... w g e] -> [... w/c g c e]."""
            *lead, w, g, size = x.shape
            return jnp.moveaxis(x.reshape(*lead, w // c, c, g, size), -2, -3)

        # split into chunks before mapping to features, which are several times as large as keys, so
        # that they need not be transposed
        k, v = self.features(chunks(writes.k)), chunks(writes.v)
        return delta_update(k, v, chunks(writes.rates[..., None])[..., 0])

    def recall(self, q: Array, s: Array) -> Array:
        """Return S^T phi(q), float32: [... w h e].

        Args:
          q: [... w h e], queries.
          s: [... g e k], the transpose of S.
        """
        *lead, w, h, e = q.shape
        g = s.shape[-3]
        # group the queries by key head before mapping them to features, which are larger
        q_features = self.features(jnp.moveaxis(q, -2, -3).reshape(*lead, g, h // g * w, e))
        return jnp.moveaxis((q_features @ s.mT).reshape(*lead, h, w, e), -3, -2)

    def read(self, q: Array, s: Array) -> Array:
        """Read S [... g k e] with the queries of all heads, in their shape and dtype."""
        return self.scale(self.recall(self.query_heads(q), s.mT), q)

    def scale(self, recalled: Array, q: Array) -> Array:
        """Return what was recalled [... w h e] times the heads' gains, in the queries' dtype.

        0 for the heads of q [... e] that have no memory.
        """
        scaled = (self.gain[...][:, None] * recalled).astype(q.dtype)
        others = q.shape[-2] - scaled.shape[-2]
        return jnp.pad(scaled, [(0, 0)] * (q.ndim - 2) + [(others, 0), (0, 0)])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _features(order: int, x: Array) -> Array:
    """Return phi(x): [... e] -> [... 2 e order]."""
    return _features_and_scale(order, x)[0]


def _features_and_scale(order: int, x: Array) -> tuple[Array, Array]:
    """Return phi(x), and the inverse norm [... 1] of its products."""
    y, shifted = _shifted(order, x)
    products = jnp.concatenate([y * other for other in shifted], -1)
    scale = jax.lax.rsqrt(jnp.square(products).sum(-1, keepdims=True) + 1e-6)
    return products * scale, scale


def _shifted(order: int, x: Array) -> tuple[Array, list[Array]]:
    """Return y = relu([x, -x]), and for each offset o the array of y_{i-o}: [... 2 e]."""
    y = jax.nn.relu(jnp.concatenate([x, -x], -1))
    size = y.shape[-1]
    cyclic = jnp.concatenate([y[..., size - order :], y], -1)
    return y, [cyclic[..., order - offset :][..., :size] for offset in range(1, order + 1)]


def _features_forward(order: int, x: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    phi, scale = _features_and_scale(order, x)
    return phi, (x, phi, scale)


def _features_backward(
    order: int, saved: tuple[Array, Array, Array], gradient: Array
) -> tuple[Array]:
    # automatic differentiation pads and adds an array for each slice, which takes twice as long on
    # CPU
    x, phi, scale = saved
    y, shifted = _shifted(order, x)
    d_products = scale * (gradient - phi * (phi * gradient).sum(-1, keepdims=True))
    d_y = jnp.zeros_like(y)
    for offset, (d, other) in enumerate(
        zip(jnp.split(d_products, order, -1), shifted, strict=True), start=1
    ):
        d_y += d * other + jnp.roll(d * y, -offset, -1)
    positive, negative = jnp.split(d_y, 2, -1)
    return (jnp.where(x > 0, positive, 0) - jnp.where(x < 0, negative, 0),)


_features.defvjp(_features_forward, _features_backward)


def write(s: Array, updates: DeltaUpdate) -> Array:
    """Return the transpose of S after a block, from that before it: [b g e k] -> [b g e k].

    Args:
      updates: the updates of the block's chunks, arrays of [b n_c g c ...].
    """

    def body(s: Array, update: DeltaUpdate) -> tuple[Array, None]:
        return update(s), None

    chunk_major = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), updates)
    return jax.lax.scan(body, s, chunk_major, unroll=_UNROLLED)[0]


def state_bytes(config: ModelConfig) -> int:
    """Return the bytes of S, float32."""
    _, g, e = _sizes(config)
    return 4 * g * 2 * config.delta_order * e * e


def _sizes(config: ModelConfig) -> tuple[int, int, int]:
    """Return h and g, the numbers of heads that read a memory and that have one, and e."""
    s = sizes(config)
    own = config.delta_heads or s.g
    return own * s.h // s.g, own, s.e


def count_params(config: ModelConfig) -> int:
    """Return the number of a memory's parameters."""
    h, g, e = _sizes(config)
    return g * (2 * e + 2) + h


def flops(config: ModelConfig) -> float:
    """Return the model FLOPs of one token: its update of S, and the read."""
    h, g, e = _sizes(config)
    # counted for the CPU's chunk length on all devices: model FLOPs must not depend on the device
    k, c = 2 * config.delta_order * e, chunk_len(config.block_len, CPU_CHUNK)
    update = 2 * g * (c * k + c * e + 2 * k * e)
    return update + 2 * h * k * e
