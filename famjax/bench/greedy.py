"""Greedy decoding of a fixed number of tokens in one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.core.types import Params, State


def make_writer(
    graph: Any, count: int
) -> Callable[[Params, State, jax.Array], tuple[jax.Array, State]]:
    """Return a function (params, state, token [b 1]) -> (token, state) that decodes tokens.

    Args:
      graph: graph of the model.
      count: number of tokens to decode.
    """

    def write(params: Params, state: State, token: jax.Array) -> tuple[jax.Array, State]:
        model = nnx.merge(graph, params)
        model.stack.unstack_layers(state)

        def one(carry: Any, _: None) -> Any:
            token, state = carry
            logits, state = model.step(token, state)
            return (logits.argmax(-1).astype(jnp.int32), state), None

        return jax.lax.scan(one, (token, state), None, count)[0]

    return write
