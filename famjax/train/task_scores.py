"""Scores on tasks while a run trains (`eval.tasks`), as `famjax eval` measures them.

The evaluated model has the weights of the current step and a memory of its own. The memory of the
training lanes is not touched.

With several processes, process 0 evaluates the whole model on its own devices, while the others
wait for the scores.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from flax import nnx

from famjax.config.schema import Config, EvalConfig
from famjax.core.errors import UserError
from famjax.core.types import PyTree
from famjax.processes.collective import broadcast_from_first, process_index
from famjax.tasks import TASKS
from famjax.tasks.parse import parse_lengths, parse_tasks
from famjax.tasks.task import Request
from famjax.train import hosts
from famjax.train.heldout import evaluates_at
from famjax.train.hooks import Hook
from famjax.train.partition import frozen_weights
from famjax.train.run import Run
from famjax.train.session import Session

# number of sources that are decoded together
_SOURCES = 32


class TaskScores(Hook):
    """Adds the main score of each task in `eval.tasks` to a metrics row, every `eval.every` steps.

    TASK_LENGTH is the score at that length; TASK is the mean over the lengths, or the score of a
    text.
    """

    def before_first_step(self, session: Session) -> None:
        if not session.config.eval.tasks:
            return
        with session.clock.stopped():
            measure(session, 1, is_trial=True)  # now, so that an error is raised before any step

    def before_log(self, session: Session, row: dict[str, float]) -> dict[str, float]:
        if not session.config.eval.tasks or not evaluates_at(session):
            return {}
        with session.clock.stopped():
            return measure(session, session.config.eval.examples or None)


def check_tasks(config: Config) -> None:
    """Raise a `UserError` for a mistake in `eval.tasks` that needs no model to be found."""
    if process_index():  # process 0 evaluates, and needs the files
        return
    for name, files in parse_tasks(config.eval.tasks):
        run = SimpleNamespace(config=config)
        try:
            TASKS[name].check_request(run, Request(name, files or None))
        except UserError as error:
            raise UserError(str(error).replace("--tasks", "eval.tasks", 1)) from None


def measure(session: Session, examples: int | None, is_trial: bool = False) -> dict[str, float]:
    """Return the scores with the current weights, by name and length.

    Args:
      examples, is_trial: see `Request`.
    """
    state = session.state
    weights = hosts.gather_to_first_process((state.params, *frozen_weights(state.frozen)))
    return broadcast_from_first(
        "task scores", lambda: _measure(session, weights, examples, is_trial)
    )


def _measure(
    session: Session, weights: PyTree, examples: int | None, is_trial: bool
) -> dict[str, float]:
    config = session.config.eval
    # copies of the variables, not of their arrays: an evaluation may cast its model's weights
    weights = jax.tree.map(lambda a: a, weights)
    model = nnx.merge(session.program.inference_graph, *weights)
    run = Run(session.given_config, session.tokenizer, model, session.step, session.base)
    fields: dict[str, float] = {}
    for name, files in parse_tasks(config.tasks):
        lengths = _lengths(name, config.lengths)
        request = Request(name, files or None, lengths, examples, quiet=True, is_trial=is_trial)
        if TASKS[name].reads_sources:
            request = _with_search(request, config, session.tokenizer.output_size)
        scores: dict[str, Any] = TASKS[name].scores(TASKS[name].evaluate(run, request))
        fields |= {f"{name}_{length}": score for length, score in scores.items() if length}
        fields[name] = float(np.mean(list(scores.values())))
    return fields


def _lengths(name: str, given: str) -> list[int] | None:
    """Return the lengths of a task's documents, of `eval.lengths`; None for the task's own."""
    task = TASKS[name]
    if "lengths" not in task.options:
        return None  # text is read whole, as `famjax eval` does
    return parse_lengths(given) if given else list(task.eval_lengths) or None


def _with_search(request: Request, config: EvalConfig, size: int) -> Request:
    """Return the request with the config's settings for outputs of sources.

    Args:
      size: number of tokens that the tokenizer can write.
    """
    if config.beam > size:
        raise UserError(
            f"eval.beam={config.beam}: more hypotheses than the tokenizer's {size:,} tokens; take "
            "fewer"
        )
    return request._replace(
        batch=_SOURCES,
        beam=config.beam,
        length_penalty=config.length_penalty,
        no_repeat_ngram=config.no_repeat_ngram,
        tokenized=config.tokenized,
    )
