"""A user-defined task: after a row of letters and "?", predict the last letter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from famjax.config.schema import Config
from famjax.data.sources import Key, Piece, Source, Split
from famjax.eval.streaming import Streamer
from famjax.tasks.task import Request, Task
from famjax.tokenizers.tokenizer import Tokenizer
from famjax.train.run import Run

LETTERS = "abcd"


class LastLetterSource(Source):
    """Infinite documents: bos, 6 letters, "?", the answer, eos."""

    def __init__(self, tokenizer: Tokenizer, seed: int, split: Split):
        self._tokenizer, self._seed = tokenizer, (seed, split == "holdout")

    def key(self, lane: int, lanes: int, k: int, before: Key | None = None) -> Key:
        return [lane, k]

    def open(self, key: Key, piece: int = 0) -> Iterator[Piece]:
        rng = np.random.default_rng([*self._seed, *key])
        row = "".join(rng.choice(list(LETTERS), 6))
        t = self._tokenizer
        tokens = np.array([t.bos_id, *t.encode(f"{row}?{row[-1]}"), t.eos_id], np.int32)
        weights = np.zeros(len(tokens), np.float32)
        weights[-2] = 1
        yield from [Piece(tokens, weights)][piece:]


class LastLetter(Task):
    group = "last_letter"
    evaluation = "last_letter:evaluate"

    def check(self, config: Config) -> Iterator[str]:
        if config.data.repeat_len:
            yield f"data.repeat_len={config.data.repeat_len}: letters are no text; set 0"

    def make_source(
        self, config: Config, tokenizer: Tokenizer, split: Split, checked: Path | None
    ) -> Source:
        return LastLetterSource(tokenizer, config.seed, split)


def evaluate(run: Run, request: Request) -> dict[str, Any]:
    """Return the share of documents whose answer is the most probable letter."""
    source, right = LastLetterSource(run.tokenizer, run.config.seed, "holdout"), 0
    examples = request.examples or 20
    streamer = Streamer(run.model, 1)
    for k in range(examples):
        (piece,) = source.open([0, k])
        streamer = streamer.new_stream()
        streamer.read(piece.tokens[None, :-2])
        right += int(streamer.logits[0].argmax() == piece.tokens[-2])
    row = {"examples": examples, "accuracy": right / examples, "guessing": 1 / len(LETTERS)}
    return {"task": request.task, "rows": [row]}
