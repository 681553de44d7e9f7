"""Dropout in training: a model's key is a variable that the training step fills.

A stack has one key for a call, and makes one for each layer of it. What drops something folds its
own number in: what has the same key and number drops the same.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.core.types import Array

# places of dropout in a stack and in a layer, each with random numbers of its own; FEEDBACK is all
# that a FAM goes through
EMBEDDING, OUTPUT, ATTENTION, HIDDEN, ATTENDED, FED, LAYER, FEEDBACK = range(8)


class DropoutKey(nnx.Variable):
    """[2] uint32, data of the random key that the training step puts there."""


def no_key() -> DropoutKey:
    """Return the variable as a model is made with it."""
    return DropoutKey(jnp.zeros(2, jnp.uint32))


def dropout(x: Array, rate: float, key: Array) -> Array:
    """Return x with a share `rate` of its elements 0, and the others scaled up."""
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)


Drop = Callable[[Array], Array]


def make_dropout(rate: float, key: Array | None, site: int) -> Drop | None:
    """Return the dropout of one place in a model, or None: without a key or a rate."""
    if key is None or not rate:
        return None
    return lambda x: dropout(x, rate, jax.random.fold_in(key, site))


def apply_dropout(x: Array, drop: Drop | None) -> Array:
    return x if drop is None else drop(x)


def split(key: Array | None, site: int, *shape: int) -> Array | None:
    """Return keys [shape] for what one place does several times, or None without a key."""
    return None if key is None else jax.random.split(jax.random.fold_in(key, site), shape)
