"""Lanes lose no token, start documents on block boundaries, and resume exactly."""

import json
from collections import deque
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from famjax.config.schema import Config, DataConfig
from famjax.core.errors import UserError
from famjax.data.lanes import Lanes, halve_batch
from famjax.data.sources import Piece
from famjax.pipeline import make_batches, make_source
from famjax.tokenizers.load import load_tokenizer

BOS, EOS = 256, 257
BLOCK = 4


class Documents:
    """Random documents named by (lane, k, level), in pieces of random sizes.

    `level` changes like that of a curriculum: later documents are longer.
    """

    def __init__(self):
        self.level = 0

    def key(self, lane, lanes, k, before):
        assert before is None or before[:2] == [lane, k - 1]
        return [lane, k, self.level]

    def document(self, key):
        rng = np.random.default_rng([1, *key])
        tokens = rng.integers(0, 256, rng.integers(0, 30 + 50 * key[2]), np.int32)
        return np.concatenate([[BOS], tokens, [EOS]]).astype(np.int32)

    def open(self, key, piece=0):
        tokens = self.document(key)
        rng = np.random.default_rng([2, *key])
        cuts = np.sort(rng.integers(0, len(tokens) + 1, rng.integers(0, 5)))
        for part in np.split(tokens, cuts)[piece:]:
            yield Piece(part, (part % 3).astype(np.float32), pass_state=key[1] % 3 == 2)

    def get_state(self):
        return {"level": self.level}

    def set_state(self, state):
        self.level = state["level"]


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@given(batch=st.integers(1, 3), blocks=st.integers(1, 12))
@settings(max_examples=20)
def test_no_token_is_lost_and_documents_start_on_blocks(batch, blocks):
    source = Documents()
    iterator = iter(Lanes(source, batch, blocks * BLOCK, BLOCK))
    batches = [next(iterator) for _ in range(12)]
    joined = {name: np.concatenate([b[name] for b in batches], axis=1) for name in batches[0]}
    for lane in range(batch):
        row = {name: values[lane] for name, values in joined.items()}
        begins = np.flatnonzero(row["reset"])
        assert begins[0] == 0
        assert not (begins % BLOCK).any()
        for k, (begin, end) in enumerate(zip(begins, [*begins[1:], None], strict=True)):
            document = source.document([lane, k, 0])
            valid = row["valid"][begin:end]
            count = int(valid.sum())
            assert valid[:count].all()
            if end is not None:
                assert count == len(document) - 1
                assert end - begin == -(-count // BLOCK) * BLOCK
            got = {name: values[begin : begin + count] for name, values in row.items()}
            np.testing.assert_array_equal(got["tokens"], document[:count])
            np.testing.assert_array_equal(got["targets"], document[1 : count + 1])
            np.testing.assert_array_equal(got["weights"], document[1 : count + 1] % 3)
        assert not row["weights"][~row["valid"]].any()
        passing = np.arange(len(begins)) % 3 == 2
        np.testing.assert_array_equal(np.flatnonzero(row["pass_state"]), begins[passing])


def test_batches_have_documented_types_and_shapes():
    batch = next(iter(Lanes(Documents(), 3, 2 * BLOCK, BLOCK)))
    assert {name: values.dtype for name, values in batch.items()} == {
        "tokens": np.int32,
        "targets": np.int32,
        "weights": np.float32,
        "valid": bool,
        "reset": bool,
        "pass_state": bool,
    }
    assert all(values.shape == (3, 2 * BLOCK) for values in batch.values())


@given(stop=st.integers(0, 15), level_at=st.integers(0, 15), blocks=st.integers(1, 5))
@settings(max_examples=30)
def test_an_interrupted_iterator_resumes_exactly(stop, level_at, blocks):
    source = Documents()
    iterator = iter(Lanes(source, 2, blocks * BLOCK, BLOCK))
    saved, expected = None, []
    for step in range(20):
        if step == level_at:
            source.level = 1
        if step == stop:
            saved = json.dumps([iterator.get_state(), source.get_state()])
        expected.append(next(iterator))
    state, source_state = json.loads(saved)
    resumed_source = Documents()
    resumed = iter(Lanes(resumed_source, 2, blocks * BLOCK, BLOCK))
    resumed.set_state(state)
    resumed_source.set_state(source_state)
    for step in range(stop, 20):
        if step == level_at:
            resumed_source.level = 1
        assert_equal(next(resumed), expected[step])


def config(files, **data):
    return Config(data=DataConfig(files=str(files), batch=3, length=16, **data))


@pytest.mark.parametrize("layout", ["lanes", "packed"])
@pytest.mark.parametrize("stop", [0, 1, 7])
def test_prefetching_does_not_change_the_state(tmp_path, layout, stop):
    for i in range(7):
        (tmp_path / f"{i}.txt").write_text(f"{i}" * (11 * i + 1))
    tokenizer = load_tokenizer("bytes")
    settings = config(tmp_path, layout=layout, holdout=0)
    batches = make_batches(settings, make_source(settings, tokenizer), tokenizer, 8)
    for _ in range(stop):
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    expected = [next(batches) for _ in range(10)]
    # a run has its own copy of the tokenizer; the original may be deleted
    settings = replace(settings, data=replace(settings.data, tokenizer="gone"))
    again = make_batches(settings, make_source(settings, tokenizer), tokenizer, 8)
    next(again)
    again.set_state(state)
    for batch in expected:
        assert_equal(next(again), batch)
    for iterator in (batches, again):
        iterator.close()


def test_an_error_in_the_thread_is_raised_by_every_next(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"word " * 20_001)
    settings = config(tmp_path, holdout=0)
    tokenizer = load_tokenizer("bytes")
    source = make_source(settings, tokenizer)
    (tmp_path / "a.txt").write_bytes(b"word " * 20_000 + b"\xffword")
    batches = make_batches(settings, source, tokenizer, 8)
    for _ in range(2):
        with pytest.raises(UserError, match="not UTF-8 at byte 100000"):
            deque(islice(batches, 10_000), maxlen=0)
    batches.close()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_a_panic_is_an_exception(interrupt):
    """Grain's thread would die of any other `BaseException`, and training wait for ever."""

    class PanicException(BaseException):
        pass

    class Panics(Documents):
        def open(self, key, piece=0):
            raise self.error

    source = Panics()
    rows = iter(Lanes(source, 2, 8, BLOCK))
    source.error = PanicException("index out of bounds")
    with pytest.raises(RuntimeError, match="PanicException: index out of bounds"):
        next(rows)
    source.error = interrupt()
    with pytest.raises(interrupt):
        next(rows)


def test_invalid_configs_are_rejected(tmp_path):
    (tmp_path / "a.txt").write_text("some text to read")
    tokenizer = load_tokenizer("bytes")
    source = make_source(config(tmp_path), tokenizer)
    for data, message in [
        (DataConfig(batch=0), "data.batch=0: must be positive"),
        (DataConfig(length=-8), "data.length=-8: must be positive"),
        (DataConfig(length=20), "data.length=20: must be a multiple of .* 8"),
        (DataConfig(repeat_len=4), "data.layout=packed"),
        (DataConfig(layout="packed", repeat_len=-1), "must not be negative"),
    ]:
        with pytest.raises(UserError, match=message):
            make_batches(Config(data=data), source, tokenizer, 8)
    for data in (DataConfig(files="a", seqio="b"), DataConfig(seqio="a", tfds="b")):
        with pytest.raises(UserError, match="both set"):
            make_source(Config(data=data), tokenizer)


def test_a_state_with_another_batch_size_is_rejected():
    state = iter(Lanes(Documents(), 2, BLOCK, BLOCK)).get_state()
    with pytest.raises(UserError, match=r"data\.batch=3: the saved run has 2 rows"):
        iter(Lanes(Documents(), 3, BLOCK, BLOCK)).set_state(state)


@given(blocks=st.integers(2, 12))
@settings(max_examples=20)
def test_documents_that_fit_a_row_are_not_split(blocks):
    source = Documents()
    length = blocks * BLOCK
    lanes = iter(Lanes(source, 2, length, BLOCK, keep_whole=True))
    rows = [next(lanes) for _ in range(30)]
    for lane in range(2):
        line = {name: np.concatenate([row[name][lane] for row in rows]) for name in rows[0]}
        starts = np.flatnonzero(line["reset"])
        for k, start in enumerate(starts[:-1]):
            tokens = source.document([lane, k, 0])
            positions = len(tokens) - 1
            # no token is lost, whether or not the document is split
            np.testing.assert_array_equal(line["tokens"][start : start + positions], tokens[:-1])
            assert line["valid"][start : start + positions].all()
            whole = start // length == (start + positions - 1) // length
            assert whole or positions > length or line["pass_state"][start]


def test_unsplit_documents_resume_exactly():
    def make_lanes():
        return iter(Lanes(Documents(), 2, 6 * BLOCK, BLOCK, keep_whole=True))

    reference = list(islice(make_lanes(), 12))
    for stop in range(12):
        first = make_lanes()
        list(islice(first, stop))
        again = make_lanes()
        again.set_state(json.loads(json.dumps(first.get_state())))
        for expected in reference[stop:]:
            assert_equal(next(again), expected)


# lanes that end while others continue


class Chains:
    """Documents of tokens that encode the document and a counter, in chains of `links`: each but a
    chain's first starts with the memory of the one before it.
    """

    def __init__(self, links):
        self.links = links

    def key(self, lane, lanes, k, before=None):
        assert lanes == 4
        return [lane, k, (before[2] + 1) % self.links if before else 0]

    def document(self, key):
        size = np.random.default_rng(key).integers(4, 50)
        return np.array([BOS, *key, *range(4, size), EOS], np.int32)

    def open(self, key, piece=0):
        for part in np.array_split(self.document(key), 3)[piece:]:
            yield Piece(part, np.ones(len(part), np.float32), pass_state=key[2] > 0)

    def get_state(self):
        return {}


def read_with_halving(source, blocks, steps):
    """Return the tokens of four lanes until each ends: the given steps with 4, 2 and 1 lanes."""
    lines, state = [[] for _ in range(4)], None
    for i, count in enumerate(steps):
        batches = Lanes(source, 4 >> i, (blocks << i) * BLOCK, BLOCK, streams=1 << i)
        batches = iter(batches)
        if state:
            batches.set_state(json.loads(json.dumps(halve_batch(state))))
        for batch in islice(batches, int(count)):
            for lane in range(4 >> i):
                lines[lane << i].append({name: rows[lane] for name, rows in batch.items()})
        state = batches.get_state()
    return [{n: np.concatenate([row[n] for row in line]) for n in line[0]} for line in lines]


@given(
    links=st.integers(1, 3),
    blocks=st.integers(1, 4),
    steps=st.lists(st.integers(1, 12), min_size=3, max_size=3),
)
@settings(max_examples=40)
def test_remaining_lanes_continue_and_take_over_the_others_documents(links, blocks, steps):
    source, read = Chains(links), []
    for lane, line in enumerate(read_with_halving(source, blocks, steps)):
        begins, before = np.flatnonzero(line["reset"]), None
        for begin, end in zip(begins, [*begins[1:], None], strict=True):
            tokens = line["tokens"][begin:end][line["valid"][begin:end]]
            key = tokens[1:4].tolist()
            document = source.document(key)[:-1]
            # whole documents, where rows became longer; of a lane that ended, up to that step
            assert len(tokens) == len(document) or end is None
            np.testing.assert_array_equal(tokens, document[: len(tokens)])
            passing = bool(line["pass_state"][begin])
            assert passing == (key[2] > 0)
            assert not passing or before == [key[0], key[1] - 1, key[2] - 1]
            read.append(tuple(key[:2]))
            before = key
        # lanes 0 and 2 take over lanes 1 and 3, then lane 0 takes over lane 2
        assert {k[0] for k in read[-len(begins) :]} <= {0: {0, 1, 2, 3}, 2: {2, 3}}.get(
            lane, {lane}
        )
    assert len(set(read)) == len(read)
    for lane in range(4):  # in order, without gaps
        assert sorted(k for of, k in read if of == lane) == list(
            range(sum(n[0] == lane for n in read))
        )


def test_documents_are_read_round_robin():
    """Lanes that were taken over catch up: in the end all four have equal progress."""
    state = iter(Lanes(Chains(1), 1, 100 * BLOCK, BLOCK, streams=4))
    next(state)
    counts = [reader["k"] for reader in state.get_state()["rows"][0]["readers"]]
    assert max(counts) - min(counts) <= 1
    assert min(counts) > 1
