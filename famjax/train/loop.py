"""The training loop: it feeds the compiled step, and never waits for the device between logs."""

from __future__ import annotations

from pathlib import Path

import jax

from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.core.paths import expanded, url_message
from famjax.data.sources import Source
from famjax.train import hosts
from famjax.train.best import Best
from famjax.train.heldout import HeldOutLoss
from famjax.train.hooks import AttentionSpans, BpttWarmup, Curriculum, Hook, Profiling, Saving
from famjax.train.log import Log
from famjax.train.partition import merge_for_inference
from famjax.train.profile import Profiler
from famjax.train.resume import start_or_resume
from famjax.train.run import Run
from famjax.train.saving import save
from famjax.train.session import Session
from famjax.train.start import open_session, save_continued
from famjax.train.task_scores import TaskScores


def train(config: Config, run_dir: str | Path, quiet: bool = False) -> Run:
    """Train, or continue the run in the folder, up to `config.train.steps` steps.

    If a run is killed at any moment and this function is called again, it ends bit for bit as if it
    had not been killed. `train.steps` may be raised between calls; a cosine or wsd schedule then
    follows the new number.

    Args:
      config: config of the run.
      run_dir: the run's folder; if it has a checkpoint, the run is resumed.
      quiet: show no progress line.

    Returns:
      The trained model.

    Raises:
      UserError: the config, the data or the folder is wrong, or the loss was not finite.
      StopRequested: SIGTERM or SIGINT was received; everything is saved.
    """
    return train_with_source(config, run_dir, quiet)[0]


def train_with_source(
    config: Config, run_dir: str | Path, quiet: bool = False
) -> tuple[Run, Source]:
    """Train like `train`, and return also the source of the documents that were trained on."""
    if message := url_message(str(run_dir)):
        raise UserError(message)
    with open_session(config, expanded(run_dir), quiet) as session:
        train_session(session)
    state = session.state
    model = merge_for_inference(session.program.inference_graph, state.params, state.frozen)
    return Run(session.given_config, session.tokenizer, model, int(state.step)), session.source


def train_session(session: Session) -> None:
    """Train from the newest checkpoint, or from the initial state, to the last step."""
    train = session.config.train
    signals, log = hosts.StopSignal(), Log()
    profiler = Profiler(session.config, session.folder, session.progress.note)
    hooks = _make_hooks(log, profiler, signals)
    if session.latest_step is None:
        session.describe()
    start_or_resume(session, hooks)
    if session.latest_step is not None:
        save_continued(session)
        for hook in hooks:
            hook.after_resume(session)
    if session.step >= train.steps:
        done = f"step {session.step:,} of train.steps={train.steps} is done"
        session.progress.note(f"nothing to do: {done}; raise it to continue")
        return
    if session.latest_step is not None:
        session.describe()
    writer = hosts.make_metrics_writer(session.folder, session.step or None)
    with signals.catch_signals(), profiler, writer:
        for hook in hooks:
            hook.before_first_step(session)
        while session.step < train.steps:
            following = session.step + 1
            is_logged = following % train.log_every == 0 or following == train.steps
            with jax.profiler.StepTraceAnnotation("train", step_num=session.step):
                inspected = session.run_step(inspect=is_logged)
            if is_logged:
                row, tokens = log.measure(session, inspected)
                for hook in hooks:
                    row |= hook.before_log(session, row)
                log.write(session, writer, row, tokens)
            for hook in hooks:
                hook.after_step(session, is_logged)
        save(session, hooks)
        session.checkpoints.wait()


def _make_hooks(log: Log, profiler: Profiler, signals: hosts.StopSignal) -> list[Hook]:
    """Return the hooks of a run, in the order in which they are called."""
    hooks: list[Hook] = [log, Curriculum(), HeldOutLoss(), TaskScores(), AttentionSpans()]
    # `Best` judges what `HeldOutLoss` and `TaskScores` have added to a row. The last two save the
    # states of all hooks, themselves included
    hooks += [Profiling(profiler), BpttWarmup(), Best(hooks), Saving(signals, hooks)]
    return hooks
