"""Partition of parameters into trainable and frozen, and fingerprints of weights."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.config.schema import Config, DropoutConfig, ModelConfig
from famjax.core.errors import UserError
from famjax.core.types import Array, Params
from famjax.layers.dropout import DropoutKey
from famjax.layers.lora import Adapter
from famjax.models.language_model import LanguageModel
from famjax.parallel.sharding import path_name

_FEATURE_MAP = nnx.PathContains("map")
# parameters of mixers that the initial model may lack, so they are trained together with adapters
_MIXERS_OWN = nnx.All(nnx.PathContains("mixer"), nnx.Not(nnx.PathContains("qkv")))
# the same for attention to an encoder: its feature map
_CROSS_OWN = nnx.All(nnx.PathContains("cross"), nnx.Not(nnx.PathContains("qkv")))
_TRAINED_WITH_ADAPTERS = nnx.Any(
    Adapter,
    _MIXERS_OWN,
    _CROSS_OWN,
    *map(
        nnx.PathContains,
        ("prompt", "short_conv", "ngram_memory", "memory_norm", "mix", "distances", "span"),
    ),
)

Frozen = tuple[Any, ...]


def has_frozen_params(config: Config) -> bool:
    """Return whether some weights are frozen and stay as in `init`."""
    return bool(config.model.lora.rank) or config.train.only != "all"


def partition_trainable(
    config: ModelConfig, model: nnx.Module, only: str = "all"
) -> tuple[Any, Params, Frozen]:
    """Return a model's graph, its trainable parameters, and its frozen state.

    `nnx.merge(graph, trained, *frozen)` is the model. `frozen` is () if everything is trained and
    there is no dropout; otherwise it holds the frozen weights, in the dtype `lora.base`, and the
    dropout keys.

    Args:
      only: `train.only`, which parameters are trained.
    """
    parts: Any = nnx.split(model, _trainable_filter(config, only), nnx.Param, DropoutKey)
    graph, trained, weights, keys = parts
    if not jax.tree.leaves((weights, keys)):
        return graph, trained, ()
    weights = jax.tree.map(lambda a: _cast(a, jnp.dtype(config.lora.base)), weights)
    return graph, trained, (weights, keys)


def _trainable_filter(config: ModelConfig, only: str) -> Any:
    """Return the NNX filter of the trainable parameters."""
    if only == "maps":
        return nnx.All(nnx.Param, _FEATURE_MAP)
    trainable = nnx.All(nnx.Param, _TRAINED_WITH_ADAPTERS) if config.lora.rank else nnx.Param
    return trainable if only == "all" else nnx.All(trainable, nnx.Not(_FEATURE_MAP))


def _cast(a: Any, dtype: jnp.dtype) -> Any:
    is_shape = isinstance(a, jax.ShapeDtypeStruct)
    return jax.ShapeDtypeStruct(a.shape, dtype) if is_shape else a.astype(dtype)


def inference_config(config: ModelConfig) -> ModelConfig:
    """Return the model's config at inference: without dropout, dropout keys and sweeps."""
    exact = replace(config.feedback, sweeps=0)
    lora = replace(config.lora, dropout=0.0)
    return replace(config, lora=lora, dropout=DropoutConfig(), feedback=exact)


def frozen_weights(frozen: Any) -> tuple[Any, ...]:
    """Return the frozen state without dropout keys: (weights,), or () if everything is trained."""
    return frozen[:1]


def merge_for_inference(graph: Any, params: Params, frozen: Any) -> LanguageModel:
    """Return the model without dropout: of `frozen`, only the weights.

    Args:
      graph: the model's NNX graph without dropout, which has no dropout keys.
    """
    return nnx.merge(graph, params, *frozen_weights(frozen))


def with_dropout_keys(frozen: Frozen, key: Array) -> Frozen:
    """Return the frozen state with new dropout keys, one for each projection of each layer."""
    if not frozen:
        return ()
    weights, keys = frozen
    leaves, tree = jax.tree.flatten(keys)
    drawn = [
        jax.random.bits(jax.random.fold_in(key, i), leaf.shape, jnp.uint32)
        for i, leaf in enumerate(leaves)
    ]
    return weights, jax.tree.unflatten(tree, drawn)


def fingerprint(weights: Params) -> str:
    """Return a hash of the values of a tree of float arrays, independent of their sharding.

    For each array it takes two sums of the elements' bits, modulo 2^32, one of them weighted by
    position. Sums of integers do not depend on the order of addition. The hash distinguishes
    weights and is not cryptographic.
    """

    flat, _ = jax.tree_util.tree_flatten_with_path(weights)
    sums = jax.device_get([_bit_sums(leaf) for _, leaf in flat])
    digest = hashlib.sha256()
    for (path, leaf), (first, second) in zip(flat, sums, strict=True):
        digest.update(f"{path_name(path)} {leaf.dtype}{leaf.shape} {first} {second}\n".encode())
    return digest.hexdigest()[:16]


@jax.jit
def _bit_sums(a: Array) -> tuple[Array, Array]:
    """Return the sum of the elements' bits and the sum weighted by position, both uint32."""
    kind = jnp.uint16 if a.dtype.itemsize == 2 else jnp.uint32
    bits = jax.lax.bitcast_convert_type(a, kind).astype(jnp.uint32)
    # without flattening the array, which would gather it if it is sharded
    position = jnp.zeros(bits.shape, jnp.uint32)
    for axis, size in enumerate(bits.shape):
        position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, a.shape, axis)
    # an odd factor for each position, different for nearby positions
    factor = position * jnp.uint32(2654435761) | jnp.uint32(1)
    return bits.sum(dtype=jnp.uint32), (bits * factor).sum(dtype=jnp.uint32)


def combine_fingerprints(trained: str, base: str) -> str:
    """Return the fingerprint of weights that were trained on top of frozen ones.

    It is computed without merging the weights, since matrix products differ between devices.
    """
    return hashlib.sha256(f"{trained} {base}".encode()).hexdigest()[:16] if base else trained


def check_base(saved: str, current: str, init: str | Path, run: str | Path) -> None:
    """Raise a `UserError` if a run was trained on other frozen weights than those in `init`."""
    if saved != current:
        raise UserError(
            f"{run}: was trained on other weights than {init} has now (fingerprint {saved}, now "
            f"{current}); restore the folder that it started from"
        )
