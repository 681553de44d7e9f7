"""One pass over documents: how many rows it takes, and in which order they are read."""

import gzip
from contextlib import suppress

import numpy as np
import pytest

from famjax.data.one_pass import DocumentPass, EndOfDocuments, min_rows
from famjax.data.parts import TextParts
from famjax.data.sources import TextSource
from famjax.tokenizers.tokenizer import ByteTokenizer


def makespan(sizes, rows):
    ends = np.zeros(rows, int)
    for size in sizes:
        ends[ends.argmin()] += size
    return ends.max()


@pytest.mark.parametrize(
    ("sizes", "max_rows", "rows"),
    [
        ([10, 3, 3, 3], 4, 2),
        ([10, 4, 4, 4], 4, 3),
        ([5, 5, 5], 3, 3),
        ([5, 5, 5, 5], 3, 2),
        ([7], 4, 1),
        ([0, 0], 2, 1),
    ],
)
def test_rows_that_would_only_wait_are_left_out(sizes, max_rows, rows):
    assert min_rows(sizes, max_rows) == rows


def test_fewer_rows_take_longer():
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes = sorted((int(rng.pareto(1) * 100) for _ in range(20)), reverse=True)
        rows = min_rows(sizes, 8)
        assert makespan(sizes, rows) <= makespan(sizes, 8)
        assert rows == 1 or makespan(sizes, rows - 1) > makespan(sizes, 8)


def hand_out(documents):
    """Return the texts' first letters in the order in which they are handed out."""
    letters = ""
    while True:
        try:
            key = documents.key(0, 1, 0)
        except EndOfDocuments:
            return letters
        piece = list(documents.open(key))[1]
        letters += chr(piece.tokens[0] - ByteTokenizer().encode("\0")[0])


def test_documents_are_handed_out_in_a_given_order(tmp_path):
    for letter, size in zip("abcd", (3, 9, 1, 6), strict=True):
        (tmp_path / f"{letter}.txt").write_text(letter * size)
    source = TextSource(str(tmp_path), ByteTokenizer(), seed=0, holdout=0)
    assert source.document_sizes().tolist() == [3, 9, 1, 6]
    assert hand_out(DocumentPass(source, order=[1, 3, 0, 2])) == "bdac"
    assert sorted(hand_out(DocumentPass(source))) == [*"abcd"]


def test_all_parts_of_documents_are_handed_out(tmp_path):
    text = " ".join(f"word{i}" for i in range(300))
    (tmp_path / "a.txt").write_text(text)
    source = TextParts(str(tmp_path), ByteTokenizer(), seed=0, holdout=0, part_bytes=300)
    documents = DocumentPass(source)
    with suppress(EndOfDocuments):
        while True:
            documents.key(0, 1, 0)
    pieces = [piece for key in sorted(documents.keys) for piece in documents.open(key)]
    found = "".join(ByteTokenizer().decode(piece.tokens) for piece in pieces)
    assert found == text


def test_sizes_of_compressed_documents_are_unknown(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text"))
    source = TextSource(str(tmp_path), ByteTokenizer(), seed=0, holdout=0)
    assert source.document_sizes() is None
