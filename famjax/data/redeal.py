"""Another number of lanes: which document each reads next when `data.batch` changes on resume.

Lanes that stay keep their memory and read the document they are in to its end. Lanes that are new
begin empty. All documents not yet dealt out are dealt anew, in the order in which the lanes before
would have come to them. So none is dealt twice in an epoch; what an ended lane had not read of its
document is read by no one.

Where documents are fewer than lanes, before or after, each lane reads all of them in an order of
its own (`famjax.data.sources`). Then nothing is dealt: lanes that stay go on in their order, and
new ones begin theirs. An epoch that was shared until then is read by each lane from where it is in
its own order: documents that were read may come again in it, and none is left out.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from famjax.data.lanes import at_document
from famjax.data.sources import Key, Piece, Source


class Deal:
    """The documents that are left when lanes have been dealt so many each, in one row.

    The k-th documents of all lanes stand before the (k+1)-th ones.
    """

    def __init__(self, dealt: Sequence[int]):
        self.lanes, self._dealt = len(dealt), dealt
        self._first, self._last = min(dealt), max(dealt)
        # round k has the lanes that were not dealt their k-th document yet
        sizes = (sum(n <= k for n in dealt) for k in range(self._first, self._last))
        self._ends = [0, *accumulate(sizes)]

    def __getitem__(self, number: int) -> tuple[int, int]:
        """Return lane and k of the number-th document in the row."""
        if number >= self._ends[-1]:  # from here on every lane has one in each round
            more, lane = divmod(number - self._ends[-1], self.lanes)
            return lane, self._last + more
        turn = bisect.bisect_right(self._ends, number) - 1
        k = self._first + turn
        lanes = [lane for lane, n in enumerate(self._dealt) if n <= k]
        return lanes[number - self._ends[turn]], k


class Dealt:
    """A source whose documents may be dealt anew.

    Attributes:
      dealt: for each time that they were, how many documents each lane had been dealt.
    """

    def __init__(self, source: Source):
        self._source = source
        self.dealt = []

    @property
    def dealt(self) -> list[list[int]]:
        return self._dealt

    @dealt.setter
    def dealt(self, dealt: list[list[int]]) -> None:
        self._dealt, self._deals = dealt, [Deal(d) for d in dealt]

    def key(self, lane: int, lanes: int, k: int, before: Key | None = None) -> Key:
        for deal in reversed(self._deals):
            lane, k = deal[lane + k * lanes]
            lanes = deal.lanes
        return self._source.key(lane, lanes, k, before)

    def open(self, key: Key, piece: int = 0) -> Iterator[Piece]:
        return self._source.open(key, piece)

    def get_state(self) -> dict[str, Any]:
        return self._source.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._source.set_state(state)


def with_rows(state: dict[str, Any], count: int, source: Any) -> dict[str, Any]:
    """Return the state of `famjax.data.pipeline.Batches` with which so many rows go on.

    Args:
      state: of all rows.
      count: of rows.
      source: has as many documents as its length says; without one they are endless.
    """
    rows = state["batches"]["rows"]
    documents = len(source) if hasattr(source, "__len__") else None
    anew = documents is None or documents >= max(count, len(rows))
    kept = [_of(row, _stays(_reader(row), anew)) for row in rows[:count]]
    new = [_of(rows[0], at_document(0), made=0) for _ in range(len(rows), count)]
    dealt = [reader["k"] + _begun(reader) for reader in map(_reader, rows)]
    deals = [*state.get("dealt", []), dealt] if anew else []
    return {**state, "batches": {"rows": [*kept, *new]}, "dealt": deals}


def _reader(row: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the reader of a row; packed rows have more than that."""
    found: dict[str, Any] = row.get("reader", row)
    return found


def _of(row: dict[str, Any], reader: dict[str, Any], **more: int) -> dict[str, Any]:
    return {**row, **more, "reader": reader} if "reader" in row else reader


def _begun(reader: dict[str, Any]) -> bool:
    return bool(reader["piece"] or reader["offset"])


def _stays(reader: dict[str, Any], anew: bool) -> dict[str, Any]:
    """Return a reader's state whose next document is the first it is dealt, if they are anew."""
    if not anew:
        return reader
    return {**reader, "k": -1} if _begun(reader) else at_document(0, reader["before"])
