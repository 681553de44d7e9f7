"""Saves a session's checkpoints, and refuses a state that is not finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import jax

from famjax.core.errors import UserError
from famjax.mixers import is_bounded, mixer_constants
from famjax.train import hosts
from famjax.train.session import Session
from famjax.train.state import to_tree

if TYPE_CHECKING:
    from famjax.train.hooks import Hook


def save(session: Session, hooks: Iterable[Hook]) -> None:
    """Save a checkpoint of this step, unless it is saved already.

    Raises:
      UserError: the state is not finite; it is not saved.
    """
    if session.saved_step == session.step:
        return
    check_finite(session)
    extra = {
        "data": hosts.gather_cursors(session.batches.get_state()),
        # the given config, with which a resumed run compares its own, but with the mesh that was
        # used
        "config": dataclasses.asdict(
            dataclasses.replace(session.given_config, mesh=session.config.mesh)
        ),
        "constants": mixer_constants(session.config.model),
        "base": session.base,
    }
    for hook in hooks:
        _add(extra, hook, session)
    session.checkpoints.save(session.step, to_tree(session.state), extra)
    session.saved_step = session.step


def _add(extra: dict[str, Any], hook: Hook, session: Session) -> None:
    """Add a hook's fields to `extra`, the dictionary that all hooks share.

    Raises:
      ValueError: another hook has already added a field of the same name.
    """
    fields = hook.state_dict(session)
    if taken := sorted(extra.keys() & fields.keys()):
        raise ValueError(
            f"{type(hook).__name__}.state_dict: {', '.join(taken)} is already in the checkpoint, "
            "saved by another hook; rename it"
        )
    extra.update(fields)


def check_finite(session: Session) -> None:
    """Raise a `UserError` if a loss, gradient, parameter or memory was not finite."""
    with session.clock.waiting("device"):
        bad = int(jax.device_get(session.state.bad))
    if not bad:
        return
    session.checkpoints.wait()
    last = session.checkpoints.latest()
    last_saved = f"the last valid checkpoint is step {last}" if last else "nothing was saved yet"
    hint = "start a run with a lower optimizer.learning_rate or more optimizer.warmup_steps"
    model = session.config.model
    if is_bounded(model):
        hint = (
            f"if a document is longer than model.capacity={model.capacity} tokens, which is all "
            f"that the model holds, raise it; else {hint}"
        )
    folder = session.checkpoints.folder
    raise UserError(f"the loss is not finite at step {bad}; {last_saved} in {folder}; {hint}")
