"""The registry of stacks: how layers are combined and their states carried. One file each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flax import nnx

from famjax.config.resolved import ResolvedModelConfig
from famjax.stacks.feedback import Feedback, Transformer
from famjax.stacks.lstm import LstmStack
from famjax.stacks.residual import ResidualStack

STACKS: dict[str, Callable[..., Any]] = {
    "residual": ResidualStack,
    "feedback": Feedback,  # ft.feedback
    "transformer": Transformer,
    "lstm": LstmStack,  # ft.lstm
}


def make_stack(config: ResolvedModelConfig, *, rngs: nnx.Rngs) -> Any:
    """Return a new stack by its registered name."""
    return STACKS[config.stack](config, rngs=rngs)
