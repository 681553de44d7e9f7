"""Tokenizers are lossless, also token by token; every error is one line."""

import itertools
import os
from collections import Counter

import numpy as np
import pytest
import sentencepiece
from hypothesis import example, given
from hypothesis import strategies as st

from famjax.core.errors import UserError
from famjax.data import train_tokenizer
from famjax.data.files import PIECE_BYTES
from famjax.data.sources import TextSource
from famjax.data.train_tokenizer import build_word_list, train_sentencepiece
from famjax.experiment.load import load_config
from famjax.tokenizers.load import load_tokenizer
from famjax.tokenizers.tokenizer import StreamDecoder
from famjax.train.loop import train

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
CORPUS = "The quick brown fox, 1234 times.\n\tdef f(x):\n        return x  # naïve 😀\n" * 50


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "corpus.txt").write_text(CORPUS)
    train_sentencepiece(str(folder / "corpus.txt"), 330, folder / "m.model")
    return folder / "m.model"


@pytest.fixture(scope="module", params=["bytes", "sentencepiece"])
def tokenizer(request, model):
    return load_tokenizer("bytes" if request.param == "bytes" else str(model))


@given(text=TEXT)
@example(text="")
@example(text="  two  spaces\n\n \ttab\r\n")
@example(text="▁ is not a space, <0x0A> no byte, <s></s> no specials \0")
@example(text="\u2047 \ufffd \u2585 e\u0301 \u2028")
def test_text_round_trips(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())


@given(texts=st.lists(TEXT, min_size=2, max_size=6))
@example(texts=["▁ is no space", "", "two  spaces ", "▁"])
def test_many_pairs_have_the_tokens_of_each_alone(tokenizer, texts):
    pairs = list(itertools.pairwise(texts))
    for (source, target), found in zip(pairs, tokenizer.encode_pairs(pairs), strict=True):
        expected = tokenizer.encode_source(source), tokenizer.encode_target(target)
        for ids, alone in zip(found, expected, strict=True):
            assert ids.dtype == np.int32
            np.testing.assert_array_equal(ids, alone)


@given(seed=st.integers(0, 10**6), length=st.integers(0, 30))
def test_streaming_equals_decoding_of_the_full_sequence(tokenizer, seed, length):
    ids = np.random.default_rng(seed).integers(0, tokenizer.vocab_size, length)
    decoder = StreamDecoder(tokenizer)
    assert "".join(decoder.push(i) for i in ids) + decoder.flush() == tokenizer.decode(ids)


def test_streaming_emits_complete_characters_only(tokenizer):
    decoder = StreamDecoder(tokenizer)
    parts = [decoder.push(i) for i in tokenizer.encode("a 語 ß")]
    assert "".join(parts) == "a 語 ß"
    assert not any("\ufffd" in part for part in parts)


def test_specials_have_no_text(tokenizer):
    specials = [tokenizer.bos_id, tokenizer.eos_id]
    assert tokenizer.decode([*specials, tokenizer.vocab_size + 5]) == ""
    assert tokenizer.token_bytes[specials].tolist() == [0, 0]
    assert len(tokenizer.token_bytes) == tokenizer.vocab_size


def test_byte_tokens_have_their_values_as_ids():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode("aß").tolist() == [97, 195, 159]
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (258, 256, 257)


def test_a_trained_model_compresses_and_splits_digits(model):
    tokenizer = load_tokenizer(str(model))
    assert len(tokenizer.encode("The quick brown fox")) < 10
    assert len(tokenizer.encode("1234")) == 4


def test_training_is_deterministic(model):
    corpus, again = model.parent / "corpus.txt", model.parent / "again.model"
    tokenizer = train_sentencepiece(str(corpus), 330, again)
    assert again.read_bytes() == model.read_bytes()
    assert tokenizer.fingerprint == load_tokenizer(str(model)).fingerprint


def test_a_small_text_gives_fewer_tokens_than_requested(model):
    corpus, out = model.parent / "corpus.txt", model.parent / "large.model"
    assert train_sentencepiece(str(corpus), 100_000, out).vocab_size < 1000


def test_files_share_what_is_read(tmp_path, monkeypatch, capsys):
    """Both languages of a joint tokenizer, with files that are larger than the limit."""
    for name, text in (("de", "Straße "), ("en", "street "), ("fr", "rue ")):
        (tmp_path / name).write_text(text * (20 if name == "fr" else 40_000))
    limit = 150_000
    monkeypatch.setattr(train_tokenizer, "_TRAINING_BYTES", limit)
    files = ",".join(str(tmp_path / name) for name in ("de", "en", "fr"))
    tokenizer = train_sentencepiece(files, 300, tmp_path / "joint.model")
    for text in ("Straße ", "street "):
        assert len(tokenizer.encode(text)) <= 2
    said = capsys.readouterr().err
    assert "(the limit; about as much of each file)" in said
    assert f"80 bytes of {tmp_path / 'fr'}" in said
    sizes = {name: os.path.getsize(tmp_path / name) for name in ("de", "en", "fr")}
    for at_once in (1, 2, 64):
        monkeypatch.setattr(train_tokenizer, "_OPEN_FILES", at_once)
        read = Counter()
        source = TextSource(files, load_tokenizer("bytes"), seed=0, holdout=0)
        shared = train_tokenizer.share_texts(source.texts_by_file(), 3, limit, read)
        assert sum(len(text.encode()) for text in shared) == read.total()
        assert limit <= read.total() < limit + 3 * PIECE_BYTES
        of = [read[str(tmp_path / name)] for name in ("de", "en", "fr")]
        assert min(of[:2]) > 60_000
        assert of[2] == sizes["fr"]
    everything = Counter()
    list(train_tokenizer.share_texts(source.texts_by_file(), 3, 10**9, everything))
    assert sorted(everything.values()) == sorted(sizes.values())


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (0, "vocab size 0: must be positive"),
        (-3, "must be positive"),
        (100, r"vocab size 100: too small .* needs \d+ or more"),
        (2**31, "too large"),
    ],
)
def test_invalid_vocabulary_sizes_are_rejected(model, size, message):
    with pytest.raises(UserError, match=message):
        train_sentencepiece(str(model.parent / "corpus.txt"), size, model.parent / "x.model")
    assert not (model.parent / "x.model").exists()


def test_training_needs_text(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(UserError, match="no text"):
        train_sentencepiece(str(tmp_path / "empty.txt"), 300, tmp_path / "x.model")
    with pytest.raises(UserError, match="no such file"):
        train_sentencepiece(str(tmp_path / "missing.txt"), 300, tmp_path / "x.model")


def test_the_training_text_is_not_overwritten(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some text " * 50)
    (tmp_path / "link.txt").symlink_to(text)
    for make in (
        lambda out: train_sentencepiece(str(tmp_path), 280, out),
        lambda out: build_word_list(str(tmp_path), out),
    ):
        for out in (text, tmp_path / "link.txt"):
            with pytest.raises(UserError, match="is one of the texts; give another file"):
                make(out)
        with pytest.raises(UserError, match=r"there is no folder .*/no; make it first"):
            make(tmp_path / "no" / "x.txt")
    assert text.read_text() == "some text " * 50


def test_error_names_an_invalid_byte_in_the_training_text(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"good text\n" * 30_000 + b"\xff")
    path = tmp_path / "bad.txt"
    with pytest.raises(UserError) as error:
        train_sentencepiece(str(path), 300, tmp_path / "x.model")
    # without the messages of the trainer
    assert str(error.value).startswith(f"{path}: not UTF-8 at byte 300000; convert it")


@pytest.mark.long
def test_a_model_that_changes_text_says_so(model, tmp_path, capsys):
    assert load_tokenizer(str(model)).is_lossless
    text = tmp_path / "text.txt"
    text.write_text(CORPUS)
    # the trainer's own settings: NFKC, white space as spaces, no byte tokens
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "own"), vocab_size=39, minloglevel=2
    )
    changing = load_tokenizer(str(tmp_path / "own.model"))
    assert not changing.is_lossless
    assert changing.decode(changing.encode("a\nb")) != "a\nb"
    keys = [f"data.files={text}", f"data.tokenizer={tmp_path / 'own.model'}", "train.steps=1"]
    keys += ["model.layers=1", "model.width=16", "model.heads=1", "model.mlp_width=16"]
    keys += ["model.block_len=8", "data.length=16", "data.batch=1", "data.holdout=0"]
    train(load_config("text_bswa", keys), tmp_path / "run")
    assert "own.model changes text, by normalization" in " ".join(capsys.readouterr().err.split())


def test_files_that_are_not_models_are_rejected(tmp_path):
    (tmp_path / "not.model").write_text("hello")
    (tmp_path / "empty.model").write_text("")
    for path, message in [
        (tmp_path / "missing.model", "No such file"),
        (tmp_path, "no tokenizer.json and no tokenizer.model"),
        (tmp_path / "not.model", "not a SentencePiece model"),
        (tmp_path / "empty.model", "not a SentencePiece model"),
    ]:
        with pytest.raises(UserError, match=message):
            load_tokenizer(str(path))
