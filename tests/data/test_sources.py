"""Every byte of the text is read once, in an order of the seed."""

import gzip
import itertools
import json
import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from source_helpers import OPENERS, TOKENIZER, epoch, make, text, tokens

from famjax.core.errors import UserError
from famjax.data.files import read_text_pieces
from famjax.data.hashes import fingerprint_contents
from famjax.data.parts import TextParts


@pytest.mark.parametrize("suffix", list(OPENERS))
def test_a_file_is_a_document_compressed_or_not(tmp_path, suffix, small_pieces):
    content = "first line\nzweite Zeile: äöü 漢字 without any whitespace-at-all\r\n" * 3
    with OPENERS[suffix](tmp_path / f"a.txt{suffix}", "wb") as file:
        file.write(content.encode())
    source = make(tmp_path / f"a.txt{suffix}")
    assert text(source, source.key(0, 1, 0)) == content
    assert "".join(read_text_pieces(str(tmp_path / f"a.txt{suffix}"))) == content
    whole = [TOKENIZER.bos_id, *TOKENIZER.encode(content), TOKENIZER.eos_id]
    np.testing.assert_array_equal(whole, tokens(source, source.key(0, 1, 0)))


@given(content=st.text(st.sampled_from("aß漢😀 \n"), min_size=1, max_size=200))
@settings(max_examples=50)
def test_pieces_are_cut_between_characters_and_resume_anywhere(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("pieces") / "a.txt"
    path.write_bytes(content.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("famjax.data.files.PIECE_BYTES", 8)
        assert all(len(piece.encode()) <= 16 for piece in read_text_pieces(str(path)))
        assert "".join(read_text_pieces(str(path))) == content
        source = make(path)
        pieces = [p.tokens for p in source.open(source.key(0, 1, 0))]
        for i in range(len(pieces)):
            np.testing.assert_array_equal(
                tokens(source, source.key(0, 1, 0), i), np.concatenate(pieces[i:])
            )


def test_pieces_are_cut_at_white_space(tmp_path, small_pieces):
    (tmp_path / "a.txt").write_text("12345 78901 3456789012345678901234")
    pieces = list(read_text_pieces(str(tmp_path / "a.txt")))
    assert (
        pieces == ["12345 78901", " 3456789", "01234567", "8901234"] or pieces[0] == "12345 78901"
    )
    assert pieces[1].startswith(" ")


def test_memory_does_not_grow_with_the_document(tmp_path):
    with open(tmp_path / "a.txt", "wb") as file:
        for _ in range(160):
            file.write(b"0123456 89abcde\n" * 6400)
    source = make(tmp_path)
    tracemalloc.start()
    total = sum(len(piece.tokens) for piece in source.open(source.key(0, 1, 0)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == 160 * 16 * 6400 + 2
    assert peak < 4_000_000


def test_weights_are_one_except_for_bos(tmp_path):
    (tmp_path / "a.txt").write_text("abc")
    source = make(tmp_path)
    pieces = list(source.open(source.key(0, 1, 0)))
    assert np.concatenate([p.weights for p in pieces]).tolist() == [0, 1, 1, 1, 1]
    assert all(p.tokens.dtype == np.int32 and p.weights.dtype == np.float32 for p in pieces)


def test_an_epoch_has_every_document_once_whatever_the_lanes(folder):
    for lanes in (1, 4, 30):
        lists = epoch(make(folder), lanes)
        assert sorted(itertools.chain(*lists)) == sorted(f"document {i}" for i in range(30))


def test_the_order_depends_on_seed_and_epoch_only(folder):
    keys = [make(folder, seed=1).key(0, 1, k) for k in range(60)]
    assert keys == [make(folder, seed=1).key(0, 1, k) for k in range(60)]
    assert keys == json.loads(json.dumps(keys))
    assert keys[:30] != [make(folder, seed=2).key(0, 1, k) for k in range(30)]
    assert keys[:30] != keys[30:]
    assert sorted(keys[:30]) == sorted(keys[30:])


@pytest.mark.parametrize("split", ["train", "holdout"])
def test_lanes_read_few_documents_in_different_orders(tmp_path, split):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"{i} " * 1000)
    source = make(tmp_path)
    begins = [text(source, source.key(lane, 8, 0)) for lane in range(8)]
    assert len(set(begins)) == 8
    assert {text(source, source.key(7, 8, k))[:2] for k in range(1, 20)} >= {"0 ", "1 ", "2 "}
    single = make(tmp_path / "0.txt", holdout=4, split=split)
    assert len({text(single, single.key(lane, 8, 0)) for lane in range(8)}) == 8


def count_tokens(source):
    keys = [source.key(0, 1, k) for k in range(source.document_count())]
    return [len(tokens(source, key)) for key in keys]


def test_tokens_of_an_epoch_are_estimated(folder, tmp_path):
    source = make(folder, holdout=5)
    assert source.epoch_tokens() == sum(count_tokens(source))
    assert source.epoch_tokens(16) == 16 * len(source)
    lines = tmp_path / "a.jsonl.gz"
    with gzip.open(lines, "wt") as file:
        file.writelines(json.dumps({"text": f"line {i}", "id": i}) + "\n" for i in range(20))
    assert make(lines).epoch_tokens() == sum(count_tokens(make(lines)))
    with gzip.open(tmp_path / "a.txt.gz", "wt") as file:
        file.write("of unknown size")
    assert make(tmp_path / "a.txt.gz").epoch_tokens() is None
    assert make(folder).epoch_tokens() is None


@pytest.mark.parametrize("split", ["train", "holdout"])
def test_the_estimate_reads_the_beginning_of_a_long_text(tmp_path, split, monkeypatch):
    (tmp_path / "a.txt").write_text("word " * 100_000)
    source = make(tmp_path / "a.txt", holdout=4, split=split)
    encoded, encode = [], source._tokenizer.encode
    monkeypatch.setattr(
        source._tokenizer, "encode", lambda text: encoded.append(text) or encode(text)
    )
    estimate = source.epoch_tokens()
    assert sum(map(len, encoded)) < 140_000
    monkeypatch.undo()
    assert estimate == pytest.approx(count_tokens(source)[0], rel=1e-3)


def test_the_estimate_counts_parts(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 1000)
    (tmp_path / "b.txt").write_text("word " * 100)
    source = TextParts(str(tmp_path), TOKENIZER, 0, 0, part_bytes=500)
    assert source.epoch_tokens() == sum(count_tokens(source)) == 5500 + 2 * 11


def test_files_of_one_name_are_not_held_out_together(tmp_path):
    """Given one by one, they would be; their folder tells them apart."""
    paths = [tmp_path / str(i) / "output.html" for i in range(20)]
    for path in paths:
        path.parent.mkdir()
        path.write_text(f"document {path.parent.name}")
    named = ",".join(map(str, paths))
    with pytest.raises(UserError, match=r"holds out 19 of 20 .* named output.html, .* folder"):
        make(named, holdout=20)
    splits = ("train", "holdout")
    counts = [len(epoch(make(tmp_path, holdout=20, split=split))[0]) for split in splits]
    assert sum(counts) == 20
    assert 1 <= counts[1] <= 5
    assert len(epoch(make(named, holdout=19))[0]) == 19


def test_holdout_is_disjoint_stable_and_never_empty(folder):
    train, held = make(folder, holdout=5), make(folder, holdout=5, split="holdout")
    train_texts, held_texts = set(epoch(train)[0]), set(epoch(held)[0])
    assert len(train_texts) + len(held_texts) == 30
    assert not train_texts & held_texts
    assert 1 <= len(held_texts) <= 15
    assert f"{len(held_texts)} held out" in train.report()
    assert set(epoch(make(folder, seed=9, holdout=5, split="holdout"))[0]) == held_texts
    few = f"{folder}/00.txt,{folder}/01.txt"
    assert len(epoch(make(few, holdout=1000, split="holdout"))[0]) == 1
    assert len(epoch(make(few, holdout=2))[0]) == 1


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".jsonl"])
def test_the_tail_of_a_single_document_is_held_out(tmp_path, suffix):
    content = "wörd " * 1000
    data = json.dumps({"text": content}) if suffix == ".jsonl" else content
    opener = gzip.open if suffix.endswith(".gz") else open
    with opener(tmp_path / f"a{suffix}", "wb") as file:
        file.write(data.encode())
    train, held = make(tmp_path, holdout=10), make(tmp_path, holdout=10, split="holdout")
    head, tail = (text(source, source.key(0, 1, 0)) for source in (train, held))
    assert head + tail == content
    assert 550 < len(tail.encode()) <= 600
    assert "its last 9.9% held out" in train.report()


def test_a_file_of_one_byte_is_a_document(tmp_path):
    (tmp_path / "a").write_text("x")
    source = make(tmp_path / "a", holdout=20)
    assert {text(source, source.key(lane, 4, 0)) for lane in range(4)} <= {"x", ""}
    assert text(source, source.key(0, 1, 0)) == "x"
    with pytest.raises(UserError, match="too short to hold out"):
        make(tmp_path / "a", holdout=20, split="holdout")


def test_invalid_holdouts_are_rejected(folder):
    for holdout in (-1, 1):
        with pytest.raises(UserError, match="must be 0"):
            make(folder, holdout=holdout)
    with pytest.raises(UserError, match=r"nothing was held out.*; give --tasks text:FILES"):
        make(folder, split="holdout")


def test_a_document_deleted_since_the_save_is_an_error(folder):
    with pytest.raises(UserError, match="changed since the run was saved"):
        tokens(make(folder), [str(folder / "99.txt"), 0, 0])


def test_a_run_continues_where_its_folder_was_moved(folder, tmp_path_factory):
    """As `data.files=~/texts` is in another home."""
    moved = tmp_path_factory.mktemp("home") / folder.name
    (folder / "sub").mkdir()
    (folder / "sub" / "07.txt").write_text("another")
    saved = make(folder)
    state, keys = saved.get_state(), [saved.key(0, 1, k) for k in range(31)]
    said = [text(saved, key) for key in keys]
    folder.rename(moved)
    source = make(moved)
    source.set_state(state)
    assert [text(source, key) for key in keys] == said
    assert source.name(keys[0]) == keys[0][0]
    for damaged in (None, 5, "07.txt", f"{folder}/08.tx"):
        with pytest.raises(UserError, match="changed since the run was saved"):
            text(source, [damaged, 0, 0])


def test_a_hash_of_contents_sees_what_changed(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"x" * 10_000)
    before = [fingerprint_contents([file], whole) for whole in (1 << 20, 0)]
    assert [fingerprint_contents([file], whole) for whole in (1 << 20, 0)] == before
    changed = os.stat(file).st_mtime_ns
    file.write_bytes(b"x" * 5000 + b"y" + b"x" * 4999)
    assert fingerprint_contents([file]) != before[0]
    # of a large file the time of change is seen, and both ends
    assert fingerprint_contents([file], 0) != before[1]
    os.utime(file, ns=(changed, changed))
    assert fingerprint_contents([file], 0) == before[1]
    file.write_bytes(b"x" * 9999 + b"y")
    os.utime(file, ns=(changed, changed))
    assert fingerprint_contents([file], 0) != before[1]
