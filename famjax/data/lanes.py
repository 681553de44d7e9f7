"""Lanes: each row of the batch follows one document front to back, over successive batches.

What TransformerFAM 3.1.1 wanted and had no data for: "the same very long document should be used
continuously in each minibatch component, while maintaining FAM and memory segments between
training steps".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import grain
import numpy as np

from famjax.core.errors import UserError
from famjax.data.sources import Key, Piece, Source

Batch = dict[str, np.ndarray]


class Span(NamedTuple):
    """Consecutive tokens of one document, each with its target: the token behind it, mostly.

    Attributes:
      tokens: [n] int32.
      targets: [n] int32, the next token of the document; behind its last, that token again. Or
        what the document's own targets are.
      weights: [n] float32, of predicting the target; 0 at the document's last token.
      first: whether the span begins the document.
      last: whether it ends it.
      passing: whether it begins with the memory that the lane's last document left.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    first: bool
    last: bool
    passing: bool = False


class Reader:
    """Reads a lane's documents, one after the other, in spans of any length.

    The state names the token to be read next. The key of the current document is part of it, since
    a source may name its next documents by what has happened meanwhile (a curriculum).
    """

    def __init__(self, source: Source, lane: int, lanes: int):
        self._source, self._lane, self._lanes = source, lane, lanes
        self.set_state(document_start(0))

    @property
    def documents(self) -> int:
        """How many documents have been read to their end."""
        return self._k

    def get_state(self) -> dict[str, Any]:
        return {
            "k": self._k,
            "key": self._key,
            "piece": self._piece,
            "offset": self._offset,
            "before": self._before,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._k: int = state["k"]
        self._key: Key | None = state["key"]
        self._piece: int = state["piece"]
        self._offset: int = state["offset"]
        self._before: Key | None = state.get("before")
        self._forget()

    def _forget(self) -> None:
        self._stream: Iterator[Piece] | None = None
        self._pieces: deque[Piece] = deque()
        self._loaded = 0

    def take(self, count: int) -> Span:
        """Return the next `count` tokens of the current document, or all that are left of it."""
        self._load(self._offset + count + 1)
        first = self.at_start()
        passing = first and self.passing()
        window = slice(self._offset, self._offset + count + 1)
        tokens, targets, weights = (part[window] for part in _join_pieces(self._pieces))
        last = len(tokens) <= count
        if last:
            self._next_document()
        else:
            self._advance(count)
        kept = slice(None, count)
        return Span(tokens[kept], targets[kept], weights[kept], first, last, passing)

    def at_start(self) -> bool:
        """Tell whether the next token is a document's first."""
        return self._piece == 0 and self._offset == 0

    def passing(self) -> bool:
        """Tell whether the current document begins with the memory of the one before it."""
        self._load(1)
        return self._piece == 0 and self._pieces[0].passing

    def fits(self, count: int) -> bool:
        """Tell whether all that is left of the document takes at most `count` positions."""
        self._load(self._offset + count + 2)
        # the last token takes none
        return self._loaded - self._offset - 1 <= count

    def _load(self, count: int) -> None:
        """Load `count` tokens from the current piece's start on, or all that are left."""
        if self._key is None:
            self._key = self._source.key(self._lane, self._lanes, self._k, self._before)
        if self._stream is None:
            self._stream = self._source.open(self._key, self._piece)
        try:
            while self._loaded < count and (piece := next(self._stream, None)) is not None:
                self._pieces.append(piece)
                self._loaded += len(piece.tokens)
        except BaseException:
            # A generator that failed looks like one that ended: the next call must fail again.
            self._forget()
            raise

    def _advance(self, count: int) -> None:
        self._offset += count
        while self._offset >= (size := len(self._pieces[0].tokens)):
            self._pieces.popleft()
            self._piece += 1
            self._offset -= size
            self._loaded -= size

    def _next_document(self) -> None:
        self.set_state(document_start(self._k + 1, self._key))


def document_start(k: int, before: Key | None = None) -> dict[str, Any]:
    """Return a reader's state in front of its k-th document."""
    return {"k": k, "key": None, "piece": 0, "offset": 0, "before": before}


class RoundRobin:
    """Reads the documents of several readers, whole and in turn: the one that has read the fewest
    is next. What begins with the memory of the document before it comes behind that one.
    """

    def __init__(self, readers: Sequence[Reader]):
        self._readers, self._now = readers, 0

    def get_state(self) -> dict[str, Any]:
        return {"now": self._now, "readers": [reader.get_state() for reader in self._readers]}

    def set_state(self, state: dict[str, Any]) -> None:
        self._now = state["now"]
        for reader, saved in zip(self._readers, state["readers"], strict=True):
            reader.set_state(saved)

    def take(self, count: int) -> Span:
        reader = self._readers[self._now]
        span = reader.take(count)
        if span.last and not reader.passing():
            read = [reader.documents for reader in self._readers]
            self._now = read.index(min(read))
        return span

    def at_start(self) -> bool:
        return self._readers[self._now].at_start()

    def passing(self) -> bool:
        return self._readers[self._now].passing()

    def fits(self, count: int) -> bool:
        return self._readers[self._now].fits(count)


def _join_pieces(pieces: Iterable[Piece]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, targets and weights of consecutive pieces, [n] each.

    What stands behind the last token is not known here: as next token it is that token again, with
    weight 0.
    """
    tokens = np.concatenate([piece.tokens for piece in pieces])
    weights = np.concatenate([piece.weights for piece in pieces])
    own = [piece.targets for piece in pieces if piece.targets is not None]
    if own:
        return tokens, np.concatenate(own), weights
    return tokens, np.append(tokens[1:], tokens[-1]), np.append(weights[1:], np.float32(0))


class Row(Protocol):
    """One row of all batches."""

    def next_row(self) -> Batch: ...
    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: dict[str, Any]) -> None: ...


class RowsIterator(grain.DatasetIterator[Batch]):
    """Iterator over batches each of whose rows is made by itself; its state is that of the rows.

    Args:
      row: makes the row of a number.
      count: rows of the whole batch.
      held: numbers of those that are made here, in order; None is all. Of the others the state has
        None, and is given what it may be.
    """

    def __init__(self, row: Callable[[int], Row], count: int, held: Sequence[int] | None = None):
        super().__init__()
        self._count = count
        self._rows = {i: row(i) for i in (range(count) if held is None else held)}

    def __next__(self) -> Batch:
        rows = [row.next_row() for row in self._rows.values()]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def get_state(self) -> dict[str, Any]:
        rows = (self._rows.get(i) for i in range(self._count))
        return {"rows": [None if row is None else row.get_state() for row in rows]}

    def set_state(self, state: dict[str, Any]) -> None:
        if len(state["rows"]) != self._count:
            raise UserError(
                f"data.batch={self._count}: the saved run has {len(state['rows'])} rows; "
                "resume with as many"
            )
        for i, row in self._rows.items():
            row.set_state(state["rows"][i])


class _Lane:
    def __init__(self, reader: Reader | RoundRobin, length: int, block_len: int, keep_whole: bool):
        self._reader = reader
        self._length = length
        self._block_len = block_len
        self._keep_whole = keep_whole

    def get_state(self) -> dict[str, Any]:
        return self._reader.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._reader.set_state(state)

    def next_row(self) -> Batch:
        """Return the next `length` positions of the lane, [t] each."""
        row = empty_row(self._length)
        at = 0
        while at < self._length and not self._waits(self._length - at):
            span = self._reader.take(self._length - at)
            # behind the last token nothing is predicted, so it takes no position
            count = len(span.tokens) - span.last
            write(row, at, span, count)
            at += count
            if span.last:
                at += -at % self._block_len
        return row

    def _waits(self, left: int) -> bool:
        """Tell whether the next document shall wait for the next row."""
        reader = self._reader
        if not self._keep_whole or left == self._length or not reader.at_start():
            return False
        # what begins with a memory has its beginning in an earlier document anyway
        return not reader.passing() and not reader.fits(left) and reader.fits(self._length)


class Lanes(grain.IterDataset[Batch]):
    """Batches whose row i follows the documents of lane i.

    A document begins on a block boundary; the tail of its last block is padding, and the next
    document begins in the block behind it. A batch has, [b t] each: tokens and targets (int32),
    weights (float32, of the targets), valid (bool, False at padding), reset (bool, True at the
    first token of a document), passing (bool, True where that document begins with the memory that
    the last one left).

    Args:
      source: of the documents.
      batch: b.
      length: t, a multiple of `block_len`.
      block_len: w.
      keep_whole: a document that fits a row is not cut in two: it waits for the next row, so that
        the gradient reaches from its end to its beginning; unless it begins with a memory.
      streams: documents are dealt out to so many times the lanes, and each lane reads those of so
        many neighbours in turn (`halve_batch`).
      held: see `RowsIterator`.
    """

    def __init__(
        self,
        source: Source,
        batch: int,
        length: int,
        block_len: int,
        keep_whole: bool = False,
        streams: int = 1,
        held: Sequence[int] | None = None,
    ):
        super().__init__()
        if length % block_len:
            raise ValueError(f"length {length} is not a multiple of block_len {block_len}")
        self._source, self._batch = source, batch
        self._length, self._block_len = length, block_len
        self._keep_whole, self._streams, self._held = keep_whole, streams, held

    def __iter__(self) -> RowsIterator:
        return RowsIterator(self._lane, self._batch, self._held)

    def _lane(self, lane: int) -> _Lane:
        return _Lane(self._reader(lane), self._length, self._block_len, self._keep_whole)

    def _reader(self, lane: int) -> Reader | RoundRobin:
        count = self._streams
        readers = [
            Reader(self._source, lane * count + i, self._batch * count) for i in range(count)
        ]
        return readers[0] if count == 1 else RoundRobin(readers)


def join_rows_state(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of all rows from those of iterators that hold some each."""
    of_row = zip(*(part["rows"] for part in parts), strict=True)
    return {"rows": [next(row for row in given if row is not None) for given in of_row]}


def halve_batch(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of half as many lanes, of twice the streams, that go on from that of all.

    Lane i goes on where lane 2 i stood. Lane 2 i + 1 ends: the rest of a document that it has begun
    is read by no one, those that were to follow are read by lane i, in turn with its own. So no
    document is dealt out twice. Of one long document the lanes have parts of their own, which grow
    to where the ended lanes stood: the lanes that are left are as far apart as before.
    """
    rows = state["rows"]
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return {"rows": [_continued(kept, ended) for kept, ended in pairs]}


def _continued(kept: dict[str, Any], ended: dict[str, Any]) -> dict[str, Any]:
    readers = [*_readers(kept), *map(_at_next_document, _readers(ended))]
    return {"now": kept.get("now", 0), "readers": readers}


def _readers(lane: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = lane.get("readers", [lane])
    return found


def _at_next_document(reader: dict[str, Any]) -> dict[str, Any]:
    """Return a reader's state in front of its next document, which no memory waits for."""
    begun = reader["piece"] > 0 or reader["offset"] > 0
    return document_start(reader["k"] + begun)


def empty_row(length: int) -> Batch:
    """Return a row of padding, [length] each."""
    return {
        "tokens": np.zeros(length, np.int32),
        "targets": np.zeros(length, np.int32),
        "weights": np.zeros(length, np.float32),
        "valid": np.zeros(length, bool),
        "reset": np.zeros(length, bool),
        "passing": np.zeros(length, bool),
    }


def write(row: Batch, at: int, span: Span, count: int) -> None:
    """Write the first `count` tokens of `span` into a row, from position `at` on."""
    window = slice(at, at + count)
    row["tokens"][window] = span.tokens[:count]
    row["targets"][window] = span.targets[:count]
    row["weights"][window] = span.weights[:count]
    row["valid"][window] = True
    row["reset"][at : at + bool(count)] = span.first
    row["passing"][at : at + bool(count)] = span.passing
