"""Sums of an evaluation on text by position and by document, and the scores made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from famjax.core.types import Batch
from famjax.data.sources import Key, TextSource
from famjax.eval.document_sums import DocumentSums
from famjax.eval.guessing import TokenCounts
from famjax.eval.intervals import paired_interval
from famjax.eval.text_results import (
    AblatedTextScores,
    DocumentRow,
    MemoryScores,
    PositionRow,
    TextScores,
    WordScores,
)
from famjax.tokenizers.tokenizer import Tokenizer

# the first bucket of positions holds 2 ** 8 tokens
_FIRST_BUCKET = 8
_BUCKETS = 64 - _FIRST_BUCKET


class PositionSums:
    """Sums of metrics over tokens, by buckets of positions: 0 to 255, 256 to 511, 512 to 1023, ...

    Attributes:
      bytes: total size of the predicted tokens.
      tokens, nll, correct: [buckets], number of tokens, and sums over them.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.tokens, self.nll, self.correct = (np.zeros(_BUCKETS) for _ in range(3))

    def add(
        self,
        counted: np.ndarray,
        positions: np.ndarray,
        nll: np.ndarray,
        correct: np.ndarray,
        size: np.ndarray,
    ) -> None:
        """Add one batch, [b t] each; `size` is in bytes."""
        # frexp rather than log2: exact at powers of two
        bucket = np.maximum(np.frexp(positions[counted])[1] - _FIRST_BUCKET, 0)
        self.tokens += np.bincount(bucket, minlength=_BUCKETS)
        self.nll += np.bincount(bucket, nll[counted], minlength=_BUCKETS)
        self.correct += np.bincount(bucket, correct[counted], minlength=_BUCKETS)
        self.bytes += int(size.sum())

    def scores(self) -> TextScores:
        return self.compute_scores(float(self.nll.sum()), float(self.correct.sum()))

    def compute_scores(self, nll: float, correct: float) -> TextScores:
        """Return the scores of the added tokens for a sum of nll and of correct predictions."""
        tokens = float(self.tokens.sum())
        loss = nll / tokens
        return {
            "loss": loss,
            "accuracy": correct / tokens,
            "perplexity": math.exp(loss) if loss < 700 else math.inf,
            "bits_per_byte": nll / self.bytes / math.log(2),
        }


class TextSums:
    """Sums over all that was read, with memory, without, and with each ablation.

    Attributes:
      names: names of the ablations.
      with_memory, reset, ablated: metrics of each stream; `ablated` has one for each name.
      by_document: tokens, bytes and nats of each document; the nats are those of each stream.
      counts: how often each token occurs as a target.
      read: number of tokens that a stream has read, with the overlap of windows.
    """

    def __init__(self, tokenizer: Tokenizer, lanes: int, names: Sequence[str]):
        self.names = names
        self.with_memory, self.reset = PositionSums(), PositionSums()
        self.ablated = [PositionSums() for _ in names]
        self.by_document = DocumentSums(lanes)
        self.counts = TokenCounts(tokenizer.vocab_size)
        self.read = 0
        self._token_bytes = tokenizer.token_bytes

    def add(
        self,
        batch: Batch[np.ndarray],
        positions: np.ndarray,
        results: Sequence[tuple[np.ndarray, np.ndarray]],
    ) -> None:
        """Add one batch of `_predictions`."""
        counted = batch["weights"] > 0
        size = self._token_bytes[batch["targets"]] * counted
        totals = (self.with_memory, self.reset, *self.ablated)
        for metrics, (nll, correct) in zip(totals, results, strict=True):
            metrics.add(counted, positions, nll, correct, size)
        values = np.stack([counted, size, *(nll * counted for nll, _ in results)])
        if "starts" in batch:  # the windows of a document follow each other, as if in one lane
            starts = batch["starts"].reshape(1, -1)
            self.by_document.add(starts, values.reshape(len(values), 1, -1))
        else:
            self.by_document.add(batch["reset"], values)
        self.counts.add(batch["targets"][counted])
        self.read += int(batch["valid"].sum())


def word_scores(
    source: TextSource, keys: Sequence[Key], words: int | None, nats: float
) -> WordScores:
    """Return the number of words of the documents that were read, and the perplexity per word."""
    if words is None:
        pieces = (text for key in keys for text in source.scored_texts(key))
        words = sum(len(text.split()) for text in pieces)
    each = nats / words if words else math.inf
    return {"words": words, "word_perplexity": math.exp(each) if each < 700 else math.inf}


def document_rows(
    sums: DocumentSums, keys: Sequence[Key], names: Sequence[str]
) -> list[DocumentRow]:
    """Return a row for each document, ordered by file and line.

    Args:
      sums: sums of the values of each document.
      keys: keys of the documents, in the order in which they were started.
      names: names of the ablations.
    """
    rows = []
    for (file, line, _), (tokens, size, nll, reset_nll, *ablated) in zip(
        keys, sums.sums, strict=True
    ):
        row: DocumentRow = {
            "file": file,
            "line": line,
            "tokens": int(tokens),
            "bytes": int(size),
            "nats": float(nll),
            "nats_without_memory": float(reset_nll),
        }
        if names:
            row["ablated"] = dict(zip(names, map(float, ablated), strict=True))
        rows.append(row)
    return sorted(rows, key=lambda row: (row["file"], row["line"]))


def text_ablation_scores(
    names: Sequence[str], sums: Sequence[PositionSums], documents: DocumentSums
) -> dict[str, AblatedTextScores]:
    """Return the scores with each ablation, and the gain of the run over it."""
    found: dict[str, AblatedTextScores] = {}
    for i, (name, totals) in enumerate(zip(names, sums, strict=True)):
        size, nats, ablated = (np.array([row[n] for row in documents.sums]) for n in (1, 2, 4 + i))
        found[name] = {**totals.scores(), "gain": paired_interval(ablated, nats, size)}
    return found


def memory_scores(with_memory_sums: PositionSums, reset_sums: PositionSums) -> MemoryScores:
    with_memory, without = with_memory_sums.scores(), reset_sums.scores()
    rows: list[PositionRow] = []
    for i in np.flatnonzero(with_memory_sums.tokens):
        tokens = with_memory_sums.tokens[i]
        rows.append(
            {
                "from": 0 if i == 0 else 2 ** (_FIRST_BUCKET - 1 + int(i)),
                "to": 2 ** (_FIRST_BUCKET + int(i)) - 1,
                "tokens": int(tokens),
                "loss": float(with_memory_sums.nll[i] / tokens),
                "accuracy": float(with_memory_sums.correct[i] / tokens),
                "loss_without_memory": float(reset_sums.nll[i] / tokens),
            }
        )
    return {
        **with_memory,
        "without_memory": without,
        "memory_gain": {
            "loss": without["loss"] - with_memory["loss"],
            "accuracy": with_memory["accuracy"] - without["accuracy"],
            "perplexity": without["perplexity"] - with_memory["perplexity"],
            "bits_per_byte": without["bits_per_byte"] - with_memory["bits_per_byte"],
        },
        "by_position": rows,
    }
