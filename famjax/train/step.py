"""One training step: one compiled program from batch and state to the next state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from famjax.core.config import Config
from famjax.core.sharding import path_name, with_logical_constraint
from famjax.core.types import Array, Context, State
from famjax.models.language_model import LanguageModel
from famjax.ops.rotary import longest_wavelength
from famjax.stacks.residual import passable_state
from famjax.train.partition import partition_trainable, with_dropout_keys
from famjax.train.state import MetricSums, TrainState

Batch = dict[str, Array]


def zero_sums() -> MetricSums:
    return MetricSums(*(jnp.zeros((), jnp.float32) for _ in MetricSums._fields))


def init_memory(config: Config, model: LanguageModel) -> State:
    """Return what `TrainState.memory` is before the first step."""
    if config.data.layout == "lanes":
        return model.init_state(config.data.batch)
    return passable_state(model.init_state(1)) if config.train.rsp > 0 else ()


def init_train_state(
    config: Config, model: LanguageModel, optimizer: optax.GradientTransformation
) -> TrainState:
    """Return the state before the first step."""
    _, params, frozen = partition_trainable(config.model, model, config.train.only)
    return TrainState(
        jnp.zeros((), jnp.int32),
        params,
        optimizer.init(params),
        init_memory(config, model),
        jax.random.key_data(jax.random.key(config.seed)),
        zero_sums(),
        jnp.zeros((), jnp.int32),
        frozen,
    )


def make_step(
    config: Config,
    graph: Any,
    optimizer: optax.GradientTransformation,
    token_bytes: Array,
) -> Callable[[TrainState, Batch], TrainState]:
    """Return the step function, to be compiled with the state donated.

    Args:
      graph: the model's NNX graph, of `partition_trainable`; the parameters are in the state.
      token_bytes: [v], UTF-8 bytes of each token.
    """
    lanes = config.data.layout == "lanes"
    parts = config.train.accumulate

    def start(
        model: LanguageModel,
        memory: State,
        rows: int,
        key: Array,
        step: Array,
        offset: Array | None,
    ) -> State:
        """Return the state that the batch's rows begin with."""
        if lanes or config.train.match:
            return memory
        fresh = model.init_state(rows, offset)
        if config.train.rsp == 0:
            return fresh
        # B.2.3: the first row's memory after the last step, shared by all rows of this one
        saved = jax.tree.map(
            lambda a, b: jnp.broadcast_to(a, b.shape), memory, passable_state(fresh)
        )
        ramp = jnp.minimum(1.0, (step + 1) / max(config.train.rsp_ramp, 1))
        use = jax.random.bernoulli(key, config.train.rsp * ramp) & (step > 0)
        passed = model.stack.pass_state(fresh, jax.lax.stop_gradient(saved))
        return jax.tree.map(lambda a, b: jnp.where(use, a, b), passed, fresh)

    def loss(
        params: Any,
        memory: State,
        batch: Batch,
        offset: Array | None,
        weight: Array,
        key: Array,
        state: TrainState,
        index: Array | int = 0,
    ) -> Any:
        """Return (this part's share of the mean loss, (memory, totals))."""
        # of dropout alone each part of a batch has keys of its own
        dropout = jax.random.fold_in(jax.random.fold_in(key, 2), index)

        def segment_model(index: Array | int) -> LanguageModel:
            keys = with_dropout_keys(state.frozen, jax.random.fold_in(dropout, index))
            return nnx.merge(graph, params, *keys)

        model = segment_model(0)
        rows, _ = batch["tokens"].shape
        passing_key, _ = jax.random.split(key)
        memory = start(model, memory, rows, passing_key, state.step, offset)
        memory, totals = read(segment_model, memory, batch, offset)
        # of a batch in parts, each adds its part of the stack's own loss
        objective = totals.loss / weight + model.stack.loss() / parts
        return objective, (jax.lax.stop_gradient(memory), totals)

    def read(
        model_of: Callable[[Array | int], LanguageModel],
        memory: State,
        batch: Batch,
        offset: Array | None,
    ):
        """Read the rows segment by segment; the gradient flows through all of them.

        Args:
          model_of: the model with the dropout of a segment, by its number.
        """

        def segment(memory: State, xs: tuple[Batch, Array | int]) -> tuple[State, MetricSums]:
            batch, index = xs
            model = model_of(index)
            # packed rows begin with the state that `start` chose, not with a reset
            reset = batch["reset"] if lanes else None
            valid, passing = (batch["valid"], batch.get("passing")) if lanes else (None, None)
            ctx = Context(reset, valid, offset, carry_memory=passing)
            x = model.embed(batch["tokens"])
            if config.train.match:
                return memory, count_errors(model.stack.match(x, ctx)[1], batch)
            x, memory = model.stack(x, memory, ctx)
            return memory, count(*model.losses(x, batch["targets"]), batch, token_bytes)

        k = config.train.bptt_segments
        if k == 1:
            return segment(memory, (batch, 0))
        pieces = jax.tree.map(lambda a: jnp.stack(jnp.split(a, k, axis=1)), batch)
        memory, totals = jax.lax.scan(jax.checkpoint(segment), memory, (pieces, jnp.arange(k)))
        return memory, jax.tree.map(lambda a: a.sum(0), totals)

    def gradients(state: TrainState, batch: Batch, key: Array):
        weights = batch["valid" if config.train.match else "weights"]
        weight = jnp.maximum(weights.sum(dtype=jnp.float32), 1e-6)
        grad = jax.grad(loss, has_aux=True)
        offset = None
        if config.train.rpo:  # drawn for the whole batch, however many parts it is read in
            offset = position_offset(jax.random.split(key)[1], config, len(batch["tokens"]))
        if parts == 1:
            return grad(state.params, state.memory, batch, offset, weight, key, state)

        def part(total, xs):
            batch, offset, memory, index = xs
            given = (memory, batch, offset, weight, key, state, index)
            grads, (memory, totals) = grad(state.params, *given)
            return jax.tree.map(jnp.add, total, (grads, totals)), memory

        batch, offset = jax.tree.map(lambda a: _parts(a, 0, parts), (batch, offset))
        zeros = (jax.tree.map(jnp.zeros_like, state.params), zero_sums())
        memory = split_lanes(state.memory, parts) if lanes else _repeat(state.memory, parts)
        xs = (batch, offset, memory, jnp.arange(parts))
        (grads, totals), memory = jax.lax.scan(part, zeros, xs)
        memory = join_lanes(memory) if lanes else jax.tree.map(lambda a: a[0], memory)
        return grads, (memory, totals)

    def step(state: TrainState, batch: Batch) -> TrainState:
        key, now = jax.random.split(jax.random.wrap_key_data(state.key))
        grads, (memory, totals) = gradients(state, batch, now)
        if not lanes:
            memory = (
                jax.tree.map(lambda a: a[:, :1], passable_state(memory)) if config.train.rsp else ()
            )
        totals = totals._replace(
            steps=jnp.ones((), jnp.float32), grad_norm=optax.tree.norm(grads).astype(jnp.float32)
        )
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = within_bounds(optax.apply_updates(state.params, updates))
        # what is carried on too: a checkpoint of this step must be good before the next loss tells
        finite = jnp.isfinite(totals.loss + totals.grad_norm) & all_finite((params, memory))
        return TrainState(
            state.step + 1,
            params,
            opt_state,
            memory,
            jax.random.key_data(key),
            jax.tree.map(jnp.add, state.totals, totals),
            jnp.where(finite | (state.bad > 0), state.bad, state.step + 1),
            state.frozen,
        )

    return step


def count(nats: Array, likeliest: Array, batch: Batch, token_bytes: Array) -> MetricSums:
    """Return the totals of one segment from `LanguageModel.losses`: two [b t]."""
    targets, weights = batch["targets"], batch["weights"]
    full = weights >= 1
    right = full & likeliest
    counted = weights > 0
    total = {
        "weight": weights,
        "loss": nats * weights,
        "answers": full,
        "right": right,
        "nats": jnp.where(counted, nats, 0),
        "bytes": jnp.where(counted, token_bytes[targets], 0),
        "tokens": batch["valid"],
    }
    sums = {name: value.sum(dtype=jnp.float32) for name, value in total.items()}
    return zero_sums()._replace(**sums)


def count_errors(errors: Array, batch: Batch) -> MetricSums:
    """Return the totals of rows whose linear layers have these errors [l b] (`train.match`).

    Loss and weight are such that their quotient is the mean over layers and rows. All tokens count,
    also those that a loss of the next token would leave out.
    """
    tokens = batch["valid"].sum(-1, dtype=jnp.float32)
    loss = (errors.mean(0).astype(jnp.float32) * tokens).sum()
    return zero_sums()._replace(weight=tokens.sum(), loss=loss, tokens=tokens.sum())


def within_bounds(params: Any) -> Any:
    """Return the parameters with learned spans brought back to shares of the longest."""

    def bring(path: tuple[Any, ...], leaf: Array) -> Array:
        return jnp.clip(leaf, 0, 1) if path_name(path).endswith("/span") else leaf

    return jax.tree_util.tree_map_with_path(bring, params)


def all_finite(tree: Any) -> Array:
    """Return whether every number of a tree is finite: a scalar."""
    return jnp.stack([jnp.isfinite(a).all() for a in jax.tree.leaves(tree)]).all()


def position_offset(key: Array, config: Config, rows: int) -> Array:
    """Random position offset (B.2.2), as the paper draws it: [b], in tokens.

    offset = np.uniform([b], maxval=wavelen)
    offset *= np.round(np.uniform([b]))
    """
    value, half = jax.random.split(key)
    longest = longest_wavelength(config.model.rope_base)
    offset = jax.random.uniform(value, (rows,), maxval=longest)
    return with_logical_constraint(
        offset * jnp.round(jax.random.uniform(half, (rows,))), ("batch",)
    )


def split_lanes(memory: State, parts: int) -> State:
    """[r b ...] -> [parts r b/parts ...], cut as the batch is."""
    return jax.tree.map(lambda a: _parts(a, 1, parts), memory)


def join_lanes(memory: State) -> State:
    """[parts r b/parts ...] -> [r b ...]."""

    def join(a: Array) -> Array:
        _, r, _, *rest = a.shape
        return jnp.moveaxis(a, 0, 2).reshape(r, -1, *rest)

    return jax.tree.map(join, memory)


def _parts(a: Array, axis: int, parts: int) -> Array:
    """Cut the rows on `axis` into parts, on a new first axis; row i goes to part i % parts.

    So every part has rows of every device, and none has to move.
    """
    rows = a.shape[axis] // parts
    a = a.reshape(*a.shape[:axis], rows, parts, *a.shape[axis + 1 :])
    return jnp.moveaxis(a, axis + 1, 0)


def _repeat(memory: State, parts: int) -> State:
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (parts, *a.shape)), memory)
