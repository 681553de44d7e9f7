"""Passkey documents of an exact length: needle first, then filler, question last."""

import re
from dataclasses import replace

import numpy as np
import pytest

from famjax.config.schema import PasskeyConfig
from famjax.core.errors import UserError
from famjax.data.lanes import Reader, document_start
from famjax.data.reassign import ReassignedSource, resize_rows
from famjax.data.train_tokenizer import train_sentencepiece
from famjax.experiment.load import load_config
from famjax.tasks.passkey import (
    FILLER,
    NAMES,
    NEEDLE,
    QUESTION,
    Passkey,
    PasskeySource,
    evaluated_task,
    sample_text,
)
from famjax.tokenizers.load import load_tokenizer


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
def test_a_document_has_the_text_of_the_paper(kind, extra, words):
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
    # only the answer has full weight, with one token per digit
    assert tokenizer.decode(tokens[weights == 1]) == key
    assert (weights == 1).sum() == 5
    assert np.allclose(weights[weights < 1], 0.02)


def test_keys_differ_and_depend_on_the_seed(words):
    task = Passkey(words, digits=5)
    keys = {tuple(read(task, 200, seed)[0][-6:-1]) for seed in range(50)}
    assert len(keys) == 50
    np.testing.assert_array_equal(read(task, 200, 7)[0], read(task, 200, 7)[0])


def test_a_tokenizer_without_digits_is_rejected(tmp_path):
    (tmp_path / "words.txt").write_text("<s>\n<unk>\n<eos>\nred\nblue\n")
    # otherwise all keys are <unk> and every answer is correct
    with pytest.raises(UserError, match="does not tell keys apart"):
        Passkey(load_tokenizer(str(tmp_path / "words.txt")), digits=5)


def test_a_length_too_short_for_the_question_is_rejected(words):
    task = Passkey(words, digits=5)
    with pytest.raises(UserError, match=r"passkey: 40 tokens do not hold needle and question"):
        read(task, 40)
    with pytest.raises(UserError, match=r"min_length=10: needle and question take"):
        PasskeySource(PasskeyConfig(min_length=10), words, 0)


def test_documents_grow_with_the_curriculum(words):
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
    # as many tokens in documents of 100 to 200 tokens as in those of 200 to 400
    tokens = [drawn[(drawn >= low) & (drawn < 2 * low)].sum() for low in (100, 200)]
    assert tokens[0] == pytest.approx(tokens[1], rel=0.1)
    uniform = PasskeySource(replace(config, lengths="uniform", start_length=400), words, seed=0)
    drawn = np.array([uniform.key(0, 4, k)[2] for k in range(2000)])
    assert {drawn.min(), drawn.max()} == {96, 400}
    assert drawn.mean() == pytest.approx(248, rel=0.03)
    rounded = PasskeySource(replace(config, multiple=32, start_length=400), words, seed=0)
    lengths = {rounded.key(0, 4, k)[2] for k in range(200)}
    assert lengths == {*range(96, 417, 32)}


def test_a_key_is_asked_for_repeatedly(words):
    config = PasskeyConfig(min_length=96, start_length=2000, max_length=2000, multiple=32)
    asking = PasskeySource(replace(config, ask_every=256), words, seed=0)
    silent = PasskeySource(config, words, seed=0)
    before, k = None, 0
    for _ in range(30):
        total = silent.key(1, 4, k)[2]
        read, answers = 0, set()
        while True:
            key = asking.key(1, 4, k, before)
            pieces = list(asking.open(key))
            tokens = np.concatenate([piece.tokens for piece in pieces])
            weights = np.concatenate([piece.weights for piece in pieces])
            text = words.decode(tokens)
            assert ("Remember it" in text) == (read == 0)
            assert pieces[0].pass_state == (read > 0)
            assert not any(piece.pass_state for piece in pieces[1:])
            assert len(tokens) == 256 if read else 96 <= len(tokens) < 96 + 256
            answers.add(words.decode(tokens[weights == 1]))
            read, before, k = read + len(tokens), key, k + 1
            if key[3] == 0:
                break
        assert read == total
        assert len(answers) == 1
    with pytest.raises(UserError, match=r"ask_every=10: the question takes \d+ tokens"):
        PasskeySource(replace(config, ask_every=10), words, seed=0)


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
def test_questions_are_of_the_rows_own_key_after_a_change_of_the_batch(words, rows):
    """Documents that continue a row's may be assigned from another lane."""
    config = PasskeyConfig(min_length=96, start_length=1000, max_length=1000, ask_every=64)
    source, needles, states = PasskeySource(config, words, seed=0), {}, [document_start(0)] * 4

    def read(readers, count):
        """Read documents; return the number of those that continue a text."""
        continued = 0
        for row, reader in enumerate(readers):
            for _ in range(count):
                span = reader.take(2000)
                digits = re.findall(r"\d{5}", words.decode(span.tokens))
                continued += span.pass_state
                if not span.pass_state:
                    needles[row] = digits[0]
                assert digits[-1] == needles[row]
                assert span.last
        return continued

    readers = [Reader(source, i, 4) for i in range(4)]
    for reader, state in zip(readers, states, strict=True):
        reader.set_state(state)
    # so that rows are within texts
    assert read(readers, 7) > 0
    states = [reader.get_state() for reader in readers]
    resized = resize_rows({"batches": {"rows": states}, "source": source.get_state()}, rows, source)
    reassigned = ReassignedSource(source)
    reassigned.set_assignments(resized)
    readers = [Reader(reassigned, i, rows) for i in range(rows)]
    for reader, state in zip(readers, resized["batches"]["rows"], strict=True):
        reader.set_state(state)
    assert read(readers, 40) > 0


def test_questions_are_anywhere_and_no_memory_knows_the_answer(words):
    """If another document follows, the answer is within the last block, which is not in memory."""
    w = 64
    config = PasskeyConfig(min_length=96, start_length=900, max_length=900, ask_every=256)
    source = PasskeySource(config, words, seed=0, block_len=w)
    followed, single, last, before = set(), set(), set(), None
    for k in range(4000):
        key = before = source.key(0, 1, k, before)
        length = sum(len(piece.tokens) for piece in source.open(key))
        assert length == key[2]
        kind = followed if key[3] else last if key[4] else single
        kind.add((length - 1) % w + 1)
    assert followed == set(range(source.task.answer_len, w + 1))
    assert single == set(range(1, w + 1))
    # the others cannot be cut by the end of a block
    assert last == set(range(1, source.task.answer_len))


@pytest.mark.parametrize("ask_every", [64, 128])
def test_a_question_too_long_to_be_cut_in_its_answer_is_anywhere(words, ask_every):
    w, before, last = 64, None, set()
    config = PasskeyConfig(
        min_length=96, start_length=900, max_length=900, ask_every=ask_every, digits=5
    )
    source = PasskeySource(config, words, seed=0, block_len=w)
    for k in range(4000):
        key = before = source.key(0, 1, k, before)
        if key[4] and not key[3]:
            last.add(key[2])
    if ask_every == w:  # a document of one block, which needs room for the question
        assert last == set(range(source.task.question_len, w + 1))
    else:
        assert last == set(range(w + 1, w + source.task.answer_len))


def test_short_documents_end_anywhere_within_their_blocks(words):
    """A document that should fit the first block fits it, and has its question there."""
    shortest = Passkey(words, 5).shortest
    w = shortest + 40
    config = PasskeyConfig(
        min_length=shortest, start_length=w, max_length=4 * w, ask_every=3 * w, threshold=0.5
    )
    source = PasskeySource(config, words, seed=0, block_len=w)
    assert {source.key(0, 1, k)[2] for k in range(2000)} == set(range(shortest, w + 1))
    source.set_state(source.advance(source.get_state(), 0.6))
    ends = {source.key(0, 1, k)[2] for k in range(9000)}
    assert ends == set(range(shortest, 2 * w + 1))


@pytest.mark.parametrize("ask_every", [64, 512])
def test_the_needle_is_anywhere_in_the_first_tokens(words, ask_every):
    config = PasskeyConfig(
        min_length=96,
        start_length=2000,
        max_length=2000,
        ask_every=ask_every,
        needle_within=300,
    )
    source = PasskeySource(config, words, seed=0, block_len=64)
    starts, keys, before = [], {}, None
    for k in range(1600):
        key = before = source.key(0, 1, k, before)
        pieces = list(source.open(key))
        text = words.decode(np.concatenate([piece.tokens for piece in pieces]))
        assert ("There is an important" in text) == (key[4] == 0)
        if key[4] == 0:
            starts.append(len(pieces[0].tokens) - len(source.task.head([""], ["0" * 5])))
        answer = text.split("The pass key is ")[-1]
        assert keys.setdefault(key[1], answer) == answer
    assert min(starts) < 20
    assert 250 < max(starts) <= 300
    assert np.mean(np.array(starts) > 100) > 0.1


def test_hard_keys_have_few_different_digits(words):
    config = PasskeyConfig(min_length=96, start_length=96, hard_keys=0.5)
    source = PasskeySource(config, words, seed=0)
    different = []
    for k in range(400):
        tokens = np.concatenate([piece.tokens for piece in source.open(source.key(0, 1, k))])
        key = words.decode(tokens).split("The pass key is ")[-1][:5]
        different.append(len(set(key)))
    few = np.mean(np.array(different) < 3)
    # 1.4% of other keys have one or two different digits
    assert 0.25 < few < 0.6
    assert np.mean(np.array(different) > 3) > 0.3


def test_a_document_opened_in_the_middle_continues(words):
    source = PasskeySource(replace(PasskeyConfig(), start_length=96), words, 3)
    key = [1, 5, 9000, 0, 0]
    pieces = list(source.open(key))
    assert len(pieces) > 3
    for start in range(len(pieces)):
        for a, b in zip(source.open(key, start), pieces[start:], strict=True):
            np.testing.assert_array_equal(a.tokens, b.tokens)


def test_one_of_several_named_keys_is_asked_for():
    config = PasskeyConfig(
        keys=4, min_length=800, start_length=3000, max_length=3000, ask_every=256, multiple=32
    )
    tokenizer = load_tokenizer("bytes")
    source = PasskeySource(config, tokenizer, seed=0)
    told, asked, counts, before = {}, [], [], None
    for k in range(300):
        key = before = source.key(0, 1, k, before)
        pieces = list(source.open(key))
        text = tokenizer.decode(np.concatenate([piece.tokens for piece in pieces]))
        if key[4] == 0:
            told = dict(re.findall(r"The pass key of (\w+) is (\d{5})\. Remember", text))
            assert list(told) == [name for name in NAMES[:4] if name in told]
            assert len(told) == key[5]
            counts.append(tuple(told))
        assert ("Remember it" in text) == (key[4] == 0)
        name, answer = re.findall(r"What is .* The pass key of (\w+) is (\d{5})$", text)[0]
        assert answer == told[name]
        weights = np.concatenate([piece.weights for piece in pieces])
        assert (weights == 1).sum() == 5
        asked.append(name)
    assert set(asked) == set(NAMES[:4])
    # one key or more, of any name
    assert {len(names) for names in counts} == {1, 2, 3, 4}
    assert {names[0] for names in counts if len(names) == 1} == set(NAMES[:4])
    # as in the evaluation
    task = evaluated_task(tokenizer, config)
    drawn = set()
    for seed in range(40):
        tokens, _ = read(task, task.shortest + 100, seed)
        text = tokenizer.decode(tokens)
        assert len(tokens) == task.shortest + 100
        name, answer = re.findall(r"What is .* The pass key of (\w+) is (\d{5})$", text)[0]
        assert f"{answer} is the pass key of {name}. " in text
        drawn.add(name)
    assert drawn == set(NAMES[:4])


def test_documents_begin_with_one_key_and_get_more():
    tokenizer = load_tokenizer("bytes")
    task = Passkey(tokenizer, 5, keys=4)
    shortest = [task.shortest_with(n) for n in range(1, 5)]
    assert sorted(shortest) == shortest
    assert shortest[-1] == task.shortest
    config = PasskeyConfig(
        keys=4, min_length=shortest[0], start_length=shortest[0], max_length=4 * shortest[0]
    )
    source = PasskeySource(config, tokenizer, seed=0)
    for longest in (shortest[0], shortest[1] - 1, shortest[2], shortest[3]):
        source.set_state({"longest": longest})
        drawn = [source.key(0, 1, k) for k in range(300)]
        assert {key[5] for key in drawn} == {n for n in range(1, 5) if shortest[n - 1] <= longest}
        for key in drawn:
            text = tokenizer.decode(np.concatenate([p.tokens for p in source.open(key)]))
            assert len(re.findall("Remember it", text)) == key[5]
            assert key[2] <= longest


def test_other_tokens_weigh_less_than_answers():
    with pytest.raises(UserError, match=r"data\.passkey\.other_weight=1\.0: must be less than 1"):
        load_config("passkey", ["data.passkey.other_weight=1"])


def test_names_that_a_tokenizer_does_not_distinguish_are_rejected(tmp_path):
    digits = "\n".join("0123456789")
    (tmp_path / "words.txt").write_text(f"<s>\n<unk>\n<eos>\n{digits}\n")
    tokenizer = load_tokenizer(str(tmp_path / "words.txt"))
    Passkey(tokenizer, digits=1)
    with pytest.raises(UserError, match="does not tell names apart"):
        Passkey(tokenizer, digits=1, keys=2)
