"""What followed earlier contexts, compared with a search through the document."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import ngrams as oracle

from famjax.ops import ngrams

CONTEXTS = 6  # of 1, 2, 3, 4, 6 and 8 tokens
# lengths of the documents of three rows of 160 tokens; some are longer than a chunk, others shorter
# than a context
ROWS = [[70, 33, 50], [160], [2, 1, 140]]
T = 160


def test_context_lengths():
    assert ngrams.context_lengths(10) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    assert [ngrams.context_lengths(n) for n in (1, 2, 3)] == [(1,), (1, 2), (1, 2, 3)]


def make_rows(slots):
    """Return tokens, resets and valid tokens [3 T] of documents, some padded, and what is right."""
    rng = np.random.default_rng(0)
    tokens, wanted = np.zeros((3, T), np.int32), np.full((3, T, CONTEXTS), ngrams.ABSENT)
    reset, valid = np.zeros((3, T), bool), np.zeros((3, T), bool)
    for row, lengths in enumerate(ROWS):
        at = 0
        for length in lengths:
            # repeats itself, but for some tokens, so that long contexts recur
            document = np.resize(rng.integers(5, size=31), length)
            document[rng.random(length) < 0.1] = 0
            own = slice(at, at + length)
            tokens[row, own], wanted[row, own] = document, oracle.recall(document, CONTEXTS, slots)
            reset[row, at], valid[row, own] = True, True
            at += length + 2  # padding
    return (tokens, reset, valid), wanted


# with collisions; without
@pytest.mark.parametrize("slots", [23, pytest.param(4096, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "sizes", [[37, 64, 59], *(pytest.param(x, marks=pytest.mark.long) for x in ([T], [1] * T))]
)
def test_recalled_is_what_a_search_finds(slots, sizes):
    arrays, wanted = make_rows(slots)
    assert {ngrams.ABSENT, 0, 4} <= set(wanted.ravel())
    assert (wanted >= 0).any((0, 1)).all()  # contexts of every length
    state, found = ngrams.init_state(3, CONTEXTS, slots), []
    recall = jax.jit(ngrams.recall)
    for end, size in zip(np.cumsum(sizes), sizes, strict=True):
        part, state = recall(state, *(jnp.asarray(a[:, end - size : end]) for a in arrays))
        found.append(part)
    np.testing.assert_array_equal(np.concatenate(found, 1), wanted)


@pytest.mark.long
def test_without_resets_and_padding_nothing_is_left_out():
    tokens = np.random.default_rng(1).integers(3, size=(2, 90))
    found, state = ngrams.recall(
        ngrams.init_state(2, CONTEXTS, 512), jnp.asarray(tokens), None, None
    )
    for row in range(2):
        np.testing.assert_array_equal(found[row], oracle.recall(tokens[row], CONTEXTS, 512))
    np.testing.assert_array_equal(state.recent, tokens[:, -8:])


def test_a_new_document_has_an_empty_table():
    """The state after a reset is that of a stream that starts there."""
    tokens = jnp.asarray(np.random.default_rng(2).integers(3, size=(1, 200)))
    reset = jnp.arange(200)[None] == 150  # in the third chunk
    empty = ngrams.init_state(1, CONTEXTS, 64)
    _, later = ngrams.recall(empty, tokens, reset, None)
    _, fresh = ngrams.recall(empty, tokens[:, 150:], reset[:, 150:], None)
    jax.tree.map(np.testing.assert_array_equal, later, fresh)


def test_padding_does_not_change_the_state():
    tokens = jnp.asarray(np.random.default_rng(3).integers(3, size=(2, 20)))
    _, state = ngrams.recall(ngrams.init_state(2, CONTEXTS, 64), tokens, None, None)
    _, after = ngrams.recall(state, tokens, None, jnp.zeros(tokens.shape, bool))
    jax.tree.map(np.testing.assert_array_equal, after, state)


@pytest.mark.parametrize("has_resets", [False, True])
@pytest.mark.parametrize("t", [1, 200])
def test_the_table_is_written_in_place(has_resets, t):
    """Else every token of a stream takes time proportional to the slots."""
    slots = 5003
    tokens = jnp.zeros((2, t), jnp.int32)
    reset = tokens == 1 if has_resets else None
    recall = jax.jit(ngrams.recall, donate_argnums=0)
    empty = ngrams.init_state(2, CONTEXTS, slots)
    program = recall.lower(empty, tokens, reset, None).compile().as_text()
    tables = [line for line in program.splitlines() if f"[2,{CONTEXTS},{slots}]" in line]
    assert any(" while(" in line or "scatter(" in line for line in tables)
    assert not [line for line in tables if " copy(" in line]
