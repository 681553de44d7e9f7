"""What is compiled once for a run, and where it lies on the mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from famjax.core import sharding
from famjax.core.config import Config, MeshConfig
from famjax.core.mesh import (
    DEVICE_BYTES,
    SHARE,
    Demand,
    call_blocks,
    describe,
    is_chosen,
    refuse_undivided,
    tensor_sizes,
)
from famjax.core.types import Array, Context
from famjax.models.language_model import LanguageModel
from famjax.models.remap_params import layer_mixers
from famjax.train.optimizers import make_optimizer
from famjax.train.partition import inference_config
from famjax.train.run import abstract_model
from famjax.train.state import TrainState
from famjax.train.step import Batch, init_train_state, make_step


class TrainProgram(NamedTuple):
    """What is compiled once for a run.

    Attributes:
      mesh: of devices.
      graph: the model's NNX graph, without dropout.
      shardings: where a `TrainState` lies.
      start: () -> TrainState before the first step; with weights, those of `initial_weights`, that
        of a model that has them. The weights given are donated.
      step: (state, batch) -> state; the state given is donated.
      inspect: (params, frozen, memory, batch) -> dict of scalars about the memory.
      batch: where a batch lies.
    """

    mesh: Mesh
    graph: Any
    shardings: Any
    start: Callable[..., TrainState]
    step: Callable[[TrainState, Batch], TrainState]
    inspect: Callable[[Any, Any, Any, Batch], dict[str, Array]]
    batch: jax.sharding.NamedSharding


def make_program(
    config: Config,
    token_bytes: np.ndarray,
    attention_span: tuple[int, ...] = (),
    mesh: Mesh | None = None,
) -> TrainProgram:
    """Build and place everything for a config whose vocabulary is known.

    Args:
      attention_span: entries that layers with learned spans attend to, see
        `Feedback.set_attention_span`; () is all.
      mesh: None is `config.mesh` of all devices. For one of devices that are only described, the
        step can be lowered and compiled.
    """
    if mesh is None:
        config, _ = resolve_mesh(config)
        mesh = sharding.make_mesh(config.mesh)
    refuse_undivided(config)
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
    step = sharding.on_mesh(mesh, make_step(config, graph, optimizer, jnp.asarray(token_bytes)))
    return TrainProgram(
        mesh,
        inference_graph,
        shardings,
        jax.jit(start, donate_argnums=0, out_shardings=shardings),
        jax.jit(step, donate_argnums=0, in_shardings=(shardings, rows), out_shardings=shardings),
        jax.jit(sharding.on_mesh(mesh, make_inspect(config, inspected_graph))),
        rows,
    )


def make_initial_state(config: Config, weights: Any = None) -> TrainState:
    """Return the state before the first step, with these weights if any are given."""
    model = LanguageModel(config.model, rngs=nnx.Rngs(config.seed))
    if weights is not None:
        nnx.update(model, weights)
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    return init_train_state(config, model, optimizer)


def resolve_mesh(config: Config) -> tuple[Config, str]:
    """Fill in the mesh's sizes, and say how they were chosen if they were.

    Raises:
      UserError: the sizes that are given do not multiply to the number of devices.
    """
    wanted = mesh_demand(config) if is_chosen(config.mesh) else None
    mesh = MeshConfig(**sharding.make_mesh(config.mesh, demand=wanted).shape)
    return dataclasses.replace(config, mesh=mesh), describe(mesh, wanted) if wanted else ""


def mesh_demand(config: Config, memory: int | None = None) -> Demand:
    """Return what a config whose vocabulary is known asks of its mesh.

    Args:
      memory: bytes of a device; of one here, if None.
    """
    shapes = jax.eval_shape(functools.partial(make_initial_state, config))
    # a gradient is as large as what it is of
    weights = (shapes.params, shapes.params, shapes.opt_state, shapes.frozen)
    return Demand(
        weights=_bytes(weights),
        state=_bytes(shapes.memory),
        rows=config.data.batch // config.train.accumulate,
        tensor=(*tensor_sizes(config).values(), config.model.kv_heads or config.model.heads),
        blocks=call_blocks(config),
        limit=int(SHARE * (memory or _device_bytes())),
    )


def _bytes(shapes: Any) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(shapes))


def _device_bytes() -> int:
    """Return the memory of a device; where it does not tell, what is assumed."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", DEVICE_BYTES)


def train_state_shardings(config: Config, mesh: Mesh, graph: Any, shapes: TrainState) -> TrainState:
    """Return the sharding of every array of the training state."""
    everywhere: Any = sharding.replicated(mesh)
    memory = jax.tree.map(lambda _: everywhere, shapes.memory)
    if config.data.layout == "lanes":
        axes = nnx.merge(graph, shapes.params, *shapes.frozen).state_axes()
        memory = sharding.state_shardings(mesh, axes, shapes.memory)
    return TrainState(
        everywhere,
        sharding.parameter_shardings(mesh, shapes.params),
        sharding.optimizer_shardings(mesh, shapes.params, shapes.opt_state),
        memory,
        everywhere,
        jax.tree.map(lambda _: everywhere, shapes.totals),
        everywhere,
        sharding.parameter_shardings(mesh, shapes.frozen),
    )


def make_inspect(config: Config, graph: Any) -> Callable[[Any, Any, Any, Batch], dict[str, Array]]:
    """Return a function of (params, frozen, memory, batch): what the stack reports of its memory.

    It looks at the first row only. With `train.match` it is each linear layer's error there.
    """
    names = [f"match_{i}" for i, name in enumerate(layer_mixers(config.model)) if name == "linear"]

    def inspect(params: Any, frozen: Any, memory: Any, batch: Batch) -> dict[str, Array]:
        model = nnx.merge(graph, params, *frozen[:1])  # no keys: this graph has no dropout
        lanes = config.data.layout == "lanes"
        state = jax.tree.map(lambda a: a[:, :1], memory) if lanes else model.init_state(1)
        row = jax.tree.map(lambda a: a[:1], batch)
        ctx = (
            Context(row["reset"], row["valid"], passing=row.get("passing")) if lanes else Context()
        )
        x = model.embed(row["tokens"])
        if config.train.match:
            errors = model.stack.match(x, ctx)[1][:, 0]
            return dict(zip(names, errors, strict=True))
        return model.stack.report(x, state, ctx)

    return inspect
