"""The best checkpoint of a run (`eval.best`), kept as a run of its own in RUN/best."""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from famjax.config.schema import EvalConfig
from famjax.core.errors import UserError
from famjax.processes.collective import process_index
from famjax.tasks import TASKS
from famjax.tasks.parse import parse_tasks
from famjax.train.hooks import Hook
from famjax.train.run_folder import copy_run_files
from famjax.train.saving import save
from famjax.train.session import Session

BEST = "best"
# keys of `eval` on which outputs of sources and their scores depend, and their defaults
_SEARCH = {
    key: getattr(EvalConfig(), key)
    for key in ("beam", "length_penalty", "no_repeat_ngram", "tokenized")
}


class Best(Hook):
    """Keeps the checkpoint with the best value of `eval.best`; of equal values, the first.

    Args:
      hooks: the hooks whose `state_dict` a checkpoint contains.
    """

    def __init__(self, hooks: list[Hook]):
        self._hooks = hooks
        self._value: float | None = None
        # the step of the best checkpoint
        self._step: int | None = None
        self._is_new = False

    def after_resume(self, session: Session) -> None:
        # an earlier process may have saved the checkpoint, and ended before it kept it
        checkpoint = session.checkpoints.path(session.step)
        kept = session.folder / BEST / checkpoint.parent.name / checkpoint.name
        if self._step == session.step and not kept.exists():
            self._keep(session)

    def before_log(self, session: Session, row: dict[str, float]) -> dict[str, float]:
        name = session.config.eval.best
        if name and name in row and self._is_better(name, row[name]):
            self._value, self._is_new = row[name], True
        return {}

    def _is_better(self, name: str, value: float) -> bool:
        if math.isnan(value):
            return False
        if self._value is None or math.isnan(self._value):
            return True
        lower = name not in TASKS or TASKS[name].lower_is_better
        return value < self._value if lower else value > self._value

    def after_step(self, session: Session, is_logged: bool) -> None:
        if not self._is_new:
            return
        self._is_new, self._step = False, session.step
        save(session, self._hooks)
        session.checkpoints.wait()
        self._keep(session)
        session.progress.note(
            f"step {session.step:,}: {session.config.eval.best} {self._value:.4f}, the best so "
            f"far, is kept in {session.folder / BEST}"
        )

    def _keep(self, session: Session) -> None:
        if process_index() == 0:
            keep(session.folder, session.checkpoints.path(session.step))

    def state_dict(self, session: Session) -> dict[str, Any]:
        return {"best": self._value, "best_step": self._step}

    def load_state_dict(self, session: Session, saved: dict[str, Any]) -> None:
        # checkpoints from before 2026-11-25 have no such field
        value, best = saved.get("best"), session.config.eval.best
        now = asdict(session.config)
        if (
            best
            and value is not None
            and _measurement_settings(saved["config"]) != _measurement_settings(now)
        ):
            session.progress.note(
                f"eval: {best} is not measured as before, so the earlier best value, {value:.4f}, "
                "no longer counts"
            )
            value = None
        self._value = value
        self._step = saved.get("best_step") if value is not None else None


def _measurement_settings(config: dict[str, Any]) -> tuple[Any, ...]:
    """Return what the values of `eval.best` depend on, of a config as nested dictionaries."""
    given, data = config["eval"], config["data"]
    best = given["best"]
    tasks = parse_tasks(given["tasks"], "eval.tasks") if given["tasks"] else []
    judged = [task for task in tasks if task[0] == best]
    if judged:
        measured = (best, *judged, given["lengths"], given["examples"])
        if not TASKS[best].reads_sources:
            return measured
        # a checkpoint from before these keys has none of them
        search = {**_SEARCH, **{key: given[key] for key in _SEARCH if key in given}}
        return (*measured, *search.values(), data.get("source_words", 0))
    return (best, given["batches"], data["batch"], data["length"])


def keep(run: Path, checkpoint: Path) -> None:
    """Replace RUN/best by a run made of this checkpoint.

    Checkpoint files are hard links if the file system supports them. If the process is killed
    meanwhile, RUN/best is the old run, the new one, or missing until the run is resumed.

    Raises:
      UserError: the disk is full or fails; RUN/best is written when the run is resumed.
    """
    partial, target = run / f"{BEST}.partial", run / BEST
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        copy_run_files(run, partial)
        checkpoints = partial / checkpoint.parent.name
        shutil.copytree(checkpoint, checkpoints / checkpoint.name, copy_function=_link)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except OSError as error:
        # of several files, `shutil.Error` has (source, target, reason)
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error
        raise UserError(
            f"cannot write {target}: {reason}; free some space or check its permissions, and resume"
        ) from error


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
