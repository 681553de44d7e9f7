"""Stacks: how layers are combined and their states carried. One file each, registered here."""

from __future__ import annotations

from collections.abc import Callable

from flax import nnx

from famjax.config.resolved import ResolvedModelConfig
from famjax.stacks.autocompressor import AutoCompressor
from famjax.stacks.feedback import Feedback, Transformer
from famjax.stacks.lstm import LstmStack
from famjax.stacks.residual import ResidualStack
from famjax.stacks.rmt import RecurrentMemory
from famjax.stacks.stack import Stack

STACKS: dict[str, Callable[..., Stack]] = {
    "residual": ResidualStack,
    "feedback": Feedback,
    "transformer": Transformer,
    "lstm": LstmStack,
    "rmt": RecurrentMemory,
    "autocompressor": AutoCompressor,
}


def make_stack(config: ResolvedModelConfig, *, rngs: nnx.Rngs) -> Stack:
    """Return a new stack by its registered name."""
    return STACKS[config.stack](config, rngs=rngs)
