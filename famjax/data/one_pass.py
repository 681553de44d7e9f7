"""Batches for evaluation: every document is read once, and then the batches end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from famjax.core.types import Batch
from famjax.data.lanes import Reader, empty_row, stack_rows, write_span
from famjax.data.sources import Key, Piece, Source, TextSource


class EndOfDocuments(Exception):
    """There are no more documents."""


class DocumentPass(Source):
    """A source that hands out each document once, to the first lane that asks for one.

    Unlike other sources it ends: `key` then raises `EndOfDocuments`. The arguments of `key` have no
    effect.

    Attributes:
      keys: keys of the documents handed out so far.
      bytes: number of bytes of text, counted by the caller.
    """

    def __init__(self, source: TextSource, max_bytes: int | None):
        self._source, self._max_bytes = source, max_bytes
        self.keys: list[Key] = []
        self.bytes = 0

    def key(self, lane: int, lanes: int, k: int, before: Key | None = None) -> Key:
        enough = self._max_bytes is not None and self.bytes >= self._max_bytes
        if enough or len(self.keys) == len(self._source):
            raise EndOfDocuments
        self.keys.append(self._source.key(0, 1, len(self.keys)))
        return self.keys[-1]

    def open(self, key: Key, piece: int = 0) -> Iterator[Piece]:
        return self._source.open(key, piece)


def one_pass(source: Source, lanes: int, length: int, block: int) -> Iterator[Batch[np.ndarray]]:
    """Yield batches like those of `famjax.data.lanes.Lanes`, until all documents are read."""
    readers = [Reader(source, lane, lanes) for lane in range(lanes)]
    while True:
        batch = stack_rows([_fill_row(reader, length, block) for reader in readers])
        if not batch["valid"].any():
            return
        yield batch


def _fill_row(reader: Reader, length: int, block: int) -> Batch[np.ndarray]:
    row = empty_row(length)
    at = 0
    while at < length:
        try:
            span = reader.take(length - at)
        except EndOfDocuments:
            break
        # nothing is predicted after the last token, so it takes no position
        count = len(span.tokens) - span.last
        write_span(row, at, span, count)
        at += count
        if span.last:
            at += -at % block
    return row


def reset_blocks(batch: Batch[np.ndarray], block: int) -> np.ndarray:
    """Return `batch["reset"]`, [b t], with an additional reset before every block of tokens."""
    reset = batch["reset"].copy()
    reset[:, ::block] |= batch["valid"][:, ::block]
    return reset
