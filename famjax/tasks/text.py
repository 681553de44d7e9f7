"""Text: documents of files, or of seqio and TFDS data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.data.parts import TextParts
from famjax.data.sources import Source, Split, TextSource
from famjax.tasks.task import Task
from famjax.tokenizers.tokenizer import Tokenizer


class TextTask(Task):
    switches = ("data.files", "data.seqio", "data.tfds", "data.holdout", "data.part_bytes")
    group = "text"
    options = ("window", "score", "words", "ablate")
    files = "FILES, or text:holdout"
    evaluation = "famjax.eval.text:evaluate"
    request_check = "famjax.eval.text:check_files"
    headline = "bits_per_byte"
    lower_is_better = True

    def scores(self, results: Any) -> dict[str, float]:
        return {"": results[self.headline]}

    def make_source(
        self, config: Config, tokenizer: Tokenizer, split: Split, checked: Path | None
    ) -> Source:
        data = config.data
        named = [name for name in ("files", "seqio", "tfds") if getattr(data, name)]
        if len(named) > 1:
            both = " and ".join(f"data.{name}" for name in named)
            raise UserError(f"{both} are both set; set one")
        if data.seqio or data.tfds:
            from famjax.data.seqio_tasks import TfSource  # an optional library

            return TfSource(data, tokenizer, config.seed, split)
        arguments = (data.files, tokenizer, config.seed, data.holdout, split, checked)
        if data.part_bytes and split == "train":
            return TextParts(*arguments, part_bytes=data.part_bytes)
        return TextSource(*arguments)

    def eval_options(self, config: Config, source: Any, capacity: int | None) -> str | None:
        if not isinstance(source, TextSource) or not source.holds_out:
            return None
        return window_option(config, capacity)


def window_option(config: Config, capacity: int | None) -> str:
    """Return the `--window` option of `famjax eval` for a model with a limited KV cache, or ""."""
    block = config.model.block_len
    return "" if capacity is None else f" --window {capacity // block * block}"
