"""One training step: one compiled program from state and batch to the next state.

It has three parts: `make_loss` processes rows segment by segment, `make_gradients` sums over the
microbatches of a batch, and `make_step` applies the update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from famjax.config.schema import Config
from famjax.core.types import Array, Batch, Context, Params, PyTree, State
from famjax.models.language_model import LanguageModel
from famjax.ops.rotary import longest_wavelength
from famjax.parallel.sharding import path_name
from famjax.parallel.traced import with_logical_constraint
from famjax.train.objective import Objective, WeightField, make_objective
from famjax.train.partition import partition_trainable, with_dropout_keys
from famjax.train.state import MetricSums, TrainState


class Microbatch(NamedTuple):
    """Part of a batch: rows that are processed together.

    Attributes:
      batch: the batch's fields for these rows.
      offset: [b], random position offset in tokens, or None.
      memory: the memory that is carried to these rows.
      number: index of the microbatch in its batch.
    """

    batch: Batch[Array]
    offset: Array | None
    memory: State
    number: Array | int


class StepKeys(NamedTuple):
    """The PRNG keys of one step, one for each use.

    Attributes:
      state_passing: decides whether packed rows start from another document's memory (`train.rsp`).
      position_offset: draws the position offsets of the whole batch (`train.rpo`).
      dropout: key from which `dropout_key` derives those of all microbatches and segments.
    """

    state_passing: Array
    position_offset: Array
    dropout: Array


def split_key(key: Array) -> tuple[Array, StepKeys]:
    """Return the next step's key, and the keys of this step.

    The derivation must not change, since runs continue bit for bit: the dropout key is folded from
    the key from which the two others are split.
    """
    next_key, now = jax.random.split(key)
    state_passing, position_offset = jax.random.split(now)
    return next_key, StepKeys(state_passing, position_offset, jax.random.fold_in(now, 2))


def dropout_key(keys: StepKeys, microbatch: Array | int, segment: Array | int) -> Array:
    """Return the dropout key for one segment of one microbatch."""
    return jax.random.fold_in(jax.random.fold_in(keys.dropout, microbatch), segment)


# (params, microbatch, weight, keys, state) -> loss, (memory, sums): the microbatch's share of the
# mean loss, the memory after the microbatch, and its metric sums. weight: sum of the token weights
# of the whole batch.
LossFn = Callable[
    [Params, Microbatch, Array, StepKeys, TrainState], tuple[Array, tuple[State, MetricSums]]
]
# (state, batch, keys) -> gradients, (memory, sums)
GradientsFn = Callable[
    [TrainState, Batch[Array], StepKeys], tuple[Params, tuple[State, MetricSums]]
]


def init_memory(config: Config, model: LanguageModel) -> State:
    """Return `TrainState.memory` as it is before the first step."""
    if config.data.layout == "lanes":
        return model.init_state(config.data.batch)
    return model.stack.passable_state(model.init_state(1)) if config.train.rsp > 0 else ()


def init_train_state(
    config: Config, model: LanguageModel, optimizer: optax.GradientTransformation
) -> TrainState:
    """Return the state before the first step."""
    _, params, frozen = partition_trainable(config.model, model, config.train.only)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        memory=init_memory(config, model),
        key=jax.random.key_data(jax.random.key(config.seed)),
        totals=MetricSums.zeros(),
        bad=jnp.zeros((), jnp.int32),
        frozen=frozen,
    )


def make_loss(config: Config, graph: Any, objective: Objective) -> LossFn:
    """Return the loss function of rows that are processed segment by segment.

    The gradient flows through all segments of a row.

    Args:
      graph: the model's NNX graph, from `partition_trainable`.
    """
    lanes, layout = config.data.layout == "lanes", config.data.layout
    segments = config.train.bptt_segments

    def loss(
        params: Params, microbatch: Microbatch, weight: Array, keys: StepKeys, state: TrainState
    ) -> tuple[Array, tuple[State, MetricSums]]:
        def segment_model(index: Array | int) -> LanguageModel:
            # each microbatch has its own dropout keys; they share all other keys
            frozen = with_dropout_keys(state.frozen, dropout_key(keys, microbatch.number, index))
            return nnx.merge(graph, params, *frozen)

        def forward_segment(
            memory: State, xs: tuple[Batch[Array], Array | int]
        ) -> tuple[State, MetricSums]:
            batch, index = xs
            model = segment_model(index)
            ctx = row_context(layout, batch)._replace(offset=microbatch.offset)
            return objective.forward(model, memory, batch, ctx, share)

        share = weight / (segments * config.train.accumulate)
        model = segment_model(0)
        memory = objective.initial_state(
            model,
            microbatch.memory,
            rows=len(microbatch.batch["tokens"]),
            offset=microbatch.offset,
            key=keys.state_passing,
            step=state.step,
        )
        if segments == 1:
            memory, sums = forward_segment(memory, (microbatch.batch, 0))
        else:
            pieces = jax.tree.map(
                lambda a: jnp.stack(jnp.split(a, segments, axis=1)), microbatch.batch
            )
            xs = (pieces, jnp.arange(segments))
            memory, sums = jax.lax.scan(jax.checkpoint(forward_segment), memory, xs)
            sums = jax.tree.map(lambda a: a.sum(0), sums)
        if not lanes:
            # keep only what another row may start with
            memory = model.stack.passable_state(memory) if config.train.rsp > 0 else ()
        # each microbatch adds its share of the stack's own loss
        total = sums.loss / weight + model.stack.auxiliary_loss() / config.train.accumulate
        return total, (jax.lax.stop_gradient(memory), sums)

    return loss


def row_context(layout: str, batch: Batch[Array]) -> Context:
    """Return the context in which rows are processed, without a source."""
    if layout == "packed":
        # packed rows start with the objective's initial state, not with a reset
        return Context()
    return Context(batch["reset"], batch["valid"], pass_state=batch.get("pass_state"))


def make_gradients(config: Config, loss: LossFn, weight_field: WeightField) -> GradientsFn:
    """Return a function to the gradient of the mean loss, accumulated over the microbatches.

    There are `train.accumulate` microbatches in a batch.

    Args:
      weight_field: name of the batch field with the weights of the loss.
    """
    lanes = config.data.layout == "lanes"
    microbatches = config.train.accumulate
    grad = jax.grad(loss, has_aux=True)

    def gradients(
        state: TrainState, batch: Batch[Array], keys: StepKeys
    ) -> tuple[Params, tuple[State, MetricSums]]:
        weight = jnp.maximum(batch[weight_field].sum(dtype=jnp.float32), 1e-6)
        offset = None
        if config.train.rpo:  # drawn for the whole batch, whatever the number of microbatches
            offset = position_offset(keys.position_offset, config, len(batch["tokens"]))
        if microbatches == 1:
            whole = Microbatch(batch, offset, state.memory, 0)
            return grad(state.params, whole, weight, keys, state)

        def add_microbatch(total: PyTree, microbatch: Microbatch) -> tuple[PyTree, State]:
            grads, (memory, sums) = grad(state.params, microbatch, weight, keys, state)
            return jax.tree.map(jnp.add, total, (grads, sums)), memory

        batch, offset = jax.tree.map(
            lambda a: _split_microbatches(a, 0, microbatches), (batch, offset)
        )
        zeros = (jax.tree.map(jnp.zeros_like, state.params), MetricSums.zeros())
        memory = (
            split_lanes(state.memory, microbatches)
            if lanes
            else _repeat(state.memory, microbatches)
        )
        xs = Microbatch(batch, offset, memory, jnp.arange(microbatches))
        (grads, sums), memory = jax.lax.scan(add_microbatch, zeros, xs)
        memory = join_lanes(memory) if lanes else jax.tree.map(lambda a: a[0], memory)
        return grads, (memory, sums)

    return gradients


def make_step(
    config: Config,
    graph: Any,
    optimizer: optax.GradientTransformation,
    token_bytes: np.ndarray,
) -> Callable[[TrainState, Batch[Array]], TrainState]:
    """Return the step function, to be compiled with the state donated.

    Args:
      graph: the model's NNX graph, from `partition_trainable`; the parameters are in the state.
      token_bytes: [v], UTF-8 bytes of each token.
    """
    objective = make_objective(config, token_bytes)
    gradients = make_gradients(config, make_loss(config, graph, objective), objective.weight_field)
    lanes = config.data.layout == "lanes"

    def step(state: TrainState, batch: Batch[Array]) -> TrainState:
        next_key, keys = split_key(jax.random.wrap_key_data(state.key))
        grads, (memory, sums) = gradients(state, batch, keys)
        if not lanes:
            memory = jax.tree.map(lambda a: a[:, :1], memory)
        sums = sums._replace(
            steps=jnp.ones((), jnp.float32), grad_norm=optax.tree.norm(grads).astype(jnp.float32)
        )
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = clip_spans(optax.apply_updates(state.params, updates))
        # parameters and memory are checked too: a checkpoint of this step must be valid, and only
        # the next loss would show that they are not finite
        finite = jnp.isfinite(sums.loss + sums.grad_norm) & all_finite((params, memory))
        return TrainState(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            memory=memory,
            key=jax.random.key_data(next_key),
            totals=jax.tree.map(jnp.add, state.totals, sums),
            bad=jnp.where(finite | (state.bad > 0), state.bad, state.step + 1),
            frozen=state.frozen,
        )

    return step


def clip_spans(params: Params) -> Params:
    """Return the parameters with learned spans clipped to [0, 1], fractions of the longest span."""

    def clip(path: tuple[Any, ...], leaf: Array) -> Array:
        return jnp.clip(leaf, 0, 1) if path_name(path).endswith("/span") else leaf

    return jax.tree_util.tree_map_with_path(clip, params)


def all_finite(tree: PyTree) -> Array:
    """Return whether every number of a tree is finite, as a scalar array."""
    return jnp.stack([jnp.isfinite(a).all() for a in jax.tree.leaves(tree)]).all()


def position_offset(key: Array, config: Config, rows: int) -> Array:
    """Return random position offsets [b], in tokens, drawn as in the paper's pseudocode (B.2.2).

    An offset is u round(u'), with u uniform in [0, longest wavelength) and u' uniform in [0, 1), so
    that half of the rows have none.
    """
    value, half = jax.random.split(key)
    longest = longest_wavelength(config.model.rope_base)
    offset = jax.random.uniform(value, (rows,), maxval=longest)
    return with_logical_constraint(
        offset * jnp.round(jax.random.uniform(half, (rows,))), ("batch",)
    )


def split_lanes(memory: State, microbatches: int) -> State:
    """[repeats b ...] -> [microbatches repeats b/microbatches ...], split like the batch."""
    return jax.tree.map(lambda a: _split_microbatches(a, 1, microbatches), memory)


def join_lanes(memory: State) -> State:
    """[microbatches repeats b/microbatches ...] -> [repeats b ...]."""

    def join(a: Array) -> Array:
        _, repeats, _, *rest = a.shape
        return jnp.moveaxis(a, 0, 2).reshape(repeats, -1, *rest)

    return jax.tree.map(join, memory)


def _split_microbatches(a: Array, axis: int, microbatches: int) -> Array:
    """Split the rows on `axis` into microbatches, on a new first axis.

    Row i goes to microbatch i % microbatches. So every microbatch has rows of every device, and no
    row has to move to another device.
    """
    rows = a.shape[axis] // microbatches
    a = a.reshape(*a.shape[:axis], rows, microbatches, *a.shape[axis + 1 :])
    return jnp.moveaxis(a, axis + 1, 0)


def _repeat(memory: State, microbatches: int) -> State:
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (microbatches, *a.shape)), memory)
