"""Passkey documents: needle first, the filler between, the question last, of exactly the length."""

from dataclasses import replace

import numpy as np
import pytest

from famjax.core.config import PasskeyConfig
from famjax.core.errors import UserError
from famjax.data.tokenizers import load_tokenizer, train_sentencepiece
from famjax.tasks.passkey import FILLER, NEEDLE, QUESTION, Passkey, PasskeySource, sample_text


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("passkey")
    (folder / "text.txt").write_text(sample_text())
    return train_sentencepiece(str(folder / "text.txt"), 600, folder / "m.model")


def read(task, length, seed=0):
    pieces = list(task.document(np.random.default_rng(seed), length))
    return (
        np.concatenate([p.tokens for p in pieces]),
        np.concatenate([p.weights for p in pieces]),
    )


@pytest.mark.parametrize("kind", ["bytes", "words"])
@pytest.mark.parametrize("extra", [0, 1, 700, 9000])
def test_a_document_reads_as_the_paper_prints_it(kind, extra, words):
    tokenizer = words if kind == "words" else load_tokenizer("bytes")
    task = Passkey(tokenizer, digits=5, other_weight=0.02)
    tokens, weights = read(task, task.shortest + extra)
    assert len(tokens) == task.shortest + extra
    assert tokens[0] == tokenizer.bos_id
    assert tokens[-1] == tokenizer.eos_id
    text = tokenizer.decode(tokens)
    key = text[-5:]
    assert key.isdigit()
    assert text.startswith(NEEDLE.format(key=key))
    assert text.endswith(QUESTION + key)
    filler = text[len(NEEDLE.format(key=key)) : -len(QUESTION + key)]
    assert filler in "".join(FILLER) * (2 + len(filler) // 50)
    # only the answer has full weight, and each digit of it is a token of its own
    assert tokenizer.decode(tokens[weights == 1]) == key
    assert (weights == 1).sum() == 5
    assert np.allclose(weights[weights < 1], 0.02)


def test_keys_differ_and_a_seed_repeats_them(words):
    task = Passkey(words, digits=5)
    keys = {tuple(read(task, 200, seed)[0][-6:-1]) for seed in range(50)}
    assert len(keys) == 50
    np.testing.assert_array_equal(read(task, 200, 7)[0], read(task, 200, 7)[0])


def test_a_length_that_holds_no_question_is_refused(words):
    task = Passkey(words, digits=5)
    with pytest.raises(UserError, match=r"passkey: 40 tokens do not hold needle and question"):
        read(task, 40)
    with pytest.raises(UserError, match=r"min_length=10: needle and question take"):
        PasskeySource(PasskeyConfig(min_length=10), words, 0)


def test_documents_grow_as_they_are_solved(words):
    config = PasskeyConfig(min_length=96, start_length=96, max_length=400, threshold=0.9)
    source = PasskeySource(config, words, seed=0)
    assert [source.key(0, 4, k)[2] for k in range(5)] == [96] * 5
    assert source.advance(source.get_state(), 0.89) == {"longest": 96}
    lengths = []
    for _ in range(3):
        source.set_state(source.advance(source.get_state(), 0.95))
        lengths.append(source.longest)
    assert lengths == [192, 384, 400]
    drawn = np.array([source.key(0, 4, k)[2] for k in range(2000)])
    assert drawn.min() >= 96
    assert drawn.max() <= 400
    assert abs(np.log(drawn).mean() - np.log([96, 400]).mean()) < 0.02


def test_a_document_opened_in_the_middle_goes_on(words):
    source = PasskeySource(replace(PasskeyConfig(), start_length=96), words, 3)
    key = [1, 5, 9000]
    pieces = list(source.open(key))
    assert len(pieces) > 3
    for start in range(len(pieces)):
        for a, b in zip(source.open(key, start), pieces[start:], strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)
