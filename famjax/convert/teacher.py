"""The source model of `famjax convert`: a Hugging Face model or a famjax run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from flax import nnx

from famjax.config.schema import DataConfig, ModelConfig
from famjax.core.errors import UserError
from famjax.core.json_files import read_json
from famjax.models.language_model import LanguageModel
from famjax.models.remap_params import abstract_inference_model, remap_params
from famjax.tokenizers.load import load_tokenizer
from famjax.tokenizers.tokenizer import Tokenizer, check_same_ids
from famjax.train.run import open_run
from famjax.train.run_folder import CONFIG, find_source_config


class Teacher(NamedTuple):
    """A trained model whose attention is to be replaced.

    Attributes:
      name: description for messages.
      model: its config before surgery.
      tokenizer: its tokenizer, as an argument of `load_tokenizer`.
      data: data config for the converted model's folder.
      student: function of a config that returns the model of that config, with this model's
        weights.
      compare: function of a student and its config that returns a line about their comparison with
        this model.
      hf: content of the Hugging Face config.json that it comes from, or empty.
      ignored_keys: a line about unknown keys in that config.json, or "".
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
    """Return whether a folder is a famjax run, trained or converted; False if it is damaged."""
    try:
        content = read_json(folder / CONFIG, "")
    except (OSError, UserError):
        return False
    return isinstance(content, dict) and {"model", "optimizer"} <= content.keys()


def open_run_teacher(source: Path, tokenizer: str) -> Teacher:
    """Open a run with its adapters merged.

    Args:
      source: the run's folder; the newest valid checkpoint is used.
      tokenizer: tokenizer that replaces the run's own; "" keeps that one.
    """
    opened = open_run(source)
    check_given_tokenizer(tokenizer, opened.tokenizer, source)
    run, data = opened.merge_adapters(), opened.config.data
    if tokenizer or data.tokenizer != "task":
        student_data = text_data(run.config.model, tokenizer or run.tokenizer.name)
        student_data = replace(student_data, source_words=data.source_words)
    else:
        # the vocabulary belongs to the task
        student_data = DataConfig(task=data.task, toy=data.toy, tokenizer="task")
    params = nnx.state(run.model, nnx.Param)
    path = find_source_config(source, opened.config.init)

    def student(model: ModelConfig) -> LanguageModel:
        return nnx.merge(
            abstract_inference_model(model)[0], remap_params(params, run.config.model, model)
        )

    return Teacher(
        f"{source} at step {run.step:,}",
        run.config.model,
        tokenizer or run.tokenizer.name,
        student_data,
        student,
        lambda model, to: "every weight of the run that the new layers have is kept",
        path.read_bytes() if path else b"",
    )


def check_given_tokenizer(spec: str, own: Tokenizer | None, source: Path) -> None:
    """Raise a `UserError` if --tokenizer has other ids than the source's own tokenizer.

    Args:
      spec: value of --tokenizer, "" if it was not given.
      own: the tokenizer in `source`, if it has any.
    """
    if spec and own is not None:
        check_same_ids(load_tokenizer(spec), own, f"--tokenizer {spec}", str(source))


def text_data(model: ModelConfig, tokenizer: str) -> DataConfig:
    """Return the data config of a converted model, for text, or for pairs if it has an encoder."""
    if model.encoder.layers:
        return DataConfig(task="translate", layout="pairs", tokenizer=tokenizer)
    return DataConfig(tokenizer=tokenizer)
