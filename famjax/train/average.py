"""The mean of a run's last checkpoints, as a run (`famjax average`; Vaswani et al., 2017, 6.1)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.core.types import Params, PyTree
from famjax.stacks.feedback import Feedback
from famjax.train.checkpoint import Checkpoints
from famjax.train.partition import inference_config, partition_trainable
from famjax.train.run import Run, open_run
from famjax.train.run_folder import CHECKPOINTS, copy_run_files

# key in `extra` of a checkpoint that is a mean: the steps of the checkpoints averaged
AVERAGED = "averaged"


class Mean(NamedTuple):
    """The mean of a run's last checkpoints.

    Attributes:
      steps: steps of the averaged checkpoints, oldest first.
      params: mean of the trained parameters.
      extra: the `extra` with which a checkpoint of `params` can be opened.
      config: the run's config.
    """

    steps: list[int]
    params: Params
    extra: dict[str, Any]
    config: Config


def average(folder: Path, last: int) -> Mean:
    """Return the mean of the trained parameters of a run's `last` checkpoints.

    These are the newest, and those every `train.checkpoint_every` steps. Others, which a stop or
    `eval.best` saved, count only if there are too few.

    Sums are computed in float64, on the host. Frozen weights are not averaged: they stay as in
    `init`.

    Raises:
      UserError: the folder has no run or fewer than `last` checkpoints, or one of them is damaged
        or does not fit the config.
    """
    newest = open_run(folder, report=_refuse)
    config = newest.config
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    saved_steps = [step for step in checkpoints.steps() if step <= newest.step]
    every = config.train.checkpoint_every
    regular = [step for step in saved_steps if step % every == 0 or step == newest.step]
    steps = (regular if len(regular) >= last else saved_steps)[-last:]
    if len(steps) < last:
        keep = config.train.keep
        # if train.keep is large enough, the run has not written that many checkpoints yet
        more = (
            f"train.keep={last} or more"
            if keep < last
            else "more train.steps"
            + (f", or train.checkpoint_every less than {every}" if every > 1 else "")
        )
        raise UserError(
            f"{folder}: has {len(steps)} of the --last {last} checkpoints; train with {more}, or "
            f"take --last {len(steps)}"
        )
    _, params, _ = partition_trainable(
        inference_config(config.model), newest.model, config.train.only
    )
    total = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    template = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params)
    for step in steps[:-1]:
        _, tree, _ = checkpoints.restore({"params": template}, step, _refuse)
        total = jax.tree.map(np.add, total, tree["params"])
    saved = checkpoints.extra(newest.step)
    extra: dict[str, Any] = {k: saved[k] for k in ("config", "constants", "base") if k in saved}
    return Mean(steps, _mean(total, len(steps), params), extra | {AVERAGED: steps}, config)


def _refuse(line: str) -> None:
    """Raise a `UserError` instead of skipping a damaged checkpoint, with its report `line`."""
    raise UserError(f"{line}; restore it from a copy, or remove it")


def _mean(total: PyTree, count: int, like: Params) -> Params:
    """Return total / count, in the dtypes of `like`."""
    return jax.tree.map(lambda a, b: jax.numpy.asarray((a / count).astype(b.dtype)), total, like)


def open_average(folder: Path, max_checkpoints: int) -> Run:
    """Return a run with the mean of its last checkpoints, at most `max_checkpoints`."""
    mean = average(folder, min(max_checkpoints, len(Checkpoints(folder / CHECKPOINTS).steps())))
    run = open_run(folder, mean.steps[-1])
    config = run.config
    graph, _, frozen = partition_trainable(
        inference_config(config.model), run.model, config.train.only
    )
    model = nnx.merge(graph, mean.params, *frozen)
    if isinstance(model.stack, Feedback):
        # the mean of learned spans may be longer than those of the last checkpoint
        model.stack.set_attention_span(model.stack.attention_span())
    return replace(run, model=model)


def save_average(mean: Mean, run: Path, folder: Path) -> None:
    """Save the mean of a run's checkpoints as a run in the empty `folder`, at the last step.

    The new run can be opened or used as `init`, but not continued: it has no optimizer state.
    """
    copy_run_files(run, folder)
    checkpoints = Checkpoints(folder / CHECKPOINTS, keep=1)
    checkpoints.save(mean.steps[-1], {"params": mean.params}, mean.extra)
    checkpoints.wait()
