"""What training begins with: which parameters are trained, and the weights of another model."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.core.config import DropoutConfig, ModelConfig
from famjax.core.errors import UserError
from famjax.core.sharding import path_name
from famjax.core.types import Array
from famjax.layers.dropout import DropoutKey
from famjax.layers.lora import Adapter

# what is trained beside adapters
_TRAINED = nnx.Any(Adapter, *map(nnx.PathContains, ("prompt", "mix", "distances", "span")))

Frozen = tuple[Any, ...]


def divide(config: ModelConfig, model: nnx.Module) -> tuple[Any, Any, Frozen]:
    """Return a model's graph, what is trained of it, and what is not.

    `nnx.merge(graph, trained, *frozen)` is the model. Without adapters and dropout everything is
    trained and `frozen` is (); else it is the weights that adapters stand beside, in the type of
    `lora.base`, and dropout's keys.
    """
    if not config.lora.rank and not any(vars(config.dropout).values()):
        graph, trained = nnx.split(model, nnx.Param)
        return graph, trained, ()
    if not config.lora.rank:
        everything: Any = nnx.split(model, nnx.Param, nnx.Nothing(), DropoutKey)
        return everything[0], everything[1], everything[2:]
    parts: Any = nnx.split(model, _TRAINED, nnx.Param, DropoutKey)
    graph, trained, weights, keys = parts
    weights = jax.tree.map(lambda a: _cast(a, jnp.dtype(config.lora.base)), weights)
    return graph, trained, (weights, keys)


def _cast(a: Any, dtype: jnp.dtype) -> Any:
    is_shape = isinstance(a, jax.ShapeDtypeStruct)
    return jax.ShapeDtypeStruct(a.shape, dtype) if is_shape else a.astype(dtype)


def evaluated(config: ModelConfig) -> ModelConfig:
    """Return the config of the same model as it is used: no dropout, so no keys; no sweeps."""
    exact = replace(config.feedback, sweeps=0)
    lora = replace(config.lora, dropout=0.0)
    return replace(config, lora=lora, dropout=DropoutConfig(), feedback=exact)


def with_keys(frozen: Frozen, key: Array) -> Frozen:
    """Return what is frozen with new keys of dropout, one for each map of each layer."""
    if not frozen:
        return ()
    weights, keys = frozen
    leaves, tree = jax.tree.flatten(keys)
    drawn = [
        jax.random.bits(jax.random.fold_in(key, i), leaf.shape, jnp.uint32)
        for i, leaf in enumerate(leaves)
    ]
    return weights, jax.tree.unflatten(tree, drawn)


def fingerprint(weights: Any) -> str:
    """Return a name for the numbers of a tree of float arrays, wherever they lie.

    Two sums of the bits of each array, modulo 2^32, one of them weighted by place: integers, whose
    sum does not depend on the order. It tells other weights apart; it is no defence against malice.
    """

    @jax.jit
    def sums(a: Array) -> tuple[Array, Array]:
        kind = jnp.uint16 if a.dtype.itemsize == 2 else jnp.uint32
        bits = jax.lax.bitcast_convert_type(a, kind).astype(jnp.uint32)
        # not flattened, which would bring an array together that is spread over devices
        place = jnp.zeros(bits.shape, jnp.uint32)
        for axis, size in enumerate(bits.shape):
            place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, a.shape, axis)
        # an odd factor for each place, which no two near places share
        factor = place * jnp.uint32(2654435761) | jnp.uint32(1)
        return bits.sum(dtype=jnp.uint32), (bits * factor).sum(dtype=jnp.uint32)

    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(weights)[0]:
        first, second = jax.device_get(sums(leaf))
        digest.update(f"{path_name(path)} {leaf.dtype}{leaf.shape} {first} {second}\n".encode())
    return digest.hexdigest()[:16]


def chained(trained: str, base: str) -> str:
    """Return the fingerprint of weights that were trained beside others: nothing is merged for it,
    since sums of products are not the same on all devices."""
    return hashlib.sha256(f"{trained} {base}".encode()).hexdigest()[:16] if base else trained


def refuse_base(there: str, here: str, init: str | Path, run: str | Path) -> None:
    """Raise a `UserError` if adapters were trained on other weights than `init` holds."""
    if there != here:
        raise UserError(
            f"{run}: its adapters were trained on other weights than {init} holds now (fingerprint "
            f"{there}, here {here}); bring back the folder that they were trained on"
        )
