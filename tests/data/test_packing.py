"""Packed rows are dense, lose no token, and end with a repeated random part of the row (3.1.1)."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_lanes import Documents, assert_equal

from famjax.core.errors import UserError
from famjax.data.packing import REPEAT_PROMPT, PackedRows
from famjax.tokenizers.load import load_tokenizer

TOKENIZER = load_tokenizer("bytes")
PROMPT = TOKENIZER.encode(REPEAT_PROMPT)


def stream(source, lane, count):
    """Return the first tokens of a lane and the weight of each as a target."""
    documents = [source.document([lane, k, 0]) for k in range(count)]
    weights = [np.concatenate([[0], d[1:] % 3]) for d in documents]
    return np.concatenate(documents)[:count], np.concatenate(weights)[:count]


@given(batch=st.integers(1, 3), length=st.integers(1, 70))
@settings(max_examples=20)
def test_every_token_is_input_and_target_once(batch, length):
    source = Documents()
    iterator = iter(PackedRows(source, TOKENIZER, batch, length, seed=0))
    batches = [next(iterator) for _ in range(8)]
    for lane in range(batch):
        row = {name: np.concatenate([b[name][lane] for b in batches]) for name in batches[0]}
        tokens, weights = stream(source, lane, 8 * length + 1)
        np.testing.assert_array_equal(row["tokens"], tokens[:-1])
        np.testing.assert_array_equal(row["weights"], weights[1:])
        predicted = row["weights"] > 0
        np.testing.assert_array_equal(row["targets"][predicted], tokens[1:][predicted])
        assert row["valid"].all()
        np.testing.assert_array_equal(np.flatnonzero(row["reset"]), np.arange(8) * length)


@given(repeat=st.integers(1, 40))
@settings(max_examples=20)
def test_the_end_of_a_row_repeats_a_random_part_of_it(repeat):
    source, length = Documents(), 120
    iterator = iter(PackedRows(source, TOKENIZER, 1, length, seed=3, repeat_len=repeat))
    fill = length - len(PROMPT) - repeat
    tokens, weights = stream(source, 0, 3 * fill + 1)
    for i in range(3):
        row = {name: values[0] for name, values in next(iterator).items()}
        part = slice(i * fill, (i + 1) * fill)
        np.testing.assert_array_equal(row["tokens"][:fill], tokens[part])
        np.testing.assert_array_equal(row["weights"][:fill], weights[1:][part])
        np.testing.assert_array_equal(row["tokens"][fill:-repeat], PROMPT)
        repeated = row["tokens"][-repeat:]
        windows = np.lib.stride_tricks.sliding_window_view(row["tokens"][:fill], repeat)
        assert (windows == repeated).all(axis=1).any()
        expected = np.zeros(length - fill)
        expected[len(PROMPT) - 1 : -1] = 0.1
        np.testing.assert_allclose(row["weights"][fill:], expected)
        np.testing.assert_array_equal(row["targets"][-repeat - 1 : -1], repeated)


def test_repeated_parts_differ_between_rows_and_lanes():
    class Counting(Documents):
        def document(self, key):
            return np.arange(1000, dtype=np.int32)

    iterator = iter(PackedRows(Counting(), TOKENIZER, 4, 200, seed=0, repeat_len=5))
    begins = [next(iterator)["tokens"][:, -5] - 170 * step for step in range(3)]
    assert len(set(np.concatenate(begins).tolist())) > 6


@given(stop=st.integers(0, 9), repeat=st.sampled_from([0, 6]))
@settings(max_examples=20)
def test_an_interrupted_iterator_resumes_exactly(stop, repeat):
    dataset = PackedRows(Documents(), TOKENIZER, 2, 60, seed=1, repeat_len=repeat)
    iterator = iter(dataset)
    for _ in range(stop):
        next(iterator)
    state = json.dumps(iterator.get_state())
    expected = [next(iterator) for _ in range(5)]
    resumed = iter(dataset)
    resumed.set_state(json.loads(state))
    for batch in expected:
        assert_equal(next(resumed), batch)


def test_a_repeat_that_does_not_fit_is_rejected():
    needed = len(PROMPT) + 2 * 50
    PackedRows(Documents(), TOKENIZER, 1, needed, seed=0, repeat_len=50)
    with pytest.raises(UserError, match=f"needs {needed} tokens .* data.length is {needed - 1}"):
        PackedRows(Documents(), TOKENIZER, 1, needed - 1, seed=0, repeat_len=50)
