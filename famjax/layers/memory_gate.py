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

register_parameter_axes((r"memory_gate/weight$", ()))


class MemoryGate(nnx.Module):
    """One gate in [0, 1] for each memory token, from the attention output A [f d] of the token.

        g_s = max(0, sigmoid(w . A_s / rms(A_s) + b_s) - c) / (1 - c)

    A gate below the threshold c, `fam_gate_threshold`, is closed. `w` starts at 0, and `b_s` such
    that the sigmoid is 1 / T_s. The timescales T_s, in blocks, are spaced evenly in log(T) from
    `fam_min_timescale` to `fam_max_timescale`. Because the threshold is subtracted, gates start
    lower than 1 / T_s: with c = 0.01 at 1/176 for T = 64, at 1/19 for T = 16.
    """

    def __init__(self, config: ResolvedModelConfig):
        timescales = np.geomspace(
            config.fam_min_timescale, config.fam_max_timescale, config.fam_len
        )
        self.threshold = config.fam_gate_threshold
        self.weight = nnx.Param(jnp.zeros((config.width,)))
        self.bias = nnx.Param(jnp.asarray(-np.log(timescales - 1), self.weight[...].dtype))

    def __call__(self, attended: Array) -> Array:
        """Return the gates of attention outputs: [... f d] -> [... f 1]."""
        rms = jnp.sqrt(jnp.square(attended).mean(-1, keepdims=True) + 1e-6)
        logits = (attended / rms * self.weight[...]).sum(-1) + self.bias[...]
        c = self.threshold
        return jax.nn.relu(jax.nn.sigmoid(logits)[..., None] - c) / (1 - c)


def count_params(config: ModelConfig) -> int:
    """Return the number of parameters of a layer's `MemoryGate`."""
    return config.width + config.fam_len
