"""Dropout in training, with explicit keys: a model's key is a variable that the training step sets.

A stack splits the key of a call into one for each layer, into which each dropout site folds its
number. The same key and site draw the same mask.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.core.types import Array, DropoutFn

# dropout sites of a stack and of a layer; the numbers determine the masks: do not change them
EMBEDDING = 0
OUTPUT = 1
ATTENTION_WEIGHTS = 2
MLP_HIDDEN = 3
ATTENTION_OUTPUT = 4
MLP_OUTPUT = 5
LAYER = 6
FEEDBACK = 7  # all sites of a FAM update
CROSS_ATTENTION = 8  # all sites of a layer's attention to the encoder


class DropoutKey(nnx.Variable):
    """[2] uint32, key data that the training step sets."""


def empty_key() -> DropoutKey:
    """Return a `DropoutKey` that is not yet set (zeros)."""
    return DropoutKey(jnp.zeros(2, jnp.uint32))


def dropout(x: Array, rate: float, key: Array) -> Array:
    """Zero each element of x with probability `rate` and scale the others by 1 / (1 - rate)."""
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


def make_dropout(rate: float, key: Array | None, site: int) -> DropoutFn | None:
    """Return the dropout function of one site; None without a key or a rate."""
    if key is None or not rate:
        return None
    return lambda x: dropout(x, rate, jax.random.fold_in(key, site))


def apply_dropout(x: Array, drop: DropoutFn | None) -> Array:
    return x if drop is None else drop(x)


def drop_layer(x: Array, y: Array, rate: float, key: Array | None) -> Array:
    """Return a layer's input x with probability `rate`, else its output y (LayerDrop).

    Args:
      key: PRNG key of the layer's dropout; None means y.
    """
    if key is None or not rate:
        return y
    return jnp.where(jax.random.bernoulli(jax.random.fold_in(key, LAYER), rate), x, y)


def split_key(key: Array | None, site: int, *shape: int) -> Array | None:
    """Return keys [shape] for repeated use of one site; None without a key."""
    return None if key is None else jax.random.split(jax.random.fold_in(key, site), shape)
