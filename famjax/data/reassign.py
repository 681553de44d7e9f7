"""Reassigns documents to lanes when `data.batch` changes on resume.

Lanes that remain keep their memory and finish their current document; new lanes start empty. All
documents not yet assigned are reassigned, in the order in which the previous lanes would have read
them. So no document is read twice in an epoch. The rest of a removed lane's current document is not
read.

With fewer documents than lanes, each lane reads all documents in its own order
(`famjax.data.sources`). If this is the case after a change but not before it, the epoch that the
lanes shared is finished first: its remaining documents are divided over the lanes, and each lane
reads its share before it starts its own order. If it was the case before the change, lanes that
remain continue their order, and new lanes start theirs.
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
DocumentRef = tuple[int, int, int]


class Assignment:
    """The documents not yet assigned, as one sequence.

    The k-th documents of all lanes precede the (k+1)-th documents.

    Args:
      counts: for each lane, the number of documents already assigned to it.
    """

    def __init__(self, counts: Sequence[int]):
        self.lanes, self._counts = len(counts), counts
        self._first, self._last = min(counts), max(counts)
        # round k has the lanes whose k-th document is not assigned yet
        sizes = (sum(n <= k for n in counts) for k in range(self._first, self._last))
        self._ends = [0, *accumulate(sizes)]

    def __getitem__(self, number: int) -> tuple[int, int]:
        """Return the lane and k of the document with this number in the sequence."""
        if number >= self._ends[-1]:  # from here on every round has a document of every lane
            more, lane = divmod(number - self._ends[-1], self.lanes)
            return lane, self._last + more
        step = bisect.bisect_right(self._ends, number) - 1
        k = self._first + step
        lanes = [lane for lane, n in enumerate(self._counts) if n <= k]
        return lanes[number - self._ends[step]], k


@dataclass(frozen=True)
class Leftover:
    """Documents that lanes read before the documents that the source assigns to them.

    Attributes:
      documents: the rest of an epoch. Lane i reads documents i, i + lanes, and so on.
      starts: for each lane, the number k of the source's document that it reads next.
    """

    documents: list[DocumentRef]
    starts: list[int]

    def count(self, lane: int) -> int:
        """Return how many of these documents a lane reads."""
        return len(range(lane, len(self.documents), len(self.starts)))

    def unread(self, taken: Sequence[int]) -> list[DocumentRef]:
        """Return the documents not yet assigned; `taken` is the number assigned to each lane."""
        lanes = len(self.starts)
        return [ref for n, ref in enumerate(self.documents) if n // lanes >= taken[n % lanes]]

    def source_ref(self, lane: int, lanes: int, k: int) -> DocumentRef:
        """Return the reference by which the source knows a lane's k-th document."""
        own = k - self.count(lane)
        if own < 0:
            return self.documents[lane + k * lanes]
        return lane, lanes, self.starts[lane] + own


class ReassignedSource(Source):
    """A source whose documents can be reassigned to another number of lanes.

    Attributes:
      leftover: documents that are read first, since the last switch between lanes that share the
        documents and lanes that each read all of them.
      assigned_counts: for each reassignment since that switch, the number of documents that had
        been assigned to each lane.
    """

    def __init__(self, source: Source):
        self._source = source
        self.leftover: Leftover | None = None
        self.assigned_counts = []

    @property
    def assigned_counts(self) -> list[list[int]]:
        return self._counts

    @assigned_counts.setter
    def assigned_counts(self, counts: list[list[int]]) -> None:
        self._counts, self._assignments = counts, [Assignment(c) for c in counts]

    def original_ref(
        self, lane: int, lanes: int, k: int, changes: int | None = None
    ) -> DocumentRef:
        """Return a document's reference before the first `changes` reassignments, or before all."""
        for assignment in reversed(self._assignments[:changes]):
            lane, k = assignment[lane + k * lanes]
            lanes = assignment.lanes
        return lane, lanes, k

    def source_ref(self, lane: int, lanes: int, k: int) -> DocumentRef:
        """Return the reference by which the source knows a lane's k-th document."""
        ref = self.original_ref(lane, lanes, k)
        return self.leftover.source_ref(*ref) if self.leftover else ref

    def key(self, lane: int, lanes: int, k: int, before: Key | None = None) -> Key:
        return self._source.key(*self.source_ref(lane, lanes, k), before)

    def open(self, key: Key, piece: int = 0) -> Iterator[Piece]:
        return self._source.open(key, piece)

    def get_state(self) -> dict[str, Any]:
        return self._source.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._source.set_state(state)

    def get_assignments(self) -> dict[str, Any]:
        """Return the JSON-serializable argument of `set_assignments`; {} without reassignments."""
        # existing checkpoints use the names "dealt" and "left"
        state: dict[str, Any] = {"dealt": self.assigned_counts} if self.assigned_counts else {}
        if self.leftover:
            state["left"] = {"documents": self.leftover.documents, "starts": self.leftover.starts}
        return state

    def set_assignments(self, state: dict[str, Any]) -> None:
        self.assigned_counts = state.get("dealt", [])
        saved = state.get("left")
        self.leftover = (
            Leftover([(a, b, c) for a, b, c in saved["documents"]], saved["starts"])
            if saved
            else None
        )


def resize_rows(state: dict[str, Any], count: int, source: Source) -> dict[str, Any]:
    """Return the state of `famjax.pipeline.Batches` from which `count` rows continue.

    Args:
      state: the state with all rows.
      count: new number of rows.
      source: source of the documents.
    """
    rows = state["batches"]["rows"]
    documents = source.document_count()
    taken = [reader["k"] + _has_begun(reader) for reader in map(_reader_state, rows)]
    reassigned = ReassignedSource(source)
    reassigned.set_assignments(state)
    if documents is None or documents >= max(count, len(rows)):
        reassigned.assigned_counts = [*reassigned.assigned_counts, taken]
        continued = [_restart_count(row) for row in rows]
    elif documents >= len(rows):
        leftover = Leftover(_epoch_remainder(reassigned, taken, source), [0] * count)
        reassigned.leftover, reassigned.assigned_counts = leftover, []
        continued = [_restart_count(row) for row in rows]
    else:
        old = reassigned.leftover or Leftover([], [0] * len(rows))
        starts = [old.starts[i] + max(0, n - old.count(i)) for i, n in enumerate(taken)]
        leftover = Leftover(old.unread(taken), [*starts, *[0] * (count - len(rows))][:count])
        reassigned.leftover = leftover if leftover.documents else None
        reassigned.assigned_counts = []
        continued = [
            _restart_count(row) if leftover.documents else _continue_at(row, start)
            for row, start in zip(rows, starts, strict=True)
        ]
    fresh = [_row_state(rows[0], document_start(0), made=0) for _ in range(len(rows), count)]
    rest = {name: value for name, value in state.items() if name not in ("dealt", "left")}
    return {
        **rest,
        "batches": {"rows": [*continued[:count], *fresh]},
        **reassigned.get_assignments(),
    }


def _epoch_remainder(
    reassigned: ReassignedSource, taken: Sequence[int], source: Any
) -> list[DocumentRef]:
    """Return the remaining documents of the current epoch of each of the source's lanes.

    Args:
      reassigned: the source of the lanes before the change.
      taken: number of documents assigned to each lane.
      source: an object whose `epoch_size(lane, lanes)` is the number of documents of a lane in one
        epoch.
    """
    lanes, early = len(taken), len(reassigned.leftover.documents) if reassigned.leftover else 0

    def locate(
        lane: int, lanes: int, k: int, changes: int | None = None
    ) -> tuple[DocumentRef, int, int]:
        """Return a document's reference, lane (-1 if leftover) and epoch in the source."""
        first = reassigned.original_ref(lane, lanes, k, changes)
        ref = reassigned.leftover.source_ref(*first) if reassigned.leftover else first
        if first[0] + first[1] * first[2] < early:
            return ref, -1, -1
        return ref, first[0], ref[2] // source.epoch_size(*ref[:2])

    last = {-1: -1}  # for each lane of the source, the latest epoch that it has started
    for changes, numbers in enumerate([*reassigned.assigned_counts, taken]):
        for number in range(_first_unassigned(numbers), _end_assigned(numbers)):
            k, lane = divmod(number, len(numbers))
            if k < numbers[lane]:
                _, source_lane, epoch = locate(lane, len(numbers), k, changes)
                last[source_lane] = max(epoch, last.get(source_lane, -1))

    rest: list[DocumentRef] = []
    seen: set[int] = set()
    ended: set[int] = set()
    source_lanes = reassigned.original_ref(0, lanes, 0)[1]
    # with rising numbers, each of the source's lanes reaches its documents in order
    for number in itertools.count(_first_unassigned(taken)):
        if len(ended) == source_lanes:
            break
        k, lane = divmod(number, lanes)
        ref, source_lane, epoch = locate(lane, lanes, k)
        if source_lane not in seen:
            seen.add(source_lane)
            is_first = ref[2] % source.epoch_size(*ref[:2]) == 0
            last[source_lane] = max(last.get(source_lane, -1), epoch - is_first)
        if epoch > last[source_lane]:
            ended.add(source_lane)
        elif k >= taken[lane]:
            rest.append(ref)
    return rest


def _first_unassigned(taken: Sequence[int]) -> int:
    """Return the lowest number, lane + k * lanes, of a document that is not assigned."""
    return min(lane + n * len(taken) for lane, n in enumerate(taken))


def _end_assigned(taken: Sequence[int]) -> int:
    """Return the highest number of an assigned document, plus 1."""
    return max(lane + (n - 1) * len(taken) for lane, n in enumerate(taken)) + 1


def _reader_state(row: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a row's reader; the state of a packed row has more fields."""
    reader: dict[str, Any] = row.get("reader", row)
    return reader


def _row_state(row: dict[str, Any], reader: dict[str, Any], **more: int) -> dict[str, Any]:
    return {**row, **more, "reader": reader} if "reader" in row else reader


def _has_begun(reader: dict[str, Any]) -> bool:
    return bool(reader["piece"] or reader["offset"])


def _restart_count(row: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a row that finishes its document and then counts documents from 0."""
    reader = _reader_state(row)
    has_begun = _has_begun(reader)
    return _row_state(
        row, {**reader, "k": -1} if has_begun else document_start(0, reader["before"])
    )


def _continue_at(row: dict[str, Any], k: int) -> dict[str, Any]:
    """Return the state of a row that finishes its document and continues with document k."""
    reader = _reader_state(row)
    return _row_state(row, {**reader, "k": k - _has_begun(reader)})
