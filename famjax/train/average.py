"""The mean of a run's last checkpoints, as a run (`famjax average`; Vaswani et al., 2017, 6.1)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from famjax.core.errors import UserError
from famjax.core.types import Params, PyTree
from famjax.train.checkpoint import Checkpoints
from famjax.train.partition import inference_config, partition_trainable
from famjax.train.run import CHECKPOINTS, Run, copy_run_files, open_run

# in the `extra` of a checkpoint that is a mean: the steps that it is the mean of
AVERAGED = "averaged"


class Mean(NamedTuple):
    """The mean of a run's last checkpoints.

    Attributes:
      steps: of the checkpoints, oldest first.
      params: trained parameters.
      extra: what a checkpoint of them needs to be opened.
    """

    steps: list[int]
    params: Params
    extra: dict[str, Any]


def average(folder: Path, last: int) -> Mean:
    """Return the mean of the trained parameters of a run's `last` checkpoints.

    Sums are float64, on the host. Weights that are not trained stay those of `init`.

    Raises:
      UserError: the folder has no run, fewer checkpoints, or one that is damaged or does not fit.
    """
    newest = open_run(folder, report=_refuse)
    config = newest.config
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    steps = [step for step in checkpoints.steps() if step <= newest.step][-last:]
    if len(steps) < last:
        keep, every = config.train.keep, config.train.checkpoint_every
        # a run that keeps enough of them has not written them yet
        more = (
            f"train.keep={last} or more"
            if keep < last
            else f"more train.steps, or train.checkpoint_every less than {every}"
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
    return Mean(steps, _mean(total, len(steps), params), extra | {AVERAGED: steps})


def _refuse(line: str) -> None:
    """Raise a `UserError` for the report of a checkpoint that is passed over."""
    raise UserError(f"{line}; restore it from a copy, or remove it")


def _mean(total: PyTree, count: int, like: Params) -> Params:
    """Return total / count in the types of `like`."""
    return jax.tree.map(lambda a, b: jax.numpy.asarray((a / count).astype(b.dtype)), total, like)


def open_average(folder: Path, most: int) -> Run:
    """Return a run with the mean of its last checkpoints: `most`, or all that its folder has."""
    mean = average(folder, min(most, len(Checkpoints(folder / CHECKPOINTS).steps())))
    run = open_run(folder, mean.steps[-1])
    config = run.config
    graph, _, frozen = partition_trainable(
        inference_config(config.model), run.model, config.train.only
    )
    return replace(run, model=nnx.merge(graph, mean.params, *frozen))


def save_average(mean: Mean, run: Path, folder: Path) -> None:
    """Make of a mean of a run's checkpoints a run in `folder`, an empty one; its step is the last.

    It can be opened, and be the `init` of a run, but not be continued: it has no optimizer state.
    """
    copy_run_files(run, folder)
    checkpoints = Checkpoints(folder / CHECKPOINTS, keep=1)
    checkpoints.save(mean.steps[-1], {"params": mean.params}, mean.extra)
    checkpoints.wait()
