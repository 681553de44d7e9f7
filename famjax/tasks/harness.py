"""Tasks of lm-evaluation-harness, `famjax eval --tasks lm_eval:hellaswag,lambada_openai`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.data.sources import Source, Split
from famjax.tasks.task import Task
from famjax.tokenizers.tokenizer import Tokenizer

_NO_TRAINING = "data.task=lm_eval: is for famjax eval; train on another task"


class HarnessTask(Task):
    """Its `files` are names of the harness's tasks, or YAML files with tasks."""

    group = "lm_eval"
    options = ("shots", "chat")
    evaluation = "famjax.eval.harness:evaluate"
    headline = "value"
    files = "hellaswag"

    def check(self, config: Config) -> Iterator[str]:
        yield _NO_TRAINING

    def make_source(
        self, config: Config, tokenizer: Tokenizer, split: Split, checked: Path | None
    ) -> Source:
        raise UserError(_NO_TRAINING)

    def scores(self, results: Any) -> dict[str, float]:
        return {"": results["rows"][0][self.headline]}
