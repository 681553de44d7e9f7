"""A formula for memory and time of a training step, which selects candidates for compilation.

The formula is rough and only used to rank candidates; the numbers in a plan come from the compiler.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from famjax.config.resolved import ResolvedConfig, ResolvedModelConfig, sizes
from famjax.config.schema import ModelConfig
from famjax.core.types import PyTree, tree_bytes
from famjax.mixers import mixer_specs
from famjax.optimizers import OPTIMIZERS
from famjax.plan.chips import Topology
from famjax.train.flops import forward_flops, model_of_rows, source_tokens, step_flops
from famjax.train.run import abstract_model

REMAT: tuple[Literal["none", "attention", "layer", "block"], ...] = (
    "none",
    "attention",
    "layer",
    "block",
)

# number of copies of a layer's arrays in its backward pass: gradients, float32 copies, other
# layouts. Fitted to the compiled programs of FAM 1B and 8B (docs/scale.md)
WORK = 2.5


class Estimate(NamedTuple):
    """Memory and time of one chip.

    Attributes:
      weights: bytes of parameters, gradients and optimizer state.
      activations: bytes of the backward pass's residuals, and of one layer's temporaries.
      seconds: the larger of compute and memory time, plus network time.
    """

    weights: float
    activations: float
    seconds: float

    @property
    def bytes(self) -> float:
        return self.weights + self.activations


def estimate(config: ResolvedConfig, topology: Topology) -> Estimate:
    """Estimate memory and time of one chip of a topology."""
    model, mesh = config.model, config.mesh
    trained, frozen, frozen_bytes = count_parameters(model, config.train.only)
    divided = mesh.fsdp * mesh.tensor
    # parameters, gradients and moments
    copies = 2 + OPTIMIZERS[config.optimizer.name].moments
    weights = (trained * 4 * copies + frozen_bytes) / divided
    size = jnp.dtype(model.dtype).itemsize
    # all-gathered weights of two layers, since those of the next layer are prefetched
    gathered = 2 * (trained + frozen) / model.layers * size / mesh.tensor if mesh.fsdp > 1 else 0
    if model.tied:
        gathered += 2 * model.vocab_size * model.width * size / mesh.tensor
    seconds = _estimate_seconds(config, topology, (trained + frozen) * size, trained * 4)
    return Estimate(weights + gathered, device_activations(config), seconds)


def device_activations(config: ResolvedConfig) -> float:
    """Return `layer_activations` of one device, including an encoder and the attention to it."""
    model, mesh, train = model_of_rows(config), config.mesh, config.train
    rows = config.data.batch / (mesh.data * mesh.fsdp * train.accumulate)
    tokens = rows * config.data.length / train.bptt_segments / mesh.sequence
    held = layer_activations(model, tokens, rows, mesh.tensor)
    if not model.encoder.layers:
        return held
    source = config.data.source_length or config.data.length
    depth = model.encoder.layers
    encoder = replace(model, stack="residual", mixer="full", layers=depth, capacity=source)
    held += cross_activations(model, tokens, rows, source, mesh.tensor)
    return held + layer_activations(encoder, rows * source, rows, mesh.tensor)


def activations_by_remat(config: ResolvedConfig) -> dict[str, float]:
    """Return `device_activations` for each value of `model.remat` that the stack supports."""
    stack = config.model.stack
    names = REMAT if stack == "residual" else (config.model.remat,)
    return {
        r: device_activations(replace(config, model=replace(config.model, remat=r))) for r in names
    }


@functools.cache
def count_parameters(model: ModelConfig, only: str) -> tuple[int, int, int]:
    """Return the numbers of trained and of frozen parameters, and the bytes of frozen ones."""
    _, trained, frozen = abstract_model(model, only=only)

    def elements(tree: PyTree) -> int:
        return sum(a.size for a in jax.tree.leaves(tree))

    return elements(trained), elements(frozen), tree_bytes(frozen)


def layer_activations(model: ResolvedModelConfig, tokens: float, rows: float, tensor: int) -> float:
    """Return one device's bytes for the residuals that `model.remat` saves and for temporaries.

    Temporaries are those of one layer.

    Args:
      tokens: number of tokens on the device, of all its rows.
      rows: number of rows on the device.
      tensor: size of the mesh's tensor axis.
    """
    layer = _layer_bytes(model, tokens, rows, tensor)
    if model.remat == "none":
        held = 2 * layer.stream + layer.products + layer.weights
        return model.layers * held + WORK * (layer.keys_values + layer.weights)
    sequential_blocks = model.remat in ("attention", "block") and is_windowed(model)
    weights = layer.weights * (model.block_len * rows / tokens if sequential_blocks else 1)
    work = 3 * layer.stream + 2 * layer.keys_values + layer.products + 3 * weights
    held = layer.stream + (layer.attended if model.remat == "attention" else 0)
    return model.layers * held + WORK * work


def cross_activations(
    model: ResolvedModelConfig, tokens: float, rows: float, source: int, tensor: int
) -> float:
    """Return the bytes that attention to an encoder adds to `layer_activations`.

    Args:
      tokens: number of tokens on the device, of all its rows.
      rows: number of rows on the device.
      source: number of tokens for the sources in a row.
      tensor: size of the mesh's tensor axis.
    """
    s = sizes(model)
    size = jnp.dtype(model.dtype).itemsize
    shared = tensor if s.g % tensor == 0 else 1
    attended = tokens * s.h * s.e * size / tensor
    weights = tokens * source * s.h * size / tensor
    # keys and values of all layers are projected before the first layer runs
    keys_values = 2 * rows * source * s.g * s.e * size / shared
    if model.remat == "none":
        held = tokens * model.width * size + 2 * attended + weights + keys_values
        return model.layers * held + WORK * (keys_values + weights)
    return model.layers * keys_values + WORK * (2 * attended + keys_values + 3 * weights)


class _LayerBytes(NamedTuple):
    """Bytes of one layer's arrays.

    Attributes:
      stream: the layer's input.
      attended: the attention output.
      products: q, the attention output and the hidden units of the feed-forward.
      keys_values: k and v, gathered for the blocks.
      weights: attention weights.
    """

    stream: float
    attended: float
    products: float
    keys_values: float
    weights: float


def _layer_bytes(
    model: ResolvedModelConfig, tokens: float, rows: float, tensor: int
) -> _LayerBytes:
    size = jnp.dtype(model.dtype).itemsize
    s = sizes(model)
    gated = 3 if model.mlp in ("swiglu", "geglu") else 2
    keys = max((spec.keys_computed(model) for spec in mixer_specs(model)), default=0)
    shared = tensor if s.g % tensor == 0 else 1
    # layers without blocks have one set of keys for all tokens of a row
    has_blocks = any(spec.is_blockwise for spec in mixer_specs(model))
    block = model.block_len if has_blocks else tokens / rows
    return _LayerBytes(
        tokens * model.width * size,
        tokens * model.heads * s.e * size / tensor,
        tokens * (2 * model.heads * s.e + gated * s.hidden) * size / tensor,
        2 * tokens / block * keys * s.g * s.e * size / shared,
        tokens * keys * model.heads * size / tensor,
    )


def _estimate_seconds(
    config: ResolvedConfig, topology: Topology, weight_bytes: float, trained_bytes: float
) -> float:
    model, mesh, chip = model_of_rows(config), config.mesh, topology.chip
    config = replace(config, model=model)
    tokens = config.data.batch * config.data.length
    flops = tokens * step_flops(config, computed=True)
    # forward pass, backward pass to both factors, and rematerialization
    passes = {"none": 3.0, "attention": 4.0, "layer": 4.0, "block": 5.0}[model.remat]
    if model.remat != "none":
        flops += tokens * forward_flops(model, True, source_tokens(config.data, True))
    here = tokens / (mesh.data * mesh.fsdp * mesh.sequence)
    rows = config.data.batch / (mesh.data * mesh.fsdp)
    layer = _layer_bytes(model, here, rows, mesh.tensor)
    traffic = passes * model.layers * (8 * layer.products + 6 * layer.weights)
    share = (mesh.fsdp - 1) / mesh.fsdp
    # weights are gathered for each pass over each microbatch; gradients are reduced once per
    # microbatch
    network = 3 * config.train.accumulate * weight_bytes / mesh.tensor * share
    if mesh.tensor > 1:
        network += 6 * model.layers * layer.stream * 2 * (mesh.tensor - 1) / mesh.tensor
    summed = 1 - 1 / (mesh.data * mesh.fsdp * mesh.sequence)
    network += 2 * config.train.accumulate * trained_bytes / mesh.tensor * summed
    if mesh.sequence > 1:
        network += passes * model.layers * rows * _remote_kv_bytes(config)
    device = max(flops / topology.count / chip.flops, traffic / chip.bandwidth)
    # each device's part of a row waits for the memory of the preceding device
    device *= 1 + (mesh.sequence - 1) * _recurrent_share(model)
    # no overlap, so that among candidates of equal compute the one with less communication wins
    return device + network / topology.network


def _remote_kv_bytes(config: ResolvedConfig) -> float:
    """Return the bytes of a row's keys and values that a layer receives from other devices.

    These are devices along the mesh axis `sequence`.
    """
    m, mesh = config.model, config.mesh
    s = sizes(m)
    tokens = config.data.length * (mesh.sequence - 1) / mesh.sequence
    keys = max((spec.remote_keys(m, tokens) for spec in mixer_specs(m)), default=0)
    return (
        2
        * keys
        * s.g
        * s.e
        * jnp.dtype(m.dtype).itemsize
        / (mesh.tensor if s.g % mesh.tensor == 0 else 1)
    )


def is_windowed(model: ModelConfig) -> bool:
    """Return whether all layers have blockwise attention."""
    return all(spec.is_blockwise for spec in mixer_specs(model))


def _recurrent_share(model: ModelConfig) -> float:
    """Return the fraction of a block's tokens that are processed sequentially."""
    return max((spec.recurrent_share(model) for spec in mixer_specs(model)), default=0.0)
