"""Word lists: encoding, and how lists are built, saved and loaded."""

from __future__ import annotations

import time

import numpy as np
import pytest

from famjax.cli.main import main
from famjax.core.errors import UserError
from famjax.core.ticker import ticker
from famjax.data.train_tokenizer import build_word_list
from famjax.tokenizers.load import load_saved_tokenizer, load_tokenizer, save_tokenizer
from famjax.tokenizers.words import WordTokenizer

TEXT = " = Title = \n \n the cat sat , the <unk> mat\n"


def test_words_and_ends_of_lines_are_tokens():
    words = WordTokenizer("w", ["the", "cat", "=", "ü"])
    ids = words.encode(TEXT)
    names = [words.words[i] for i in ids]
    assert " ".join(names) == ("= <unk> = <eos> <eos> the cat <unk> <unk> the <unk> <unk> <eos>")
    assert ids.dtype == np.int32
    assert words.decode(words.encode("the  ü\ncat")) == "the ü \ncat "
    # the word and a space; a line break; nothing
    assert words.token_bytes[[3, 6, 2, 0]].tolist() == [4, 3, 1, 0]
    # text of the other special tokens is plain text
    assert words.encode("<s> <eos> <unk>").tolist() == [1, 1, 1]
    assert words.encode("").tolist() == []


def test_unknown_words_are_reported_once():
    words = WordTokenizer("list", ["a", "b"])
    assert words.unknown_words("a c\nb c d <s>") == ["c", "d", "<s>"]


def test_pieces_of_a_text_have_its_tokens():
    words = WordTokenizer("w", ["a", "b"])
    text = "a b\n\nb a \n a"
    for at in (i for i, letter in enumerate(text) if letter.isspace()):
        parts = [words.encode(text[:at]), words.encode(text[at:])]
        np.testing.assert_array_equal(np.concatenate(parts), words.encode(text))


def test_a_list_is_built_saved_and_loaded(tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "made.txt"
    text.write_text(TEXT * 3 + "b a b\n")
    made = build_word_list(str(text), out)
    assert made.words == (
        "<s>", "<unk>", "<eos>", "=", "the", ",", "Title", "cat", "mat", "sat", "b", "a",
    )  # fmt: skip
    assert build_word_list(str(text), out, min_count=2).words == made.words[:-1]
    argv = ["tokenizer", "train", str(text), "--kind", "words", "--out", str(out)]
    assert main([*argv, "--min-count", "3", "--vocab-size", "6"]) == 0
    assert "6 tokens; use it with" in capsys.readouterr().out
    loaded = load_tokenizer(str(out))
    assert loaded.words == made.words[:6]
    assert loaded.fingerprint == WordTokenizer("x", made.words[3:6]).fingerprint != made.fingerprint
    run = tmp_path / "run"
    (run / "tokenizer").mkdir(parents=True)
    # of an earlier attempt at this run
    (run / "config.json").write_text("{}")
    (run / "tokenizer" / "tokenizer.json").write_text("{}")
    save_tokenizer(str(out), run)
    save_tokenizer(str(run), run)
    assert load_saved_tokenizer(run, str(out)).fingerprint == loaded.fingerprint
    assert load_tokenizer(str(run)).words == loaded.words


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("the\ncat\n", "does not begin with the lines <s>, <unk>, <eos>"),
        ("<s>\n<unk>\n<eos>\na b\n", "line 4 is not one word: 'a b'"),
        ("<s>\n<unk>\n<eos>\n\na\n", "line 4 is not one word: ''"),
        ("<s>\n<unk>\n<eos>\na\na\n", "lists the word 'a' twice; remove one"),
    ],
)
def test_files_that_are_not_word_lists_are_rejected(text, said, tmp_path):
    (tmp_path / "w.txt").write_text(text)
    with pytest.raises(UserError, match=said):
        load_tokenizer(str(tmp_path / "w.txt"))


def test_binary_files_are_rejected(tmp_path):
    (tmp_path / "w.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match="not a text file"):
        load_tokenizer(str(tmp_path / "w.txt"))
    (tmp_path / "w.txt").write_bytes(b"<s>\n<unk>\n<eos>\n" + bytes(9))
    with pytest.raises(UserError, match="not a text file"):
        load_tokenizer(str(tmp_path / "w.txt"))
    (tmp_path / "t.txt").write_text("a")
    with pytest.raises(UserError, match="a word list is a"):
        build_word_list(str(tmp_path / "t.txt"), tmp_path / "m.model")


def test_a_list_may_have_windows_line_endings(tmp_path):
    (tmp_path / "w.txt").write_bytes(b"<s>\r\n<unk>\r\n<eos>\r\ncat\r\n")
    words = load_tokenizer(str(tmp_path / "w.txt"))
    assert isinstance(words, WordTokenizer)
    assert words.words == ("<s>", "<unk>", "<eos>", "cat")


def test_long_work_is_reported(tmp_path, monkeypatch, capsys):
    def wait(*_):
        time.sleep(0.3)
        return WordTokenizer("w", ["cat"])

    monkeypatch.setattr("famjax.data.train_tokenizer.build_word_list", wait)
    monkeypatch.setattr("famjax.cli.tokenizer.ticker", lambda report, *_: ticker(report, 0.1, 9))
    argv = ["tokenizer", "train", "FILES", "--kind", "words", "--out", str(tmp_path / "w.txt")]
    assert main(argv) == 0
    assert capsys.readouterr().err.startswith(
        "famjax: reading the texts and making the tokenizer, 0.1 s so far"
    )
