"""Greedy decoding of a fixed number of tokens in one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from famjax.core.types import Context, Params, State


def make_writer(graph: Any, count: int) -> Callable[..., tuple[jax.Array, State]]:
    """Return a function (params, state, token [b 1], source) -> (token, state) that decodes tokens.

    `source` is None for a model without an encoder, or what `Seq2Seq.read_source` returns.

    Args:
      graph: graph of the model.
      count: number of tokens to decode.
    """

    def write(
        params: Params, state: State, token: jax.Array, source: Any = None
    ) -> tuple[jax.Array, State]:
        model, ctx = nnx.merge(graph, params), Context(source=source)
        model.stack.unstack_layers(state)

        def one(carry: Any, _: None) -> Any:
            token, state = carry
            logits, state = model.step(token, state, ctx)
            return (logits.argmax(-1).astype(jnp.int32), state), None

        return jax.lax.scan(one, (token, state), None, count)[0]

    return write
