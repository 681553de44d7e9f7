"""Gives a session its state: from the newest valid checkpoint, or a new one."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.data.reassign import resize_rows
from famjax.experiment.load import from_json
from famjax.optimizers import make_schedule
from famjax.parallel import sharding
from famjax.processes.collective import broadcast_from_first
from famjax.train.average import AVERAGED
from famjax.train.checkpoint import wrap_extra_errors
from famjax.train.checkpoint_checks import check_constants
from famjax.train.partition import check_base, has_frozen_params
from famjax.train.profile import check_profile_steps
from famjax.train.program import make_program
from famjax.train.run import initial_weights
from famjax.train.run_folder import check_resumable
from famjax.train.session import Session
from famjax.train.state import TrainState, from_tree, to_tree
from famjax.train.warmup import resize_memory, row_length_at, with_row_length

if TYPE_CHECKING:
    from famjax.train.hooks import Hook


def start_or_resume(session: Session, hooks: Iterable[Hook]) -> None:
    """Set a session's state, step and data from the newest valid checkpoint, or to the start."""
    if session.latest_step is None:
        session.state = _first_state(session)
        return
    template = functools.partial(_template, session)
    step, tree, extra = session.checkpoints.restore(template, report=session.progress.note)
    steps = session.config.train.steps
    if step < steps:
        session.progress.note(f"continues from step {step:,} of {steps:,}")
    with wrap_extra_errors(session.checkpoints.path(step)):
        _check_config(session, from_json(json.dumps(extra["config"])), step)
        check_constants(extra, session.config.model, session.checkpoints.path(step))
        state = _with_rows(session, from_tree(tree), extra["data"])
        for hook in hooks:
            hook.load_state_dict(session, extra)
    session.step = session.saved_step = step
    if has_frozen_params(session.config):
        state = state._replace(frozen=_first_state(session).frozen)
        check_base(extra.get("base", ""), session.base, session.config.init, session.folder)
    else:
        state = state._replace(frozen=_dropout_keys(session))
    session.state = state


def _first_state(session: Session) -> TrainState:
    """Return the state before the first step: random, or with the weights in `config.init`."""
    program, progress = session.program, session.progress
    if not session.config.init:
        progress.note_unless_quiet("initial weights: random")
        with progress.compiling("the first state", 0):
            return program.start()
    weights, session.base, step = initial_weights(
        session.config, session.folder, progress.note, program.mesh
    )
    if session.latest_step is None:
        progress.note_unless_quiet(f"initial weights: from {session.config.init}, step {step:,}")
    shardings = sharding.parameter_shardings(program.mesh, weights)
    with progress.compiling("the first state", 0):
        return program.start(jax.device_put(weights, shardings))


def _dropout_keys(session: Session) -> Any:
    """Return `TrainState.frozen` if it has dropout keys only, which every step draws anew."""
    shapes = jax.eval_shape(session.program.start).frozen
    zeros = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes)
    return jax.device_put(zeros, session.program.shardings.frozen)


def _template(session: Session, step: int) -> dict[str, Any]:
    """Return the shapes and shardings of a step's checkpoint; set the session to its row length."""
    if (length := row_length_at(session.config, step)) != session.length:
        session.batches.release()
        session.set_length(length)
    program, config = session.program, with_row_length(session.config, length)
    extra = broadcast_from_first("extra", lambda: session.checkpoints.extra(step))
    if AVERAGED in extra:
        raise UserError(
            f"{session.folder}: is a mean of checkpoints, which has no optimizer state to continue "
            f"from; start another run with init={session.folder}"
        )
    with wrap_extra_errors(session.checkpoints.path(step)):
        saved = extra.get("data", {}).get("batches", {}).get("rows", [])
    if saved and len(saved) != session.rows:
        data = dataclasses.replace(config.data, batch=len(saved))
        config = dataclasses.replace(config, data=data)
        token_bytes = session.tokenizer.token_bytes
        program = make_program(config, token_bytes, session.attention_span)
    arrays = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
        jax.eval_shape(program.start),
        program.shardings,
    )
    return to_tree(arrays)


def _with_rows(session: Session, state: TrainState, data: dict[str, Any]) -> TrainState:
    """Return the state resized to the current number of rows, and position the batches."""
    rows, before = session.rows, len(data["batches"]["rows"])
    if rows == before:
        session.batches.set_state(data)
        return state
    if texts := session.config.data.text_rows:
        raise UserError(
            f"data.batch={rows}: the saved run has {before} rows, of which data.text_rows={texts} "
            f"are text; their documents cannot be reassigned; resume with data.batch={before}"
        )
    if session.config.data.layout == "pairs":
        raise UserError(
            f"data.batch={rows}: the saved run has {before} rows, over which its pairs are "
            f"divided; resume with data.batch={before}"
        )
    session.batches.set_state(resize_rows(data, rows, session.source))
    change = f"{before - rows} end" if rows < before else f"{rows - before} start new documents"
    session.progress.note(
        f"data.batch: {before} -> {rows}; {min(rows, before)} rows continue, {change}, and all "
        "documents that were not started are reassigned to these rows"
    )
    if session.config.data.layout != "lanes":
        return state
    shardings = session.program.shardings.memory
    resize = jax.jit(functools.partial(resize_memory, rows=rows), out_shardings=shardings)
    return state._replace(memory=resize(state.memory))


def _check_config(session: Session, before: Config, step: int) -> None:
    """Refuse a checkpoint of an incompatible config; report what other changes to it mean."""
    config = session.given_config
    check_resumable(before, config, session.checkpoints.path(step))
    check_profile_steps(before, config, step)
    old, new = (make_schedule(c.optimizer, c.train.steps)(step) for c in (before, config))
    if old != new:
        session.progress.note(
            f"train.steps: {before.train.steps} -> {config.train.steps}; the "
            f"{config.optimizer.schedule} schedule follows, the learning rate goes from "
            f"{float(old):.3g} to {float(new):.3g}"
        )
