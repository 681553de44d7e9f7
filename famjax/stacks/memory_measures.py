"""Measures of the memories of a residual stack: their gates and rates, and how much is read.

The functions process a call with the layers' measuring methods, and return no state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from famjax.core.types import Array, Context, State
from famjax.mixers.mixer import BlockWeights, Mixer, mean_of_valid

if TYPE_CHECKING:
    from famjax.stacks.residual import ResidualStack

# names of `memory_metrics` for a memory's size and its share in what is read
_FAM_METRICS = ("state_norm", "fam_attention")
_MEMORY_METRICS = ("memory_norm", "memory_share")


def attention_mass(stack: ResidualStack, x: Array, state: State, ctx: Context) -> Array:
    """Return the mean share of the memory in what is read, by layer: [l]."""
    shares = _measure_mixers(stack, x, state, ctx, lambda mixer: mixer.attention_mass)
    return jnp.stack(shares, 1).reshape(-1)


def block_weights(
    stack: ResidualStack, x: Array, state: State, ctx: Context
) -> list[BlockWeights | None]:
    """Return the attention weights of a block, by layer of the pattern: [repeats b h ..]."""
    return _measure_mixers(stack, x, state, ctx, lambda mixer: mixer.block_weights)


def memory_gates(stack: ResidualStack, x: Array, state: State, ctx: Context) -> list[Array]:
    """Return the gates [repeats b f] of a block's update, of the pattern layers with gates."""
    gates = _measure_mixers(stack, x, state, ctx, lambda mixer: mixer.memory_gates)
    return [g for g in gates if g is not None]


def token_rates(stack: ResidualStack, x: Array, state: State, ctx: Context) -> list[Array]:
    """Return the rates [repeats b t f] of writing tokens, of the pattern layers with rates."""
    rates = _measure_mixers(stack, x, state, ctx, lambda mixer: mixer.token_rates)
    return [r for r in rates if r is not None]


def memory_metrics(stack: ResidualStack, x: Array, state: State, ctx: Context) -> dict[str, Array]:
    """Return metrics of the memory in a call, each a mean over the layers that have it.

    state_norm, fam_attention: the RMS of the FAMs after the call, and their share of the call's
      attention weights.
    memory_norm, memory_share: the same for other memories, whose share is one of norms
      (`Mixer.attention_mass`).
    memory_rate, memory_closed: for memories that are written token by token, the mean rate of the
      tokens, and the share of rates that are 0, without padding.
    """
    memory_layers = stack.memory_layers(state)
    if not memory_layers:
        return {}
    measured = stack.run_layers(x, state, ctx, lambda layer: layer.measure_memory)[1]
    by_name: dict[str, list[Array]] = {}
    for i in memory_layers:
        memory, share, rates = measured[i]
        norm_name, share_name = _FAM_METRICS if stack.has_memory_prompt[i] else _MEMORY_METRICS
        metrics = {norm_name: jnp.sqrt(jnp.square(memory).mean()), share_name: share.mean()}
        if rates is not None:
            rates = jnp.moveaxis(rates, 0, -1)  # [b t f repeats]
            metrics["memory_rate"] = mean_of_valid(rates, ctx.valid)
            metrics["memory_closed"] = mean_of_valid(rates == 0, ctx.valid)
        for name, value in metrics.items():
            by_name.setdefault(name, []).append(value)
    return {name: jnp.stack(values).mean() for name, values in by_name.items()}


def _measure_mixers(
    stack: ResidualStack,
    x: Array,
    state: State,
    ctx: Context,
    mixer_method: Callable[[Mixer], Callable[..., Any]],
) -> list[Any]:
    """Return what a method of each mixer measures, by layer of the pattern: [repeats ...]."""
    _, results = stack.run_layers(
        x, state, ctx, lambda layer: functools.partial(layer.measure, mixer_method(layer.mixer))
    )
    return list(results[: len(stack.layers)])
