"""Reassignment: no document is assigned twice, and remaining lanes continue."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from famjax.config.schema import Config
from famjax.data.lanes import document_start
from famjax.data.reassign import Assignment, ReassignedSource, resize_rows
from famjax.experiment.load import override
from famjax.pipeline import Batches, make_batches, make_source
from famjax.tokenizers.load import load_tokenizer

DOCUMENTS = 24  # divisible by 2, 3 and 4 lanes
LAYOUTS = ("lanes", "packed")


def test_unassigned_documents_keep_their_order() -> None:
    """For lanes that have read 3, 1 and 2 documents."""
    assignment = Assignment([3, 1, 2])
    left = [assignment[i] for i in range(9)]
    assert left == [(1, 1), (1, 2), (2, 2), (0, 3), (1, 3), (2, 3), (0, 4), (1, 4), (2, 4)]


class NamedDocuments:
    """Documents named by lane and number."""

    def key(self, lane: int, lanes: int, k: int, before: Any = None) -> list[int]:
        return [lanes, lane, k]

    def document_count(self) -> int | None:
        return None


def test_every_document_is_assigned_once() -> None:
    """Assigned to 3 lanes, then to 2, then to 4."""
    first, second = [3, 1, 2], [2, 4]
    source = ReassignedSource(NamedDocuments())  # type: ignore[arg-type]
    found = [[3, lane, k] for lane, n in enumerate(first) for k in range(n)]
    source.assigned_counts = [first]
    found += [source.key(lane, 2, k) for lane, n in enumerate(second) for k in range(n)]
    source.assigned_counts = [first, second]
    found += [source.key(lane, 4, k) for k in range(5) for lane in range(4)]
    assert len({tuple(f) for f in found}) == len(found)
    for lane in range(3):  # none is missing except the last
        numbers = sorted(k for _, of, k in found if of == lane)
        assert numbers == list(range(len(numbers)))


def batches(folder: Path, layout: str, rows: int) -> Batches:
    given = [f"data.batch={rows}", "data.length=16", f"data.layout={layout}", "data.holdout=0"]
    config = override(Config(), [*given, f"data.files={folder}"])
    tokenizer = load_tokenizer("bytes")
    return make_batches(config, make_source(config, tokenizer), tokenizer, 8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write documents of 10 to 60 letters, each with its own letter."""
    for i in range(DOCUMENTS):
        (tmp_path / f"{i:02d}.txt").write_text(chr(65 + i) * (10 + 17 * i % 50))
    return tmp_path


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("counts", [(4, 2), (2, 5), (4, 3, 6), (3, 3)])
def test_no_document_is_read_twice(folder: Path, layout: str, counts: tuple[int, ...]) -> None:
    state: Any = None
    started: Counter[str] = Counter()
    read_of: Counter[str] = Counter()
    for rows in counts:
        found = batches(folder, layout, rows)
        if state is not None:
            found.set_state(resize_rows(state, rows, make_source_of(folder)))
        for _ in range(2):  # within the first epoch
            batch = next(found)
            count(batch, started, read_of)
        state = found.get_state()
        found.release()
    assert len(started) > 4
    assert set(started.values()) == {1}
    for name, tokens in read_of.items():
        assert tokens <= 10 + 17 * (ord(name) - 65) % 50


def count(batch: dict[str, np.ndarray], started: Counter[str], read_of: Counter[str]) -> None:
    """Count a document's letters and its starts, where its letter follows bos."""
    for tokens, valid in zip(batch["tokens"], batch["valid"], strict=True):
        letters = [chr(t) if 65 <= t < 65 + DOCUMENTS else "" for t in tokens[valid]]
        bos = tokens[valid] == 256
        for i, letter in enumerate(letters):
            read_of[letter] += bool(letter)
            if letter and i and bos[i - 1]:
                started[letter] += 1
    del read_of[""]


def started_documents(found: Batches) -> list[str]:
    """Return the document that each lane starts in the next batch, in which all lanes start one."""
    return [chr(tokens[1]) for tokens in next(found)["tokens"]]


def resume(found: Batches, folder: Path, rows: int) -> Batches:
    """Return the batches of `rows` rows that continue those with another number."""
    state = found.get_state()
    found.release()
    now = batches(folder, "lanes", rows)
    now.set_state(json.loads(json.dumps(resize_rows(state, rows, make_source_of(folder)))))
    return now


def test_an_epoch_ends_before_each_lane_reads_all(tmp_path: Path) -> None:
    """Six documents of one row each; the number of lanes grows beyond that of documents."""
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text(chr(65 + i) * 14)
    everything = list("ABCDEF")
    found = batches(tmp_path, "lanes", 2)
    epoch = started_documents(found)
    found = resume(found, tmp_path, 8)
    first = started_documents(found)  # four lanes finish the epoch that two started
    assert sorted(epoch + first[:4]) == everything
    rows = list(zip(*(started_documents(found) for _ in range(6)), strict=True))
    assert all(sorted(row) == everything for row in rows[:4])

    found = resume(found, tmp_path, 9)  # remaining lanes keep their order
    later = list(zip(*(started_documents(found) for _ in range(5)), strict=True))
    assert all(len(set(row)) == 5 for row in later[:4])
    assert all(sorted((rows[i][-1], *later[i])) == everything for i in range(4, 8))
    found.release()


class SixDocuments(NamedDocuments):
    """Six documents, shared between lanes."""

    def document_count(self) -> int:
        return 6

    def epoch_size(self, lane: int, lanes: int) -> int:
        return len(range(lane, 6, lanes)) if lanes <= 6 else 6


@hypothesis.given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(7, 9),
)
def test_started_epochs_are_finished(times: list[list[int]], many: int) -> None:
    """Lanes share documents at different speeds, until there are more lanes than documents.

    Each of `times` is the number of documents that each lane starts before the next change.
    """
    source: Any = SixDocuments()
    reassigned, base = ReassignedSource(source), len(times[0])
    pairs = []
    for taken, after in itertools.zip_longest(times, times[1:]):
        lanes = len(taken)
        pairs += [
            reassigned.source_ref(lane, lanes, k) for lane, n in enumerate(taken) for k in range(n)
        ]
        state = {
            "batches": {"rows": [document_start(n) for n in taken]},
            **reassigned.get_assignments(),
        }
        reassigned.set_assignments(resize_rows(state, len(after) if after else many, source))
    assert reassigned.leftover is not None
    pairs += reassigned.leftover.documents
    assert len(set(pairs)) == len(pairs)
    for lane in range(base):
        numbers = sorted(k for of, among, k in pairs if (of, among) == (lane, base))
        assert numbers == list(range(len(numbers)))
        assert len(numbers) % source.epoch_size(lane, base) == 0


def test_leftover_documents_are_reassigned() -> None:
    """To other lanes, if none of them was started."""
    source: Any = SixDocuments()
    state = {"batches": {"rows": [document_start(1), document_start(1)]}}
    left = resize_rows(state, 8, source)["left"]["documents"]
    assert len(left) == 4
    once = resize_rows(resize_rows(state, 8, source), 9, source)
    assert once["left"]["documents"] == left
    few = resize_rows(once, 3, source)
    reassigned = ReassignedSource(source)
    reassigned.set_assignments(few)
    assert [reassigned.source_ref(n % 3, 3, n // 3) for n in range(5)] == [*left, (1, 3, 0)]


def make_source_of(folder: Path) -> Any:
    config = override(Config(), [f"data.files={folder}", "data.holdout=0"])
    return make_source(config, load_tokenizer("bytes"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [2, 6])
def test_remaining_rows_finish_their_document(folder: Path, layout: str, rows: int) -> None:
    old, new = batches(folder, layout, 4), batches(folder, layout, rows)
    next(old)
    state = old.get_state()
    new.set_state(resize_rows(state, rows, make_source_of(folder)))
    for batch, other in zip((next(old),), (next(new),), strict=True):
        for i in range(min(4, rows)):
            upto = np.append(np.flatnonzero(batch["tokens"][i] == 257), 15)[0]
            np.testing.assert_array_equal(batch["tokens"][i][:upto], other["tokens"][i][:upto])
        if layout == "lanes":
            assert other["reset"][4:, 0].all()
    old.release()
    new.release()


def test_fewer_documents_than_lanes_are_not_reassigned(folder: Path) -> None:
    """Each lane reads all of them in its own order and continues in it: nothing is reassigned."""
    old, new = batches(folder, "lanes", 30), batches(folder, "lanes", 31)
    for _ in range(4):
        next(old)
    state = resize_rows(old.get_state(), 31, make_source_of(folder))
    assert "dealt" not in state
    new.set_state(state)
    for _ in range(6):
        np.testing.assert_array_equal(next(old)["tokens"], next(new)["tokens"][:30])
    old.release()
    new.release()
