"""Suggestions of commands to run after training, which work for the run's task and data.

A word in capitals stands for a file.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from famjax.config.derived import holds_out_text
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
    if options is None and (named := _files_options(config)):
        why = " (nothing was held out)" if isinstance(source, TextSource) else ""
        commands.append(f"famjax eval {run}{named}{why}")
    return ", ".join(commands)


def eval_command(config: Config, folder: Path) -> str:
    """Return a command that evaluates a finished run, without reading what it was trained on."""
    task, options = TASKS[config.data.task], ""
    if task.needs_files:
        options = _files_options(config)
    elif config.data.task == "text":
        held_out = holds_out_text(config)
        options = window_option(config, _capacity(config)) if held_out else _files_options(config)
    return f"famjax eval {shlex.quote(str(folder))}{options}"


def _files_options(config: Config) -> str:
    """Return the options that evaluate a run on files of its task; "" if it takes none."""
    name = config.data.task
    if TASKS[name].needs_files:
        return f" --tasks {name}:{TASKS[name].files.partition(',')[0]}"
    return f" --tasks text:FILE{window_option(config, _capacity(config))}" if name == "text" else ""


def eval_options(config: Config, source: Any) -> str | None:
    """Return the result of `Task.eval_options` for a run's own task."""
    return TASKS[config.data.task].eval_options(config, source, _capacity(config))


def _capacity(config: Config) -> int | None:
    """Return the maximum number of tokens of a document; None if it is unbounded."""
    return config.model.capacity if is_bounded(config.model) else None
