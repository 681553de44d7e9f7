"""Opens a run folder for training, either in all processes or in none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.experiment.checks import validate
from famjax.processes.collective import broadcast_from_first, first_process_first, process_index
from famjax.processes.failure_monitor import set_last_step
from famjax.train import hosts, lock
from famjax.train.checkpoint import Checkpoints
from famjax.train.metrics import METRICS
from famjax.train.partition import has_frozen_params
from famjax.train.progress import Progress
from famjax.train.resolve import save_resolved
from famjax.train.run import check_initial_model
from famjax.train.run_folder import CHECKPOINTS, prepare_run, update_config
from famjax.train.session import Session
from famjax.train.task_scores import check_tasks


@contextmanager
def open_session(config: Config, folder: Path, quiet: bool) -> Iterator[Session]:
    """Hold the lock of a run folder, created if it is missing, and yield a session in it.

    Raises:
      UserError: the config, the data or the folder is wrong.
    """
    _check(config)
    hosts.check_same_config(config)
    # in all processes at once, since each waits for the devices of the others
    jax.devices()
    check_tasks(config)
    with lock.hold_for_all(folder) as is_new, _removing_failed_start(folder, is_new):
        path = folder / CHECKPOINTS
        is_resumed = broadcast_from_first("begun", lambda: Checkpoints(path).latest() is not None)
        config, tokenizer = first_process_first(
            "prepare", lambda: prepare_run(folder, config, is_resumed)
        )
        if config.init and not is_resumed:
            check_initial_model(config)
        hosts.check_shared_folder(folder)
        keep, every = config.train.keep, config.train.checkpoint_every
        checkpoints = first_process_first("open", lambda: Checkpoints(path, keep, every))
        set_last_step(checkpoints.latest)
        latest_step = broadcast_from_first("latest", checkpoints.latest)
        progress = Progress(config.train.steps, latest_step or 0, quiet, process_index() > 0)
        session = Session(config, tokenizer, checkpoints, folder, progress, latest_step)
        if not is_resumed:
            _save_resolved(session)
        with progress:
            try:
                yield session
            finally:
                session.batches.release()
                checkpoints.wait()


def save_continued(session: Session) -> None:
    """Write the configs of a run that continues; one that is refused stays as it was."""
    update_config(session.folder, session.given_config)
    _save_resolved(session)


def _save_resolved(session: Session) -> None:
    if process_index() == 0:
        save_resolved(session.folder, session.config)


def _check(config: Config) -> None:
    """Raise a `UserError` for a config that cannot be trained."""
    validate(config)
    advice = "give init=FOLDER, a run or what famjax convert wrote, or set"
    if config.model.lora.rank and not config.init:
        raise UserError(
            f"model.lora.rank={config.model.lora.rank}: adapters need weights to adapt; "
            f"{advice} model.lora.rank=0"
        )
    if has_frozen_params(config) and not config.init:
        raise UserError(
            f"train.only={config.train.only}: what is not trained is taken from another model; "
            f"{advice} train.only=all"
        )


@contextmanager
def _removing_failed_start(folder: Path, is_new: bool) -> Iterator[None]:
    """Remove the folder if it is new and the run was refused at its start."""
    try:
        yield
    except UserError:
        rows = folder / METRICS
        is_begun = (rows.exists() and rows.stat().st_size) or any((folder / CHECKPOINTS).glob("*"))
        if is_new and not is_begun:
            shutil.rmtree(folder, ignore_errors=True)
        raise
