"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685; TransformerFAM 3.1: rank 64)."""

from __future__ import annotations

import fnmatch

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.schema import LoraConfig
from famjax.core.remat import tag_product
from famjax.core.types import Array
from famjax.layers.dropout import dropout, empty_key
from famjax.ops.weight_einsum import weight_einsum


class Adapter(nnx.Param):
    """A parameter that is trained while those it adapts are frozen."""


def adapter_config(config: LoraConfig, name: str) -> LoraConfig | None:
    """Return the config if the linear map of this name has adapters, else None."""
    matches = any(fnmatch.fnmatchcase(name, pattern) for pattern in config.on.split(","))
    return config if config.rank and matches else None


def scale(config: LoraConfig) -> float:
    """Return the factor of B A: alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv 2312.03732)."""
    assert config.alpha, "not of a resolved config"
    return config.alpha / (config.rank**0.5 if config.rs else config.rank)


class Lora(nnx.Module):
    """scale * B A x, added to a linear map W x. B is initialized as 0, so that nothing changes.

    Args:
      equation: einsum of the adapted map, such as "...d,dhe->...he".
      shape: shape of the adapted map's kernel.
      inputs: fan-in; A is initialized as in torch.nn.Linear and peft, uniformly within
        1 / sqrt(inputs) of 0.
    """

    def __init__(
        self,
        equation: str,
        shape: tuple[int, ...],
        inputs: int,
        config: LoraConfig,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        operands, output = equation.replace("...", "").split("->")
        summed = operands.partition(",")[0]
        self.down = f"...{summed},{summed}z->...z"
        self.up = f"...z,z{output}->...{output}"
        self.scale, self.dropout, self.dtype = scale(config), config.dropout, dtype
        count, bound = len(summed), inputs**-0.5
        low = (*shape[:count], config.rank)
        self.a = Adapter(jax.random.uniform(rngs.params(), low, minval=-bound, maxval=bound))
        self.b = Adapter(jnp.zeros((config.rank, *shape[count:])))
        self.key = empty_key() if config.dropout else None

    def __call__(self, x: Array) -> Array:
        x = x.astype(self.dtype)
        if self.key is not None:
            x = dropout(x, self.dropout, jax.random.wrap_key_data(self.key[...]))
        low = tag_product(weight_einsum(self.down, x, self.a[...].astype(self.dtype)))
        return self.scale * weight_einsum(self.up, low, self.b[...].astype(self.dtype))


def merge_adapter(kernel: Array, a: Array, b: Array, config: LoraConfig) -> Array:
    """Return W + scale * B A of one linear map, or of maps stacked on leading axes.

    Args:
      kernel: [... inputs... outputs...]; a: [... inputs... rank]; b: [... rank outputs...].
    """
    lead = a.ndim + b.ndim - 2 - kernel.ndim  # leading layer axes of both
    stacked = (*kernel.shape[:lead],)
    ab = (a.reshape(*stacked, -1, a.shape[-1]), b.reshape(*stacked, a.shape[-1], -1))
    low = jnp.matmul(*ab, precision=jax.lax.Precision.HIGHEST)
    return kernel + (scale(config) * low).reshape(kernel.shape).astype(kernel.dtype)
