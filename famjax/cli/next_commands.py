"""Suggested commands after training, which work for the run's task and data."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from famjax.cli.eval import LENGTHS
from famjax.config.schema import Config
from famjax.data.sources import TextSource
from famjax.experiment.checks import TOYS
from famjax.mixers import mixer_specs
from famjax.tasks.toy import resolve_toy


def next_commands(config: Config, source: Any, folder: Path) -> str:
    """Return the commands, separated by commas.

    Args:
      config: of the run, with its vocabulary's size.
      source: of its training data.
      folder: of the run.
    """
    run = shlex.quote(str(folder))
    options = eval_options(config, source)
    found = [] if options is None else [f"famjax eval {run}{options}"]
    # the answers of most toy tasks cannot be generated as tokens
    if config.data.tokenizer != "task":
        found.append(f"famjax generate {run} --prompt ...")
    if options is None and config.data.task == "text":
        window = _window_option(config)
        why = " (nothing was held out)" if isinstance(source, TextSource) else ""
        found.append(f"famjax eval {run} --tasks text:FILE{window}{why}")
    return ", ".join(found)


def eval_options(config: Config, source: Any) -> str | None:
    """Return the options with which `famjax eval` evaluates a run on its own task.

    Such as "" or " --lengths 256"; None if that is not possible.
    """
    capacity, data = _capacity(config), config.data
    if data.task in TOYS:
        if capacity is None:
            return ""
        # test episodes may be longer; concatenated, all episodes of a lane are one document
        steps = resolve_toy(data.task, data.toy).steps
        return None if data.toy.concatenate else f" --lengths {steps}"
    if data.task == "passkey":
        shortest = source.task.shortest
        fit = [n for n in LENGTHS if shortest <= n and (capacity is None or n <= capacity)]
        if not fit and capacity is not None and shortest <= capacity:
            fit = [capacity]
        return None if not fit else _lengths_option(fit)
    return _window_option(config) if getattr(source, "holds_out", False) else None


def _lengths_option(fit: list[int]) -> str:
    return "" if fit == LENGTHS else f" --lengths {','.join(map(str, fit))}"


def _window_option(config: Config) -> str:
    """Return the option with which full attention reads documents longer than its KV cache."""
    capacity, block = _capacity(config), config.model.block_len
    return "" if capacity is None else f" --window {capacity // block * block}"


def _capacity(config: Config) -> int | None:
    """Return the maximum number of tokens of a document; None if it is unbounded."""
    bounded = any(spec.is_bounded for spec in mixer_specs(config.model))
    return config.model.capacity if bounded else None
