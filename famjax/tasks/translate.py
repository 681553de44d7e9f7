"""Sequence to sequence: pairs of a source and a target, such as sentences and translations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from famjax.config.schema import Config, ModelConfig
from famjax.data.pair_rows import Lengths, PairSource
from famjax.data.pairs import Pairs
from famjax.data.sources import Source, Split
from famjax.mixers import mixer_specs
from famjax.tasks.task import EvaluationTask, Task
from famjax.tokenizers.tokenizer import Tokenizer

# options of `famjax eval` for the pairs and the search
_SEARCH = ("examples", "beam", "length_penalty", "no_repeat_ngram", "tune", "max_tokens")


def _target_block(model: ModelConfig) -> int:
    """Return the number of tokens that the start of a target in a row is a multiple of.

    Full and linear attention start a target anywhere.
    """
    return model.block_len if any(spec.is_blockwise for spec in mixer_specs(model)) else 1


class TranslateTask(Task):
    keys = ("data.source", "data.target")
    switches = ("data.source_length", "data.source_words")
    reads_sources = True
    group = "translate"
    options = (*_SEARCH, "tokenized")
    files = "SOURCES=TARGETS, or translate:PAIRS.jsonl"
    needs_files = True
    evaluation = "famjax.eval.translate:evaluate"
    headline = "bleu"

    def check(self, config: Config) -> Iterator[str]:
        m, d, t = config.model, config.data, config.train
        named = "data.task=translate"
        if not m.encoder.layers:
            yield f"{named} needs an encoder, model.encoder.layers=0; set as many as model.layers"
        if d.layout != "pairs":
            yield f"{named} has rows of pairs, data.layout={d.layout}; set data.layout=pairs"
        if d.text_rows:
            yield f"{named} has no rows of text, data.text_rows={d.text_rows}; set 0"
        if t.bptt_segments > 1:
            yield f"{named} reads each row whole, train.bptt_segments={t.bptt_segments}; set 1"

    def make_source(
        self, config: Config, tokenizer: Tokenizer, split: Split, checked: Path | None
    ) -> Source:
        data = config.data
        block = _target_block(config.model)
        return PairSource(
            Pairs(data.source, data.target, data.source_words),
            tokenizer,
            Lengths(data.source_length or data.length, data.length, block),
            config.seed,
            ignores_blocks=block < config.model.block_len,
        )

    def eval_options(self, config: Config, source: Any, capacity: int | None) -> str | None:
        return None

    def scores(self, results: Any) -> dict[str, float]:
        return {"": float(results[self.headline])}


class SummarizeTask(EvaluationTask):
    """The outputs of a model trained on data.task=translate, scored as summaries."""

    reads_sources = True
    group = "translate"
    options = _SEARCH
    files = "SOURCES=TARGETS, or summarize:PAIRS.jsonl"
    needs_files = True
    evaluation = TranslateTask.evaluation
    headline = "rouge_lsum"
    instead = "train with data.task=translate"

    def scores(self, results: Any) -> dict[str, float]:
        return {"": float(results[self.headline])}
