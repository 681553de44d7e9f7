"""What a training step needs and takes by arithmetic alone, to choose what is worth compiling.

Rough on purpose: it orders candidates. The numbers of a plan are the compiler's.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from famjax.core.checks import mixer_pattern
from famjax.core.config import Config, ModelConfig
from famjax.plan.chips import Topology
from famjax.train.flops import KEYS_COMPUTED, forward_flops, step_flops
from famjax.train.run import abstract_model


class Estimate(NamedTuple):
    """Of one chip.

    Attributes:
      weights: bytes of parameters, gradients and optimizer.
      activations: bytes kept for the backward pass, and a layer's work.
      seconds: the longest of compute, memory and network.
    """

    weights: float
    activations: float
    seconds: float

    @property
    def bytes(self) -> float:
        return self.weights + self.activations


def estimate(config: Config, on: Topology) -> Estimate:
    """Return what one chip of a topology needs and takes; the mesh's axes are all given."""
    model, mesh = config.model, config.mesh
    trained, frozen, frozen_bytes = counted(model, config.train.only)
    divided = mesh.fsdp * mesh.tensor
    # gradients beside the parameters; AdamW's two moments, Adafactor's one
    copies = 2 + (2 if config.optimizer.name == "adamw" else 1)
    weights = (trained * 4 * copies + frozen_bytes) / divided
    size = jnp.dtype(model.dtype).itemsize
    # a layer's weights are brought together, twice: the next one's while this one is used
    gathered = 2 * (trained + frozen) / model.layers * size / mesh.tensor if mesh.fsdp > 1 else 0
    if model.tied:
        gathered += model.vocab_size * model.width * size / mesh.tensor
    rows = config.data.batch / (mesh.data * mesh.fsdp * config.train.accumulate)
    tokens = rows * config.data.length / config.train.bptt_segments
    kept = activations(model, tokens, rows, mesh.tensor)
    seconds = _seconds(config, on, (trained + frozen) * size)
    return Estimate(weights + gathered, kept, seconds)


@functools.cache
def counted(model: ModelConfig, only: str) -> tuple[int, int, int]:
    """Return how many parameters are trained and are not, and the bytes of those that are not."""
    _, trained, frozen = abstract_model(model, only=only)

    def elements(tree: Any) -> int:
        return sum(a.size for a in jax.tree.leaves(tree))

    held = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(frozen))
    return elements(trained), elements(frozen), held


def activations(model: ModelConfig, tokens: float, rows: float, tensor: int) -> float:
    """Return the bytes that one device keeps for the backward pass by `model.remat`, with the work
    of the layer that is being read.

    Args:
      tokens: of the rows on the device.
    """
    size = jnp.dtype(model.dtype).itemsize
    e, g = model.head_dim or model.width // model.heads, model.kv_heads or model.heads
    hidden = model.mlp_width or 4 * model.width
    gated = 3 if model.mlp in ("swiglu", "geglu") else 2
    keys = max(
        (KEYS_COMPUTED[m](model) for m in mixer_pattern(model) if m in KEYS_COMPUTED), default=0
    )
    shared = max(1, tensor if g % tensor == 0 else 1)
    # one layer's
    stream = tokens * model.width * size
    seen = 2 * tokens / model.block_len * keys * g * e * size / shared
    products = tokens * (2 * model.heads * e + gated * hidden) * size / tensor
    weights = tokens * keys * model.heads * (size + 4) / tensor
    if model.remat == "none":
        held = stream * 2 + products + tokens * keys * model.heads * size / tensor
        return model.layers * held + seen + weights
    if model.remat == "block":
        weights *= model.block_len * rows / tokens
    return model.layers * stream + 3 * stream + 2 * seen + products + weights


def _seconds(config: Config, on: Topology, weight_bytes: float) -> float:
    model, mesh, chip = config.model, config.mesh, on.chip
    tokens = config.data.batch * config.data.length
    flops = tokens * step_flops(config, computed=True)
    passes = 3.0
    if model.remat != "none":
        flops += tokens * forward_flops(model, computed=True)
        passes += 1
    share = (mesh.fsdp - 1) / mesh.fsdp
    # fetched for each pass over each part of the batch; gradients are few or come once
    network = passes * config.train.accumulate * weight_bytes / mesh.tensor * share
    if mesh.tensor > 1:
        here = tokens / (mesh.data * mesh.fsdp) * model.width * jnp.dtype(model.dtype).itemsize
        network += 2 * passes * model.layers * here * 2 * (mesh.tensor - 1) / mesh.tensor
    return max(flops / on.count / chip.flops, network / chip.network)
