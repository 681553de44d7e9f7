"""Packing: rows of concatenated documents, independent of other rows (3.1, 3.1.1).

"Attention occurs causally within the window, regardless of the segment": there is no segment mask,
and only the first token of a row resets the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from famjax.core.errors import UserError
from famjax.core.types import Batch
from famjax.data.lanes import Reader, RowsIterator, Span, empty_row, write_span
from famjax.data.sources import Source
from famjax.tokenizers.tokenizer import Tokenizer

# from 3.1.1; the line breaks set it off from the text
REPEAT_PROMPT = "\n[repeat random segment]\n"


class PackedRows(grain.IterDataset[Batch[np.ndarray]]):
    """Batches whose row i packs the documents of lane i without padding.

    A document that does not fit continues in the same row of the next batch, and the target of a
    row's last token is the next token of the document. So every token is read once, and every token
    except the first of a document is predicted once. `reset` is True at position 0 only, `valid`
    everywhere, unlike in `famjax.data.lanes.Lanes`.

    With `repeat_len`, "to incentivize the model to remember long contexts" (3.1.1), a row ends with
    the tokens of `REPEAT_PROMPT` (weight 0) and `repeat_len` consecutive tokens chosen at random
    from the row, each predicted with `repeat_weight`; the documents fill the rest of the row.

    Args:
      source: source of the documents.
      tokenizer: encodes the prompt.
      batch: b, number of rows.
      length: t, tokens in a row, including the prompt and the repeated tokens.
      seed: seed for the choice of the repeated tokens.
      repeat_len: number of repeated tokens; 0 repeats none and writes no prompt.
      repeat_weight: loss weight of a repeated token; 0.1 in the paper.
      local_rows: see `RowsIterator`.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        batch: int,
        length: int,
        seed: int,
        repeat_len: int = 0,
        repeat_weight: float = 0.1,
        local_rows: Sequence[int] | None = None,
    ):
        super().__init__()
        self._source, self._batch, self._local_rows = source, batch, local_rows
        prompt = tokenizer.encode(REPEAT_PROMPT) if repeat_len else np.zeros(0, np.int32)
        needed = len(prompt) + 2 * repeat_len
        if needed > length:
            raise UserError(
                f"data.repeat_len={repeat_len}: a row needs {needed} tokens for it, including "
                f"the prompt's {len(prompt)}, but data.length is {length}"
            )
        self._repeat = _Repeat(prompt, length, seed, repeat_len, repeat_weight)

    def __iter__(self) -> RowsIterator:
        return RowsIterator(self._row, self._batch, self._local_rows)

    def _row(self, lane: int) -> _PackedRow:
        return _PackedRow(Reader(self._source, lane, self._batch), lane, self._repeat)


class _PackedRow:
    def __init__(self, reader: Reader, lane: int, repeat: _Repeat):
        self._reader, self._lane, self._repeat = reader, lane, repeat
        self._count = 0

    def get_state(self) -> dict[str, Any]:
        # existing checkpoints use the name "made"
        return {"made": self._count, "reader": self._reader.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._count = state["made"]
        self._reader.set_state(state["reader"])

    def next_row(self) -> Batch[np.ndarray]:
        """Return the next row, as arrays [t]."""
        row = empty_row(self._repeat.length)
        at = 0
        while at < self._repeat.fill:
            span = self._reader.take(self._repeat.fill - at)
            write_span(row, at, span, len(span.tokens))
            at += len(span.tokens)
        self._repeat.append(row, self._lane, self._count)
        row["reset"][:] = False
        row["reset"][0] = True
        self._count += 1
        return row


class _Repeat:
    """Writes the end of a row: the prompt and the repeated tokens."""

    def __init__(self, prompt: np.ndarray, length: int, seed: int, count: int, weight: float):
        self.length = length
        self.fill = length - len(prompt) - count
        self._prompt, self._seed, self._count, self._weight = prompt, seed, count, weight

    def append(self, row: Batch[np.ndarray], lane: int, row_number: int) -> None:
        if not self._count:
            return
        rng = np.random.Generator(
            np.random.Philox(np.random.SeedSequence((self._seed, lane, row_number)))
        )
        begin = int(rng.integers(self.fill - self._count + 1))
        repeated = row["tokens"][begin : begin + self._count]
        tokens = np.concatenate([self._prompt, repeated])
        # the last prompt token predicts the first repeated one; the last repeated one predicts
        # nothing
        weights = np.zeros(len(tokens), np.float32)
        weights[len(self._prompt) - 1 : -1] = self._weight
        targets = np.append(tokens[1:], tokens[-1])
        write_span(row, self.fill, Span(tokens, targets, weights, False, True), len(tokens))
