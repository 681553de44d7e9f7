"""The gate of a bounded memory update: how far each memory token moves to its new value."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.config.resolved import ResolvedModelConfig
from famjax.config.schema import ModelConfig
from famjax.core.types import Array
from famjax.parallel.sharding import register_parameter_axes

# a gate below this is closed: a gate that only approaches 0 loses a memory in the end
THRESHOLD = 1e-2

register_parameter_axes((r"memory_gate/weight$", ()))


class MemoryGate(nnx.Module):
    """One gate in [0, 1] for each memory token, from the attention output A [f d] of the token.

        g_s = max(0, sigmoid(w . A_s / rms(A_s) + b_s) - c) / (1 - c),   c = THRESHOLD

    `w` starts at 0, and `b` so that the sigmoid is 1 / T_s: timescales T in blocks, spaced evenly
    in log(T) from `fam_min_timescale` to `fam_max_timescale`. The threshold is subtracted from it:
    for T = 64 the gate starts at 1/176, for 16 at 1/19.
    """

    def __init__(self, config: ResolvedModelConfig):
        timescales = np.geomspace(
            config.fam_min_timescale, config.fam_max_timescale, config.fam_len
        )
        self.weight = nnx.Param(jnp.zeros((config.width,)))
        self.bias = nnx.Param(jnp.asarray(-np.log(timescales - 1), self.weight[...].dtype))

    def __call__(self, attended: Array) -> Array:
        """[... f d] -> [... f 1]."""
        rms = jnp.sqrt(jnp.square(attended).mean(-1, keepdims=True) + 1e-6)
        logits = (attended / rms * self.weight[...]).sum(-1) + self.bias[...]
        return jax.nn.relu(jax.nn.sigmoid(logits)[..., None] - THRESHOLD) / (1 - THRESHOLD)


def count_params(config: ModelConfig) -> int:
    """Return the number of a gate's parameters."""
    return config.width + config.fam_len
