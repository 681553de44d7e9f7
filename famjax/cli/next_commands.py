"""Suggestions of commands to run after training, which work for the run's task and data."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from famjax.config.schema import Config
from famjax.data.sources import TextSource
from famjax.mixers import is_bounded
from famjax.tasks import TASKS
from famjax.tasks.text import window_option


def next_commands(config: Config, source: Any, folder: Path) -> str:
    """Return the commands, separated by commas.

    Args:
      config: the run's config, with the size of its vocabulary.
      source: source of the training data.
      folder: folder of the run.
    """
    run = shlex.quote(str(folder))
    options = eval_options(config, source)
    commands = [] if options is None else [f"famjax eval {run}{options}"]
    # the answers of most toy tasks cannot be generated as tokens
    if config.data.tokenizer != "task":
        commands.append(f"famjax generate {run} --prompt ...")
    if options is None and config.data.task == "text":
        window = window_option(config, _capacity(config))
        why = " (nothing was held out)" if isinstance(source, TextSource) else ""
        commands.append(f"famjax eval {run} --tasks text:FILE{window}{why}")
    return ", ".join(commands)


def eval_options(config: Config, source: Any) -> str | None:
    """Return the result of `Task.eval_options` for a run's own task."""
    return TASKS[config.data.task].eval_options(config, source, _capacity(config))


def _capacity(config: Config) -> int | None:
    """Return the maximum number of tokens of a document; None if it is unbounded."""
    return config.model.capacity if is_bounded(config.model) else None
