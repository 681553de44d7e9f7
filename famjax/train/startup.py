"""The summary that a run prints before its first step: model, devices, batch and steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import jax

from famjax.config.schema import Config
from famjax.optimizers import make_schedule
from famjax.processes import collective
from famjax.train.partition import frozen_weights
from famjax.train.state import TrainState


def startup_lines(config: Config, shapes: TrainState) -> Iterator[str]:
    """Yield a summary of a run that is about to start or to resume, line by line.

    Args:
      config: config with the number and length of rows in the following steps.
      shapes: shapes of the training state.
    """
    model = f"{describe_parameters(shapes)}, {describe_precision(config)}"
    yield f"{config.name}: {model}, on {describe_devices()}"
    data, train = config.data, config.train
    tokens = data.batch * data.length
    microbatches = f" in {train.accumulate} microbatches" if train.accumulate > 1 else ""
    yield (
        f"{train.steps:,} steps of {tokens:,} tokens, {data.batch:,} rows x {data.length:,}"
        f"{microbatches}; {tokens * train.steps:,} tokens in all"
    )
    optimizer = config.optimizer
    if optimizer.warmup_steps > train.steps:
        rate = float(make_schedule(optimizer, train.steps)(train.steps - 1))
        yield (
            f"warm-up ({optimizer.warmup_steps:,} steps) is longer than the run: the rate reaches "
            f"{rate:.2g} of {optimizer.learning_rate:.2g}"
        )


def describe_epochs(epochs: float) -> str:
    """Return a line about how many times a run reads its text, to two digits."""
    if epochs < 0.995:
        share = "less than 1%" if epochs < 0.01 else f"about {epochs:.0%}"
        return f"reads {share} of the text"
    times = float(f"{epochs:.2g}")
    return f"reads the text about {times:,.{int(times < 10)}f} times"


def describe_parameters(shapes: TrainState) -> str:
    """Return a description of the number of parameters, in total and trained."""
    trained, frozen = (
        sum(leaf.size for leaf in jax.tree.leaves(tree))
        for tree in (shapes.params, frozen_weights(shapes.frozen))
    )
    if not frozen:
        return f"{trained:,} parameters"
    share = trained / (trained + frozen)
    return f"{trained + frozen:,} parameters, of which {trained:,} are trained ({share:.2%})"


def describe_precision(config: Config) -> str:
    """Return a description of the dtypes of the computation and of the parameters."""
    model = config.model
    if model.lora.rank and model.lora.base != "float32":
        return f"computation in {model.dtype}, frozen parameters in {model.lora.base}"
    if model.dtype == "float32":
        return model.dtype
    return f"computation in {model.dtype}, parameters in float32"


def describe_devices() -> str:
    """Return a description of the devices: their number by kind, and the number of processes."""
    kinds = Counter(device.device_kind for device in jax.devices())
    devices = " and ".join(f"{count} x {kind}" for kind, count in kinds.items())
    count = collective.process_count()
    return f"{devices} in {count} processes" if count > 1 else devices
