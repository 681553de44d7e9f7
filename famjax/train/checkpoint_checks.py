"""Checks that a checkpoint is of the model that the run's config describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from famjax.config.keys import key_values
from famjax.config.schema import Config, ModelConfig
from famjax.core.errors import UserError
from famjax.experiment.load import from_json
from famjax.experiment.unused_keys import has_effect
from famjax.mixers import mixer_constants
from famjax.processes.collective import broadcast_from_first
from famjax.train.checkpoint import Checkpoints
from famjax.train.manifest import EXTRA
from famjax.train.run_folder import CONFIG

# Keys that determine the outputs of an opened model and its held-out documents; and exceptions
# among them that do not: paths of data, details of the computation, training-only settings.
_MODEL_KEYS = ("seed", "model.", "data.", "train.only", "train.match")
_UNCHECKED = (
    "model.dtype",
    "model.scan_layers",
    "model.remat",
    "model.capacity",
    "model.linear.chunk",
    "model.dropout.",
    "model.lora.dropout",
    *(f"model.feedback.{name}" for name in ("cache", "sweeps", "tolerance", "span_")),
    *(f"data.{name}" for name in ("files", "seqio", "tfds", "tokenizer")),
    *(f"data.{name}" for name in ("batch", "length", "layout")),
)


def check_not_edited(
    config: Config, checkpoints: Checkpoints, step: int | None, folder: Path
) -> None:
    """Raise a `UserError` if config.json describes another model than the checkpoint does.

    Most keys do not change the shapes in a checkpoint, so that after an edit of config.json by hand
    the checkpoint would silently run as another model. A checkpoint without a config, from an older
    famjax, is accepted.

    Args:
      step: step of the checkpoint; None means the newest.
    """
    step, saved = broadcast_from_first("config", lambda: _saved_config(checkpoints, step))
    if not saved:
        return
    try:
        then = from_json(json.dumps(saved), report=lambda line: None)
    except UserError as error:
        raise UserError(
            f"{checkpoints.path(step or 0) / EXTRA}: damaged ({error}); restore it from a copy"
        ) from None
    before, now = key_values(then), key_values(config)
    changed = [
        key
        for key in now
        if now[key] != before[key]
        and key.startswith(_MODEL_KEYS)
        and not key.startswith(_UNCHECKED)
        and (has_effect(key, then) or has_effect(key, config))
    ]
    if changed:
        edits = ", ".join(f"{key}={now[key]!r} (was {before[key]!r})" for key in changed)
        raise UserError(
            f"{folder / CONFIG}: was edited, and no longer matches the checkpoint of step {step}: "
            f"{edits}; undo the edit, or change the model with famjax convert"
        )


def check_constants(extra: dict[str, Any], model: ModelConfig, where: Path) -> None:
    """Raise a `UserError` for a checkpoint of a famjax version with other `MixerSpec.constants`.

    With the constants of this version the same parameters would compute another function. A
    checkpoint without constants is accepted: it is from 0.1.0, before they were recorded.

    Args:
      extra: the checkpoint's `extra`.
      where: the checkpoint's folder.
    """
    if "constants" not in extra:
        return
    saved, now = extra["constants"], mixer_constants(model)
    changed = [name for name, value in now.items() if saved.get(name) != value]
    if changed:
        differences = ", ".join(f"{name} {saved.get(name)} -> {now[name]}" for name in changed)
        raise UserError(
            f"{where}: is of another version of famjax, with which its weights are another model "
            f"({differences}); open it with that version, or train again"
        )


def _saved_config(checkpoints: Checkpoints, step: int | None) -> tuple[int | None, Any]:
    """Return the step (None means the newest), and the config in its checkpoint, if any."""
    step = checkpoints.latest() if step is None else step
    return step, None if step is None else checkpoints.extra(step).get("config")
