"""What a run says before its first step: what is trained, on what, how much at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import jax

from famjax.core import processes
from famjax.core.config import Config
from famjax.train.state import TrainState


def startup_lines(config: Config, shapes: TrainState) -> Iterator[str]:
    """Yield lines about a run that is about to start, or to continue.

    Args:
      config: with the rows and the length of the steps that follow.
      shapes: of the run's state.
    """
    yield f"{config.name}: {describe_parameters(shapes)}, {describe_precision(config)}, on {describe_devices()}"
    data, train = config.data, config.train
    tokens = data.batch * data.length
    parts = f" in {train.accumulate} parts" if train.accumulate > 1 else ""
    yield (
        f"{train.steps:,} steps of {tokens:,} tokens, {data.batch:,} rows x {data.length:,}"
        f"{parts}; {tokens * train.steps:,} tokens in all"
    )


def describe_parameters(shapes: TrainState) -> str:
    """Return how many parameters the model has, and how many are trained."""
    trained, frozen = (
        sum(leaf.size for leaf in jax.tree.leaves(tree))
        for tree in (shapes.params, shapes.frozen[:1])
    )
    if not frozen:
        return f"{trained:,} parameters"
    share = trained / (trained + frozen)
    return f"{trained + frozen:,} parameters, of which {trained:,} are trained ({share:.2%})"


def describe_precision(config: Config) -> str:
    """Return the types of what is computed and of what is kept."""
    model = config.model
    if model.lora.rank and model.lora.base != "float32":
        return f"computed in {model.dtype}, frozen ones kept in {model.lora.base}"
    return (
        model.dtype if model.dtype == "float32" else f"computed in {model.dtype}, kept in float32"
    )


def describe_devices() -> str:
    """Return how many devices there are, of what kind, in how many processes."""
    kinds = Counter(device.device_kind for device in jax.devices())
    found = " and ".join(f"{count} x {kind}" for kind, count in kinds.items())
    count = processes.count()
    return f"{found} in {count} processes" if count > 1 else found
