"""The feed-forward sublayer, pre-norm and residual."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig
from famjax.core.types import Array, compute_dtype
from famjax.layers.dropout import MLP_HIDDEN, MLP_OUTPUT, apply_dropout, make_dropout
from famjax.layers.linear import Linear
from famjax.layers.lora import adapter_config
from famjax.layers.norm import Norm

_GATED_ACTIVATIONS = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu}
_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "swish": jax.nn.silu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
}


class FeedForward(nnx.Module):
    """FF(PreLN(a)) + a (TransformerFAM 2.1), with ReLU, GELU, Swish, SwiGLU or GeGLU inside.

    With `arch.pre_norm` false it is LN(FF(a) + a) (Vaswani et al., 2017).

    If attention and feed-forward are parallel (`arch.parallel`) it is FF(PreLN(x)) + a, where x is
    the input of attention.

    The residual is added in the dtype of `a`, which for FAM is wider than the compute dtype.
    """

    def __init__(self, config: ResolvedModelConfig, *, rngs: nnx.Rngs):
        d, hidden, arch = config.width, config.mlp_width, config.arch
        self.dtype = compute_dtype(config.dtype)
        self.rates = config.dropout
        self.kind = config.mlp
        self.parallel = arch.parallel
        self.pre_norm = arch.pre_norm
        self.norm = Norm(config.norm, d, arch)
        linear = functools.partial(Linear, dtype=self.dtype, rngs=rngs, bias=arch.mlp_bias)
        up = ("...d,dc->...c", (d, hidden), d)
        lora_for = functools.partial(adapter_config, config.lora)
        self.up = linear(*up, lora=lora_for("mlp.up"))
        self.gate = (
            linear(*up, lora=lora_for("mlp.gate")) if config.mlp in _GATED_ACTIVATIONS else None
        )
        gain = (2 * config.layers) ** -0.5 if arch.pre_norm else 1.0
        down = ("...c,cd->...d", (hidden, d), hidden)
        self.down = linear(*down, gain=gain, lora=lora_for("mlp.down"))
        self.post = Norm(config.norm, d, arch) if arch.post_norm else None

    def __call__(self, a: Array, x: Array, key: Array | None = None) -> Array:
        """Return the sublayer's output: [... d].

        Args:
          a: [... d], the output of attention.
          x: [... d], the input of attention, used only if attention and feed-forward are parallel.
          key: for dropout, see `Context`.
        """
        x = x if self.parallel else a
        x = self.norm(x, self.dtype) if self.pre_norm else x.astype(self.dtype)
        if self.gate is None:
            hidden = _ACTIVATIONS[self.kind](self.up(x))
        else:
            hidden = _GATED_ACTIVATIONS[self.kind](self.gate(x)) * self.up(x)
        y = self.down(apply_dropout(hidden, make_dropout(self.rates.hidden, key, MLP_HIDDEN)))
        if self.post is not None:
            y = self.post(y, self.dtype)
        y = a + apply_dropout(y.astype(a.dtype), make_dropout(self.rates.residual, key, MLP_OUTPUT))
        return y if self.pre_norm else self.norm(y, y.dtype)
