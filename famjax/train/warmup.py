"""BPTT warm-up: training starts with many short rows and ends with few long ones.

Feedback Transformer (arXiv 2002.09402v1), 3.2: "we start with a small M and double it after every K
updates. We also reduce B accordingly so that the number of tokens in a batch is constant."
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp

from famjax.config.schema import Config
from famjax.core.types import Array, State

_Config = TypeVar("_Config", bound=Config)


def row_length_at(config: Config, step: int) -> int:
    """Return the length of a row in the next step after `step` steps."""
    start, length = config.train.bptt_start, config.data.length
    if not config.train.bptt_double_every:
        return length
    doublings = (length // start).bit_length() - 1
    return start << min(step // config.train.bptt_double_every, doublings)


def with_row_length(config: _Config, length: int) -> _Config:
    """Return the config with rows of `length` tokens and unchanged tokens per batch."""
    rows = config.data.batch * config.data.length // length
    return replace(config, data=replace(config.data, batch=rows, length=length))


def resize_memory(memory: State, rows: int) -> State:
    """[repeats b ...] -> [repeats rows ...]: keep the first lanes; new lanes are zero.

    The zeros are not read: the first token of a new lane begins a document, and so resets it.
    """

    def resize(a: Array) -> Array:
        missing = max(0, rows - a.shape[1])
        return jnp.pad(a, [(0, 0), (0, missing)] + [(0, 0)] * (a.ndim - 2))[:, :rows]

    return jax.tree.map(resize, memory)


def halve_memory(memory: State) -> State:
    """[repeats b ...] -> [repeats b/2 ...]: keep the lanes that `halve_batch` keeps.

    It keeps every second lane, so every device keeps half of its rows and no row is moved.
    """
    return jax.tree.map(lambda a: a[:, ::2], memory)
