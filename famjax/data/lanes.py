"""Lanes: contiguous batching, where each row of the batch is a stateful stream of documents.

Row i of every batch continues where row i of the previous batch stopped, so a document is read
front to back over successive batches. TransformerFAM 3.1.1 wanted this and lacked the data: "the
same very long document should be used continuously in each minibatch component, while maintaining
FAM and memory segments between training steps".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

import grain
import numpy as np

from famjax.core.errors import UserError
from famjax.core.types import Batch
from famjax.data.sources import Key, Piece, Source


class Span(NamedTuple):
    """Consecutive tokens of one document with their targets.

    Attributes:
      tokens: [t] int32.
      targets: [t] int32, the document's own targets if it has any, else the next token; the last
        token of a document is its own target.
      weights: [t] float32, loss weights of the targets; 0 at the document's last token.
      first: whether the span begins the document.
      last: whether the span ends the document.
      pass_state: whether the span begins with the memory of the lane's previous document.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    first: bool
    last: bool
    pass_state: bool = False


class Reader:
    """Reads a lane's documents sequentially, in spans of any length.

    The reader's state identifies the next token. It includes the key of the current document, since
    a source's keys may depend on the course of training (a curriculum).
    """

    def __init__(self, source: Source, lane: int, lanes: int):
        self._source, self._lane, self._lanes = source, lane, lanes
        self.set_state(document_start(0))

    @property
    def documents(self) -> int:
        """Number of documents that have been read to their end."""
        return self._k

    def get_state(self) -> dict[str, Any]:
        return {
            "k": self._k,
            "key": self._key,
            "piece": self._piece,
            "offset": self._offset,
            "before": self._previous_key,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._k: int = state["k"]
        self._key: Key | None = state["key"]
        self._piece: int = state["piece"]
        self._offset: int = state["offset"]
        self._previous_key: Key | None = state.get("before")
        self._close_stream()

    def _close_stream(self) -> None:
        self._stream: Iterator[Piece] | None = None
        self._pieces: deque[Piece] = deque()
        self._loaded = 0

    def take(self, count: int) -> Span:
        """Return the next `count` tokens of the current document, or all that are left."""
        self._load(self._offset + count + 1)
        first = self.at_start()
        pass_state = first and self.passes_state()
        window = slice(self._offset, self._offset + count + 1)
        tokens, targets, weights = (part[window] for part in _join_pieces(self._pieces))
        last = len(tokens) <= count
        if last:
            self._next_document()
        else:
            self._advance(count)
        span = slice(None, count)
        return Span(tokens[span], targets[span], weights[span], first, last, pass_state)

    def at_start(self) -> bool:
        """Return whether the next token is a document's first."""
        return self._piece == 0 and self._offset == 0

    def passes_state(self) -> bool:
        """Return whether the current document begins with the memory of the previous one."""
        self._load(1)
        return self._piece == 0 and self._pieces[0].pass_state

    def fits(self, count: int) -> bool:
        """Return whether the rest of the document takes at most `count` positions."""
        self._load(self._offset + count + 2)
        # the last token takes no position
        return self._loaded - self._offset - 1 <= count

    def _load(self, count: int) -> None:
        """Load `count` tokens from the start of the current piece, or all that are left."""
        if self._key is None:
            self._key = self._source.key(self._lane, self._lanes, self._k, self._previous_key)
        if self._stream is None:
            self._stream = self._source.open(self._key, self._piece)
        try:
            while self._loaded < count and (piece := next(self._stream, None)) is not None:
                self._pieces.append(piece)
                self._loaded += len(piece.tokens)
        except BaseException:
            # A failed generator looks like an exhausted one: the next call must fail again.
            self._close_stream()
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
    """Return a reader's state before its k-th document."""
    return {"k": k, "key": None, "piece": 0, "offset": 0, "before": before}


class RoundRobin:
    """Reads whole documents from several readers, always from the one that has read the fewest.

    A document that begins with the memory of the previous one is read directly after it.
    """

    def __init__(self, readers: Sequence[Reader]):
        self._readers, self._current = readers, 0

    def get_state(self) -> dict[str, Any]:
        return {"now": self._current, "readers": [reader.get_state() for reader in self._readers]}

    def set_state(self, state: dict[str, Any]) -> None:
        self._current = state["now"]
        for reader, saved in zip(self._readers, state["readers"], strict=True):
            reader.set_state(saved)

    def take(self, count: int) -> Span:
        reader = self._readers[self._current]
        span = reader.take(count)
        if span.last and not reader.passes_state():
            read = [reader.documents for reader in self._readers]
            self._current = read.index(min(read))
        return span

    def at_start(self) -> bool:
        return self._readers[self._current].at_start()

    def passes_state(self) -> bool:
        return self._readers[self._current].passes_state()

    def fits(self, count: int) -> bool:
        return self._readers[self._current].fits(count)


def _join_pieces(pieces: Iterable[Piece]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return tokens, targets and weights of consecutive pieces, [t] each.

    The token after the last one is not known here, so the last target is the last token itself,
    with weight 0.
    """
    tokens = np.concatenate([piece.tokens for piece in pieces])
    weights = np.concatenate([piece.weights for piece in pieces])
    targets = [piece.targets for piece in pieces if piece.targets is not None]
    if targets:
        return tokens, np.concatenate(targets), weights
    return tokens, np.append(tokens[1:], tokens[-1]), np.append(weights[1:], np.float32(0))


class RowMaker(Protocol):
    """Generates one row of every batch."""

    def next_row(self) -> Batch[np.ndarray]: ...
    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: dict[str, Any]) -> None: ...


class RowsIterator(grain.DatasetIterator[Batch[np.ndarray]]):
    """Iterator over batches whose rows are independent; its state consists of the rows' states.

    Args:
      row: function from a row's index to its `RowMaker`.
      count: number of rows in the global batch.
      local_rows: indices of this process's rows, in order; None means all rows. The states of other
        rows are None in `get_state`, and ignored in `set_state`.
    """

    def __init__(
        self, row: Callable[[int], RowMaker], count: int, local_rows: Sequence[int] | None = None
    ):
        super().__init__()
        self._count = count
        self._rows = {i: row(i) for i in (range(count) if local_rows is None else local_rows)}

    def __next__(self) -> Batch[np.ndarray]:
        try:
            rows = [row.next_row() for row in self._rows.values()]
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            # a panic in Rust, for example of a tokenizer; grain's thread catches only `Exception`,
            # and training would wait for ever
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        return stack_rows(rows)

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

    def next_row(self) -> Batch[np.ndarray]:
        """Return the next `length` positions of the lane, as arrays [t]."""
        row = empty_row(self._length)
        fill_row(row, self._reader, self._block_len, self._should_wait)
        return row

    def _should_wait(self, room: int) -> bool:
        """Return whether the next document must wait for the next row."""
        reader = self._reader
        if not self._keep_whole or room == self._length or not reader.at_start():
            return False
        # a document that begins with a memory continues an earlier document
        return not reader.passes_state() and not reader.fits(room) and reader.fits(self._length)


class Lanes(grain.IterDataset[Batch[np.ndarray]]):
    """Batches whose row i continues the documents of lane i.

    A document begins on a block boundary; the rest of its last block is padding, and the next
    document begins in the next block.

    Args:
      source: source of the documents.
      batch: b, number of rows.
      length: t, tokens in a row; a multiple of `block_len`.
      block_len: w, tokens in a block.
      keep_whole: do not split a document that fits in a row: it waits for the next row, so that the
        gradient reaches from its end to its beginning. Documents that begin with a memory do not
        wait.
      streams: number of streams per lane. Documents are divided over all streams, and each lane
        reads its adjacent streams round robin (`halve_batch`).
      local_rows: see `RowsIterator`.
    """

    def __init__(
        self,
        source: Source,
        batch: int,
        length: int,
        block_len: int,
        keep_whole: bool = False,
        streams: int = 1,
        local_rows: Sequence[int] | None = None,
    ):
        super().__init__()
        if length % block_len:
            raise ValueError(f"length {length} is not a multiple of block_len {block_len}")
        self._source, self._batch = source, batch
        self._length, self._block_len = length, block_len
        self._keep_whole, self._streams, self._local_rows = keep_whole, streams, local_rows

    def __iter__(self) -> RowsIterator:
        return RowsIterator(self._lane, self._batch, self._local_rows)

    def _lane(self, lane: int) -> _Lane:
        return _Lane(self._reader(lane), self._length, self._block_len, self._keep_whole)

    def _reader(self, lane: int) -> Reader | RoundRobin:
        count = self._streams
        readers = [
            Reader(self._source, lane * count + i, self._batch * count) for i in range(count)
        ]
        return readers[0] if count == 1 else RoundRobin(readers)


def join_rows_state(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of all rows from the states of iterators over some of the rows each."""
    columns = zip(*(part["rows"] for part in parts), strict=True)
    return {"rows": [next(row for row in column if row is not None) for column in columns]}


def halve_batch(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state from which half as many lanes, each with twice the streams, continue.

    New lane i continues old lane 2 i. Old lane 2 i + 1 ends: the rest of its current document is
    not read, and new lane i reads the documents that would have followed, round robin with its own.
    So no document is read twice. Lanes that share one long document each read their own part of it.
    A lane's part now extends over that of the ended lane, and the remaining lanes are as far apart
    as before.
    """
    rows = state["rows"]
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return {"rows": [_merge_lane_states(lane, ended) for lane, ended in pairs]}


def _merge_lane_states(lane: dict[str, Any], ended: dict[str, Any]) -> dict[str, Any]:
    readers = [*_readers(lane), *map(_skip_document, _readers(ended))]
    return {"now": lane.get("now", 0), "readers": readers}


def _readers(lane: dict[str, Any]) -> list[dict[str, Any]]:
    readers: list[dict[str, Any]] = lane.get("readers", [lane])
    return readers


def _skip_document(reader: dict[str, Any]) -> dict[str, Any]:
    """Return a reader's state before its next document, which then begins without a memory."""
    has_begun = reader["piece"] > 0 or reader["offset"] > 0
    return document_start(reader["k"] + has_begun)


def empty_row(length: int) -> Batch[np.ndarray]:
    """Return a row of padding, as arrays [length]."""
    return {
        "tokens": np.zeros(length, np.int32),
        "targets": np.zeros(length, np.int32),
        "weights": np.zeros(length, np.float32),
        "valid": np.zeros(length, bool),
        "reset": np.zeros(length, bool),
        "pass_state": np.zeros(length, bool),
    }


def fill_row(
    row: Batch[np.ndarray],
    reader: Reader | RoundRobin,
    block_len: int,
    should_wait: Callable[[int], bool] = lambda room: False,
) -> None:
    """Write the next tokens of a reader into a row of padding; documents begin on block boundaries.

    Args:
      row: arrays [t].
      reader: reads the documents.
      block_len: w, tokens in a block.
      should_wait: function from the number of positions left to whether they stay padding.
    """
    length = len(row["tokens"])
    at = 0
    while at < length and not should_wait(length - at):
        span = reader.take(length - at)
        # nothing is predicted after the last token, so it takes no position
        count = len(span.tokens) - span.last
        write_span(row, at, span, count)
        at += count
        if span.last:
            at += -at % block_len


def stack_rows(rows: Sequence[Batch[np.ndarray]]) -> Batch[np.ndarray]:
    """Stack rows [t] to a batch [b t]."""
    columns: Sequence[dict[str, np.ndarray]] = cast(Any, rows)
    return cast(Any, {name: np.stack([row[name] for row in columns]) for name in columns[0]})


def write_span(row: Batch[np.ndarray], at: int, span: Span, count: int) -> None:
    """Write the first `count` tokens of `span` into a row, from position `at` on."""
    window = slice(at, at + count)
    row["tokens"][window] = span.tokens[:count]
    row["targets"][window] = span.targets[:count]
    row["weights"][window] = span.weights[:count]
    row["valid"][window] = True
    row["reset"][at : at + bool(count)] = span.first
    row["pass_state"][at : at + bool(count)] = span.pass_state
