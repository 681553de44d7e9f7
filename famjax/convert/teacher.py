"""What `famjax convert` begins with: a model of Hugging Face's, or a famjax run's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from flax import nnx

from famjax.core.config import DataConfig, ModelConfig
from famjax.core.errors import UserError
from famjax.core.json_files import read_json
from famjax.models.language_model import LanguageModel
from famjax.models.remap_params import abstract, remap_params
from famjax.train.run import CONFIG, open_run

# Hugging Face's config.json, for who exports the model again
SOURCE = "hf_config.json"


class Teacher(NamedTuple):
    """A trained model on its way to another attention.

    Attributes:
      name: what it is, for people.
      model: its config before surgery.
      tokenizer: what `load_tokenizer` takes.
      data: what the converted folder says of it.
      student: config -> the model of that config, with this one's weights.
      compared: (student, its config) -> a line that says what it was compared with.
      hf: Hugging Face's config.json that it came from, if it did.
      ignored: a line on the keys in there of which nothing is known, if there are any.
    """

    name: str
    model: ModelConfig
    tokenizer: str
    data: DataConfig
    student: Callable[[ModelConfig], LanguageModel]
    compare: Callable[[LanguageModel, ModelConfig], str]
    hf: bytes
    ignored_keys: str = ""


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a famjax run, trained or converted; False if it is damaged."""
    try:
        content = read_json(folder / CONFIG, "")
    except (OSError, UserError):
        return False
    return isinstance(content, dict) and {"model", "optimizer"} <= content.keys()


def open_run_teacher(source: Path, tokenizer: str) -> Teacher:
    """Return a run as it is used, its adapters merged.

    Args:
      source: its folder; the newest good checkpoint is taken.
      tokenizer: instead of its own.
    """
    opened = open_run(source)
    run, data = opened.merged(), opened.config.data
    if tokenizer or data.tokenizer != "task":
        kept = DataConfig(tokenizer=tokenizer or run.tokenizer.name)
    else:
        # these words are its task's
        kept = DataConfig(task=data.task, toy=data.toy, tokenizer="task")
    params = nnx.state(run.model, nnx.Param)

    def student(model: ModelConfig) -> LanguageModel:
        return nnx.merge(abstract(model)[0], remap_params(params, run.config.model, model))

    return Teacher(
        f"{source} at step {run.step:,}",
        run.config.model,
        tokenizer or run.tokenizer.name,
        kept,
        student,
        lambda model, to: "every weight of the run is kept that the new layers have",
        _hf_config(source, opened.config.init),
    )


def _hf_config(run: Path, init: str) -> bytes:
    """Return the config.json that a run was converted from, or the model it began with."""
    found = [folder / SOURCE for folder in (run, *([Path(init)] if init else []))]
    return next((path.read_bytes() for path in found if path.exists()), b"")
