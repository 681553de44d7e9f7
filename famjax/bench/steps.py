"""A training step for benchmarks, with random weights and tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from famjax.config.schema import Config, MeshConfig, ModelConfig
from famjax.core.types import Array, Batch
from famjax.data.lanes import empty_row
from famjax.experiment.mesh_checks import check_rows
from famjax.train.program import TrainProgram, make_program
from famjax.train.resolve import resolve
from famjax.train.state import TrainState


class PreparedStep(NamedTuple):
    """A program, and the arguments of its `step`: a state, which is donated, and a batch [b t]."""

    program: TrainProgram
    state: TrainState
    batch: Batch[Array]


def prepare_step(
    model: ModelConfig, batch: int, length: int, mesh: Mesh | None = None
) -> PreparedStep:
    """Return the training step of a model on rows without padding, with the defaults of `Config`.

    Args:
      model: the model's config.
      batch: number of rows.
      length: number of tokens of a row.
      mesh: devices to run on; None is a mesh of all devices.

    Raises:
      UserError: the mesh does not divide the rows, heads or blocks.
    """
    config = replace(Config(), model=model)
    config = replace(config, data=replace(config.data, batch=batch, length=length))
    if mesh is not None:
        check_rows(replace(config, mesh=MeshConfig(**mesh.shape)), mesh.size)
        config = replace(config, mesh=MeshConfig(**mesh.shape))
    config = resolve(config, None, jax.device_count() if mesh is None else mesh.size)
    program = make_program(config, np.ones(model.vocab_size, np.int32), mesh=mesh)
    shape = (batch, length)
    rows: Batch[np.ndarray] = jax.tree.map(lambda a: np.broadcast_to(a, shape), empty_row(length))
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, shape, np.int32)
    rows["tokens"] = rows["targets"] = tokens
    rows["weights"], rows["valid"] = np.ones(shape, np.float32), np.ones(shape, bool)
    return PreparedStep(program, program.start(), jax.device_put(rows, program.batch))


def training_call(model: ModelConfig, batch: int, length: int) -> Callable[[], TrainState]:
    """Return a function that runs a training step on `batch` rows of `length` tokens."""
    program, state, rows = prepare_step(model, batch, length)

    def run() -> TrainState:
        nonlocal state
        state = program.step(state, rows)
        return state

    return run
