"""Batches for evaluation: every document is read once, and then the batches end."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import numpy as np

from famjax.core.types import Batch
from famjax.data.lanes import Reader, empty_row, fill_row, stack_rows
from famjax.data.sources import Key, Piece, Source, TextSource


class EndOfDocuments(Exception):
    """There are no more documents."""


class DocumentPass(Source):
    """A source that hands out each document once, to the first lane that asks for one.

    Unlike other sources it ends: `key` then raises `EndOfDocuments`. The arguments of `key` have no
    effect.

    Args:
      source: the documents, or parts of them (`TextParts`).
      max_bytes: no further document is handed out after this number of bytes; None is no limit.
      order: the documents to hand out, by their index in `TextSource.document_sizes`; None is all
        in random order.

    Attributes:
      keys: keys of the documents handed out so far.
      bytes: number of bytes of text, counted by the caller.
    """

    def __init__(
        self, source: TextSource, max_bytes: int | None = None, order: Sequence[int] | None = None
    ):
        self._source, self._max_bytes, self._order = source, max_bytes, order
        self._count = source.document_count() if order is None else len(order)
        self.keys: list[Key] = []
        self.bytes = 0

    def key(self, lane: int, lanes: int, k: int, before: Key | None = None) -> Key:
        enough = self._max_bytes is not None and self.bytes >= self._max_bytes
        number = len(self.keys)
        if enough or number == self._count:
            raise EndOfDocuments
        if self._order is None:
            self.keys.append(self._source.key(0, 1, number))
        else:
            self.keys.append(self._source.whole_key(self._order[number]))
        return self.keys[-1]

    def open(self, key: Key, piece: int = 0) -> Iterator[Piece]:
        return self._source.open(key, piece)


def min_rows(sizes: Sequence[int], max_rows: int) -> int:
    """Return the fewest rows that finish all documents as early as `max_rows` rows would.

    More rows would be empty at the end, while the longest documents are read.

    Args:
      sizes: sizes of the documents, in the order in which rows take them.
    """
    end = last_end(sizes, max_rows)
    lowest = max(math.ceil(sum(sizes) / max(end, 1)), 1)
    return next(rows for rows in range(lowest, max_rows + 1) if last_end(sizes, rows) <= end)


def last_end(sizes: Iterable[int], rows: int) -> int:
    """Return when the last row ends, if each document goes to the first free row."""
    ends = [0] * rows
    for size in sizes:
        heapq.heapreplace(ends, ends[0] + size)
    return max(ends)


def one_pass(source: Source, lanes: int, length: int, block: int) -> Iterator[Batch[np.ndarray]]:
    """Yield batches like those of `famjax.data.lanes.Lanes`, until all documents are read."""
    readers = [Reader(source, lane, lanes) for lane in range(lanes)]
    while True:
        batch = stack_rows([_next_row(reader, length, block) for reader in readers])
        if not batch["valid"].any():
            return
        yield batch


def _next_row(reader: Reader, length: int, block: int) -> Batch[np.ndarray]:
    row = empty_row(length)
    with suppress(EndOfDocuments):
        fill_row(row, reader, block)
    return row


def reset_blocks(batch: Batch[np.ndarray], block: int) -> np.ndarray:
    """Return `batch["reset"]`, [b t], with an additional reset before every block of tokens."""
    reset = batch["reset"].copy()
    reset[:, ::block] |= batch["valid"][:, ::block]
    return reset
