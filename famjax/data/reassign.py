"""Another number of lanes: which document each reads next when `data.batch` changes on resume.

Lanes that stay keep their memory and read the document they are in to its end. Lanes that are new
begin empty. All documents not yet dealt out are dealt anew, in the order in which the lanes before
would have come to them. So none is dealt twice in an epoch; what an ended lane had not read of its
document is read by no one.

Where documents are fewer than lanes, each lane reads all of them in an order of its own
(`famjax.data.sources`). If that is so after a change and was not before it, the epoch that the
lanes shared is finished first: the documents that are left of it are dealt, one to a lane, and each
lane reads them before its own order begins. If it was so before, lanes that stay continue their
order, and new ones begin theirs.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from famjax.data.lanes import document_start
from famjax.data.sources import Key, Piece, Source

# the arguments of `Source.key`: lane, lanes, k
Call = tuple[int, int, int]


class Assignment:
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


@dataclass(frozen=True)
class Leftover:
    """What lanes read before the documents that the source names for them.

    Attributes:
      documents: what is left of an epoch. Lane i reads the documents i, i + lanes, and so on.
      starts: for each lane, the number of the source's document that comes after them.
    """

    documents: list[Call]
    starts: list[int]

    def count(self, lane: int) -> int:
        """Return how many of the documents a lane reads."""
        return len(range(lane, len(self.documents), len(self.starts)))

    def unread(self, taken: Sequence[int]) -> list[Call]:
        """Return the documents that are left when lanes have been dealt so many each."""
        lanes = len(self.starts)
        return [call for n, call in enumerate(self.documents) if n // lanes >= taken[n % lanes]]

    def call(self, lane: int, lanes: int, k: int) -> Call:
        """Return what names the k-th document of a lane in the source."""
        own = k - self.count(lane)
        if own < 0:
            return self.documents[lane + k * lanes]
        return lane, lanes, self.starts[lane] + own


class ReassignedSource:
    """A source whose documents may be dealt anew.

    Attributes:
      left: what was read first since lanes last began to share documents, or each to read all.
      dealt: for each time that documents were dealt since, how many each lane had been dealt.
    """

    def __init__(self, source: Source):
        self._source = source
        self.left: Leftover | None = None
        self.dealt = []

    @property
    def dealt(self) -> list[list[int]]:
        return self._dealt

    @dealt.setter
    def dealt(self, dealt: list[list[int]]) -> None:
        self._dealt, self._deals = dealt, [Assignment(d) for d in dealt]

    def original_ref(self, lane: int, lanes: int, k: int, deals: int | None = None) -> Call:
        """Return what a document was called before the first of so many deals, or of all."""
        for deal in reversed(self._deals[:deals]):
            lane, k = deal[lane + k * lanes]
            lanes = deal.lanes
        return lane, lanes, k

    def call(self, lane: int, lanes: int, k: int) -> Call:
        """Return what names the k-th document of a lane in the source."""
        found = self.original_ref(lane, lanes, k)
        return self.left.call(*found) if self.left else found

    def key(self, lane: int, lanes: int, k: int, before: Key | None = None) -> Key:
        return self._source.key(*self.call(lane, lanes, k), before)

    def open(self, key: Key, piece: int = 0) -> Iterator[Piece]:
        return self._source.open(key, piece)

    def get_state(self) -> dict[str, Any]:
        return self._source.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._source.set_state(state)

    def get_assignments(self) -> dict[str, Any]:
        """Return what `set_assignments` takes, JSON-able; {} if nothing was ever dealt anew."""
        found: dict[str, Any] = {"dealt": self.dealt} if self.dealt else {}
        if self.left:
            found["left"] = {"documents": self.left.documents, "starts": self.left.starts}
        return found

    def set_assignments(self, state: dict[str, Any]) -> None:
        self.dealt = state.get("dealt", [])
        left = state.get("left")
        self.left = (
            Leftover([(a, b, c) for a, b, c in left["documents"]], left["starts"]) if left else None
        )


def with_rows(state: dict[str, Any], count: int, source: Any) -> dict[str, Any]:
    """Return the state of `famjax.data.pipeline.Batches` with which so many rows continue.

    Args:
      state: of all rows.
      count: of rows.
      source: has as many documents as its length says; without one they are endless.
    """
    rows = state["batches"]["rows"]
    documents = len(source) if hasattr(source, "__len__") else None
    taken = [reader["k"] + _has_begun(reader) for reader in map(_reader, rows)]
    dealt = ReassignedSource(source)
    dealt.set_assignments(state)
    if documents is None or documents >= max(count, len(rows)):
        dealt.dealt = [*dealt.dealt, taken]
        kept = [_anew(row) for row in rows]
    elif documents >= len(rows):
        dealt.left, dealt.dealt = Leftover(_rest(dealt, taken, source), [0] * count), []
        kept = [_anew(row) for row in rows]
    else:
        old = dealt.left or Leftover([], [0] * len(rows))
        starts = [old.starts[i] + max(0, n - old.count(i)) for i, n in enumerate(taken)]
        left = Leftover(old.unread(taken), [*starts, *[0] * (count - len(rows))][:count])
        dealt.left, dealt.dealt = left if left.documents else None, []
        kept = [
            _anew(row) if left.documents else _before(row, start)
            for row, start in zip(rows, starts, strict=True)
        ]
    fresh = [_of(rows[0], document_start(0), made=0) for _ in range(len(rows), count)]
    rest = {name: value for name, value in state.items() if name not in ("dealt", "left")}
    return {**rest, "batches": {"rows": [*kept[:count], *fresh]}, **dealt.get_assignments()}


def _rest(dealt: ReassignedSource, taken: Sequence[int], source: Any) -> list[Call]:
    """Return the documents that are left of the epoch that each of the source's lanes is in.

    Args:
      dealt: of the lanes before the change.
      taken: documents that each lane has been dealt.
      source: tells with `epoch_size(lane, lanes)` how many documents of a lane are an epoch.
    """
    lanes, early = len(taken), len(dealt.left.documents) if dealt.left else 0

    def named(lane: int, lanes: int, k: int, deals: int | None = None) -> tuple[Call, int, int]:
        """Return a document as the source knows it, its lane there or -1, and its epoch."""
        first = dealt.original_ref(lane, lanes, k, deals)
        call = dealt.left.call(*first) if dealt.left else first
        if first[0] + first[1] * first[2] < early:
            return call, -1, -1
        return call, first[0], call[2] // source.epoch_size(*call[:2])

    last = {-1: -1}  # epoch begun, by the source's lane
    for deals, numbers in enumerate([*dealt.dealt, taken]):
        for number in range(_first(numbers), _end(numbers)):
            k, lane = divmod(number, len(numbers))
            if k < numbers[lane]:
                _, of, epoch = named(lane, len(numbers), k, deals)
                last[of] = max(epoch, last.get(of, -1))

    rest: list[Call] = []
    seen: set[int] = set()
    ended: set[int] = set()
    among = dealt.original_ref(0, lanes, 0)[1]
    # by rising numbers, each of the source's lanes comes to its documents in their order
    for number in itertools.count(_first(taken)):
        if len(ended) == among:
            break
        k, lane = divmod(number, lanes)
        call, of, epoch = named(lane, lanes, k)
        if of not in seen:
            seen.add(of)
            is_first = call[2] % source.epoch_size(*call[:2]) == 0
            last[of] = max(last.get(of, -1), epoch - is_first)
        if epoch > last[of]:
            ended.add(of)
        elif k >= taken[lane]:
            rest.append(call)
    return rest


def _first(taken: Sequence[int]) -> int:
    """Return the lowest number, lane + k * lanes, of a document that was not dealt."""
    return min(lane + n * len(taken) for lane, n in enumerate(taken))


def _end(taken: Sequence[int]) -> int:
    """Return the number after the highest one that was dealt."""
    return max(lane + (n - 1) * len(taken) for lane, n in enumerate(taken)) + 1


def _reader(row: dict[str, Any]) -> dict[str, Any]:
    """Return the state of the reader of a row; packed rows have more than that."""
    found: dict[str, Any] = row.get("reader", row)
    return found


def _of(row: dict[str, Any], reader: dict[str, Any], **more: int) -> dict[str, Any]:
    return {**row, **more, "reader": reader} if "reader" in row else reader


def _has_begun(reader: dict[str, Any]) -> bool:
    return bool(reader["piece"] or reader["offset"])


def _anew(row: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a row that ends its document, and whose next one is its first."""
    reader = _reader(row)
    begun = _has_begun(reader)
    return _of(row, {**reader, "k": -1} if begun else document_start(0, reader["before"]))


def _before(row: dict[str, Any], k: int) -> dict[str, Any]:
    """Return the state of a row that ends its document, and whose next one is the k-th."""
    reader = _reader(row)
    return _of(row, {**reader, "k": k - _has_begun(reader)})
