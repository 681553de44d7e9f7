"""The compiled functions of a run, and the shardings of its arrays on the mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from famjax.config.derived import layer_mixers
from famjax.config.resolved import ResolvedConfig
from famjax.config.schema import Config
from famjax.core.types import Array, Batch, Params, PyTree, State, tree_bytes
from famjax.experiment.mesh_checks import call_blocks, check_divides, tensor_sizes
from famjax.mixers import MIXERS
from famjax.models.seq2seq import make_model, source_of
from famjax.optimizers import make_optimizer
from famjax.parallel import sharding, traced
from famjax.parallel.mesh import MeshDemand
from famjax.stacks.residual import ResidualStack
from famjax.train.objective import has_memory_losses, minimized
from famjax.train.partition import inference_config, merge_for_inference
from famjax.train.run import abstract_model
from famjax.train.state import TrainState
from famjax.train.step import init_train_state, make_step, row_context


class TrainProgram(NamedTuple):
    """The jitted functions of a run, and their shardings.

    Attributes:
      mesh: mesh of the devices.
      inference_graph: the model's NNX graph without dropout and sweeps.
      shardings: shardings of a `TrainState`.
      start: () -> TrainState before the first step; (weights) -> the same for a model with these
        weights, which are donated (see `initial_weights`).
      step: (state, batch) -> state; the given state is donated.
      inspect: (params, frozen, memory, batch) -> dict of scalars about the memory of the first row;
        the arguments are from before the step.
      batch: sharding of a batch.
    """

    mesh: Mesh
    inference_graph: Any
    shardings: TrainState
    start: Callable[..., TrainState]
    step: Callable[[TrainState, Batch[Array]], TrainState]
    inspect: Callable[[Params, PyTree, State, Batch[Array]], dict[str, Array]]
    batch: jax.sharding.NamedSharding


def make_program(
    config: ResolvedConfig,
    token_bytes: np.ndarray,
    attention_span: tuple[int, ...] = (),
    mesh: Mesh | None = None,
) -> TrainProgram:
    """Build the program of a config.

    Args:
      attention_span: number of entries that layers with learned spans attend to, see
        `Feedback.set_attention_span`; () means all.
      mesh: None means `config.mesh` over all devices. With a mesh of abstract devices, the step can
        only be lowered and compiled.
    """
    if mesh is None:
        mesh = sharding.make_mesh(config.mesh)
    check_divides(config)
    inference, only = inference_config(config.model), config.train.only
    inspected = dataclasses.replace(inference, feedback=config.model.feedback)
    graph, inference_graph, inspected_graph = (
        abstract_model(model, attention_span, only)[0]
        for model in (config.model, inference, inspected)
    )

    start = functools.partial(make_initial_state, config)
    shardings = train_state_shardings(config, mesh, graph, jax.eval_shape(start))
    rows = sharding.batch_sharding(mesh, config.data.batch, config.data.length)
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    step = traced.with_mesh(mesh, make_step(config, graph, optimizer, token_bytes))
    return TrainProgram(
        mesh=mesh,
        inference_graph=inference_graph,
        shardings=shardings,
        start=jax.jit(start, donate_argnums=0, out_shardings=shardings),
        step=jax.jit(
            step, donate_argnums=0, in_shardings=(shardings, rows), out_shardings=shardings
        ),
        inspect=jax.jit(traced.with_mesh(mesh, make_inspect(config, inspected_graph))),
        batch=rows,
    )


def make_initial_state(config: Config, weights: Params = None) -> TrainState:
    """Return the state before the first step, with the given weights or random ones."""
    model = make_model(config.model, rngs=nnx.Rngs(config.seed))
    if weights is not None:
        nnx.update(model, weights)
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    return init_train_state(config, model, optimizer)


def mesh_demand(config: ResolvedConfig, device_bytes: int | None = None) -> MeshDemand:
    """Return what a config requires of its mesh; the sizes of mesh axes need not be known.

    Args:
      device_bytes: bytes of memory of a device; None takes that of a local device.
    """
    shapes = jax.eval_shape(functools.partial(make_initial_state, config))
    # gradients have the size of the parameters
    weights = (shapes.params, shapes.params, shapes.opt_state, shapes.frozen)
    return MeshDemand(
        weights=tree_bytes(weights),
        state=tree_bytes(shapes.memory),
        rows=config.data.batch // config.train.accumulate,
        tensor=(*tensor_sizes(config.model).values(), config.model.kv_heads),
        blocks=call_blocks(config),
        limit=sharding.device_limit(device_bytes),
    )


def train_state_shardings(config: Config, mesh: Mesh, graph: Any, shapes: TrainState) -> TrainState:
    """Return the sharding of every array of the training state."""
    replicated: Any = sharding.replicated(mesh)
    memory = jax.tree.map(lambda _: replicated, shapes.memory)
    if config.data.layout == "lanes":
        axes = nnx.merge(graph, shapes.params, *shapes.frozen).state_axes()
        memory = sharding.state_shardings(mesh, axes, shapes.memory)
    return TrainState(
        step=replicated,
        params=sharding.parameter_shardings(mesh, shapes.params),
        opt_state=sharding.optimizer_shardings(mesh, shapes.params, shapes.opt_state),
        memory=memory,
        key=replicated,
        totals=jax.tree.map(lambda _: replicated, shapes.totals),
        bad=replicated,
        frozen=sharding.parameter_shardings(mesh, shapes.frozen),
    )


def make_inspect(
    config: Config, graph: Any
) -> Callable[[Params, PyTree, State, Batch[Array]], dict[str, Array]]:
    """Return a function from (params, frozen, memory, batch) to metrics of the stack's memory.

    Only the first row is measured. With `train.match` the metrics are the errors of the linear
    layers.
    """
    layers = enumerate(layer_mixers(config.model))
    names = [f"match_{i}" for i, name in layers if MIXERS[name].has_feature_map]

    def inspect(
        params: Params, frozen: PyTree, memory: State, batch: Batch[Array]
    ) -> dict[str, Array]:
        model = merge_for_inference(graph, params, frozen)
        lanes = config.data.layout == "lanes"
        if lanes:
            state = jax.tree.map(lambda a: a[:, :1], memory)
        else:
            state = model.stack.shorten(model.init_state(1), 0)  # the final one is not used
        row = jax.tree.map(lambda a: a[:1], batch)
        ctx = row_context(config.data.layout, row)._replace(source=source_of(model, row))
        ctx = model.with_tokens(ctx, row["tokens"])
        x = model.embed(row["tokens"])
        if config.train.match:
            errors = model.stack.match_softmax(x, ctx)[1][:, 0]
            return dict(zip(names, errors, strict=True))
        metrics = model.stack.memory_metrics(x, state, ctx)
        if has_memory_losses(config):
            assert isinstance(model.stack, ResidualStack)
            metrics |= minimized(config.train, model.stack.call_with_losses(x, state, ctx)[2])
        return metrics

    return inspect
