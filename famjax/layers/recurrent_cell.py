"""The recurrent cell of the Block-Recurrent Transformer (Hutchins et al. 2022, arXiv 2203.07852).

A block of tokens x and the f state vectors c before it attend to each other (3.1):

    i   = PreLN(c) + ids                           q', q'', k', v' of i;  q, k, v of PreLN(x)
    h   = Concat(Attention(q', k', v'), Attention(q'', k, v))
    z   = W_z h + b_z
    fixed   c <- g c + (1 - g) z,   g = sigmoid(b_g)                                       (3.2)
    lstm    c <- a c + u tanh(z),   a = sigmoid(W_a h + b_a + 1),  u = sigmoid(W_u h + b_u - 1)
    o   = Attention(Q_x PreLN(x), k', v') W_o,   added to what the tokens read from their window

Both directions use the same keys and values of tokens and of states, but different queries. The
learned ids distinguish states that are otherwise equal. Tokens and states read each other without
positions. The gates are those of the paper's best configuration, "skip", in which the states have
no feed-forward.

    f  state vectors, `model.fam_len`
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig, sizes
from famjax.config.schema import ModelConfig
from famjax.core.types import Array, compute_dtype, param_dtype
from famjax.layers.linear import Linear
from famjax.layers.norm import Norm
from famjax.ops.attention import attend
from famjax.parallel.sharding import register_parameter_axes

register_parameter_axes(
    (r"recurrent_cell/(z|keep|write)/kernel$", ("heads", None, "embed")),
    (r"recurrent_cell/(initial|ids|gate)$", ()),
)

# scale of the initial states, and of the gates' biases and weights, as in the authors' code
_SMALL = 0.1


class RecurrentCell(nnx.Module):
    """The parameters of a layer's state vectors, and how blocks read and update them."""

    def __init__(self, config: ResolvedModelConfig, *, rngs: nnx.Rngs):
        d, h, e, f = config.width, config.heads, config.head_dim, config.fam_len
        self.dtype = compute_dtype(config.dtype)
        self.norm = Norm(config.norm, d, config.arch)
        self.initial = nnx.Param(_SMALL * jax.random.normal(rngs.params(), (f, d)))
        self.ids = nnx.Param(jax.random.normal(rngs.params(), (f, d)))
        linear = functools.partial(Linear, dtype=self.dtype, rngs=rngs)
        query = functools.partial(linear, "...d,dhe->...he", (d, h, e), d)
        key = functools.partial(linear, "...d,dge->...ge", (d, config.kv_heads, e), d)
        # q, k, v: the states' own; names as in checkpoints
        self.q, self.block_q, self.token_q = query(), query(), query()
        self.k, self.v = key(), key()
        self.token_out = linear(
            "...he,hed->...d", (h, e, d), h * e, gain=(2 * config.layers) ** -0.5
        )
        from_heads = functools.partial(linear, "...he,hed->...d", (2 * h, e, d), 2 * h * e)
        self.z = from_heads(bias=True)
        is_fixed = config.recurrent_gate == "fixed"
        gate = functools.partial(from_heads, gain=_SMALL**0.5, bias=True)
        self.gate = nnx.Param(_SMALL * jax.random.normal(rngs.params(), (d,))) if is_fixed else None
        self.keep = None if is_fixed else gate()
        self.write = None if is_fixed else gate()

    def add_ids(self, states: Array) -> Array:
        """Return PreLN(c) + ids: [... f d] -> [... f d]."""
        return (self.norm(states, param_dtype()) + self.ids[...]).astype(self.dtype)

    def keys_values(self, states: Array) -> tuple[Array, Array]:
        """Return the states' keys and values, for both directions: [... f d] -> [... f g e]."""
        i = self.add_ids(states)
        return self.k(i), self.v(i)

    def read(self, x: Array, k: Array, v: Array) -> Array:
        """Return what tokens read from the states: PreLN(x) [... w d] -> [... w d].

        Args:
          k, v: `keys_values` of the states before the block.
        """
        return self.token_out(attend(self.token_q(x), k, v))

    def update(self, states: Array, k: Array, v: Array, block_k: Array, block_v: Array) -> Array:
        """Return the states [b f d] after a block.

        Args:
          k, v: `keys_values` of the states.
          block_k, block_v: [b w g e], keys and values of the block's tokens, without positions.
        """
        i = self.add_ids(states)
        from_states = attend(self.q(i), k, v)
        from_block = attend(self.block_q(i), block_k, block_v)
        h = jnp.concatenate([from_states, from_block], -2)
        z = self.z(h).astype(states.dtype)
        if self.gate is not None:
            g = jax.nn.sigmoid(self.gate[...])
            return g * states + (1 - g) * z
        assert self.keep is not None
        assert self.write is not None
        keep = jax.nn.sigmoid(self.keep(h).astype(states.dtype) + 1)
        write = jax.nn.sigmoid(self.write(h).astype(states.dtype) - 1)
        return keep * states + write * jnp.tanh(z)


def count_params(config: ModelConfig) -> int:
    """Return the number of parameters of a layer's `RecurrentCell`."""
    d, h, g, e, _ = sizes(config)
    norm = 2 * d if config.norm == "layernorm" else d
    from_heads = 2 * h * e * d + d
    gates = d if config.recurrent_gate == "fixed" else 2 * from_heads
    return norm + 2 * config.fam_len * d + d * (4 * h * e + 2 * g * e) + from_heads + gates


def flops(config: ModelConfig) -> float:
    """Return the model FLOPs of one token: its read, and its share of an update."""
    d, h, g, e, _ = sizes(config)
    f, w = config.fam_len, config.block_len
    read = 2 * 2 * d * h * e + 4 * h * e * f
    matrices = 1 if config.recurrent_gate == "fixed" else 3
    update = 2 * d * (2 * h * e + 2 * g * e + matrices * 2 * h * e) + 4 * h * e * (f + w)
    return read + f / w * update
