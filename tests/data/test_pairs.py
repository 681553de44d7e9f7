"""Pairs of files, and the rows that hold them."""

from __future__ import annotations

import gzip
import json
import random

import numpy as np
import pytest

from famjax.core.errors import UserError
from famjax.data.pair_rows import Lengths, Pair, PairSource, fits, pack, target_size
from famjax.data.pairs import Pairs, cut_source
from famjax.tokenizers.tokenizer import ByteTokenizer
from famjax.tokenizers.words import WordTokenizer

BYTES = ByteTokenizer()


def write(folder, sources, targets):
    """Write two files, and return their names."""
    files = folder / "a.src", folder / "a.tgt"
    for file, lines in zip(files, (sources, targets), strict=True):
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return [str(file) for file in files]


def natural(folder, count=300):
    """Pairs of lengths like those of sentences; a target tells which source it is of."""
    rng = random.Random(0)
    sizes = [min(max(int(rng.lognormvariate(2.6, 0.45)), 3), 40) for _ in range(count)]
    sources = [f"{i:03}" + "s" * size for i, size in enumerate(sizes)]
    targets = [f"{i:03}" + "t" * max(size + rng.randint(-3, 3), 0) for i, size in enumerate(sizes)]
    return Pairs(*write(folder, sources, targets))


def read_rows(rows, batches):
    iterator = iter(rows)
    return [next(iterator) for _ in range(batches)]


def unpack(batch):
    """Return source and target texts of all pairs in a batch."""
    found = []
    for row in range(len(batch["tokens"])):
        for number in range(1, batch["segment"][row].max() + 1):
            source = batch["source"][row][batch["source_segment"][row] == number]
            inside = batch["segment"][row] == number
            tokens, targets = batch["tokens"][row][inside], batch["targets"][row][inside]
            assert source[-1] == targets[-1] == BYTES.eos_id
            assert tokens[0] == BYTES.bos_id
            np.testing.assert_array_equal(tokens[1:], targets[:-1])
            found.append((BYTES.decode(source[:-1]), BYTES.decode(targets[:-1])))
    return found


# files


def test_lines_of_two_files_are_pairs(tmp_path):
    sources, targets = ["ein Haus", "", "drei"], ["a house", "two\u2028lines", ""]
    pairs = Pairs(*write(tmp_path, sources, targets))
    assert [pairs[i] for i in range(3)] == list(zip(sources, targets, strict=True))
    assert pairs.empty() == (1, 1)


def test_all_white_space_is_stripped(tmp_path):
    """As of the sources that are translated, so not ASCII's alone."""
    sources, targets = ["\u00a0ein Haus\u3000", "\u00a0"], ["a house ", "\u2003two"]
    pairs = Pairs(*write(tmp_path, sources, targets))
    assert [pairs[i] for i in range(2)] == [("ein Haus", "a house"), ("", "two")]
    assert pairs.empty() == (1, 0)
    records = [{"inputs": s, "targets": t} for s, t in zip(sources, targets, strict=True)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    same = Pairs(str(tmp_path / "a.jsonl"))
    assert [same[i] for i in range(2)] == [pairs[i] for i in range(2)]


def test_sources_are_cut_to_their_first_words(tmp_path):
    lines = ["eins zwei\u00a0drei  vier", "eins zwei drei", "", "\u00e4  \u00f6 \u00fc d e "]
    files = write(tmp_path, lines, ["a b c d e"] * 4)
    pairs = Pairs(*files, source_words=3)
    sources = ["eins zwei\u00a0drei", "eins zwei drei", "", "\u00e4  \u00f6 \u00fc"]
    assert [pairs[i][0] for i in range(4)] == sources
    assert {pairs[i][1] for i in range(4)} == {"a b c d e"}
    assert [pairs.cut_sources(count) for count in (None, 4, 3, 1, 0)] == [2, 2, 1, 1, 0]
    assert pairs.digest() != Pairs(*files).digest() == Pairs(*files, source_words=5).digest()
    assert "; 2 sources are cut to data.source_words=3; " in (
        PairSource(pairs, BYTES, Lengths(64, 64, 1), seed=0).report()
    )
    records = [json.dumps({"inputs": line, "targets": "x"}) for line in lines]
    (tmp_path / "a.jsonl").write_text("\n".join(records))
    same = Pairs(f"{tmp_path / 'a.jsonl'},{tmp_path / 'a.jsonl'}", source_words=3)
    assert [same[i][0] for i in range(8)] == [*sources, *sources]
    # the second file's sources come after the first one's
    assert [same.cut_sources(count) for count in (4, 5, 8)] == [2, 3, 4]


@pytest.mark.parametrize(
    ("text", "words", "cut"),
    [(" a b  c ", 2, "a b"), ("a b", 2, "a b"), (" a ", 0, "a"), ("a a a a", 1, "a"), ("", 3, "")],
)
def test_a_source_is_cut_after_a_word(text, words, cut):
    assert cut_source(text, words) == cut


def test_files_of_windows_are_read_as_others(tmp_path):
    (tmp_path / "source").write_bytes("\ufeffein Haus\r\nzwei\r\n".encode())
    (tmp_path / "target").write_bytes(b"a house\ntwo")
    pairs = Pairs(str(tmp_path / "source"), str(tmp_path / "target"))
    assert [pairs[i] for i in range(2)] == [("ein Haus", "a house"), ("zwei", "two")]


def test_files_are_decompressed_and_globs_sorted(tmp_path):
    for name in ("b", "a"):
        for side in ("src", "tgt"):
            path = tmp_path / f"{name}.{side}.gz"
            path.write_bytes(gzip.compress(f"{name} {side}\n".encode()))
    pairs = Pairs(str(tmp_path / "*.src.gz"), str(tmp_path / "*.tgt.gz"))
    assert [pairs[i] for i in range(2)] == [("a src", "a tgt"), ("b src", "b tgt")]


def test_a_file_that_is_named_twice_is_paired_twice(tmp_path):
    for name in ("a", "b", "x", "y"):
        (tmp_path / name).write_text(f"{name}1\n{name}2\n")
    a, b, x, y = (str(tmp_path / name) for name in ("a", "b", "x", "y"))
    pairs = Pairs(f"{a},{a},{b}", f"{x},{y},{y}")
    assert [pairs[i] for i in (0, 2, 4)] == [("a1", "x1"), ("a1", "y1"), ("b1", "y1")]
    source = PairSource(pairs, BYTES, Lengths(20, 20, 1), seed=0)
    paired = f"{a} with {x}, {a} with {y}, {b} with {y}"
    assert source.report().startswith(f"6 pairs of {paired}; ")
    # those of globs are paired by their order alone
    files = ",".join([a] * 6), ",".join([x] * 6)
    told = PairSource(Pairs(*files), BYTES, Lengths(20, 20, 1), seed=0).report()
    assert told.count(" with ") == 4
    assert " and 2 more; " in told
    assert " with " not in PairSource(Pairs(a, x), BYTES, Lengths(20, 20, 1), seed=0).report()


def test_json_lines_are_pairs(tmp_path):
    file = tmp_path / "pairs.jsonl"
    records = [{"inputs": "x", "targets": "y"}, {"prompt": "p", "response": "r"}]
    file.write_text("\n".join(map(json.dumps, records)))
    pairs = Pairs(str(file))
    assert [pairs[i] for i in range(2)] == [("x", "y"), ("p", "r")]


def test_files_that_are_no_pairs_are_refused(tmp_path):
    source, target = write(tmp_path, ["1", "2", "3"], ["1", "2"])
    with pytest.raises(UserError, match=r"3 lines and .* 2: line 3 of .*a\.src has no pair"):
        Pairs(source, target)
    with pytest.raises(UserError, match=r"names 2 files and data\.target=.* 1"):
        Pairs(f"{source},{target}", target)
    with pytest.raises(UserError, match=r"is not JSON lines"):
        Pairs(source)
    (tmp_path / "pairs.jsonl").write_text('{"inputs": "a", "targets": "b"}\n')
    with pytest.raises(
        UserError, match=r"pairs\.jsonl is JSON lines, which have targets .*; set data\.target="
    ):
        Pairs(str(tmp_path / "pairs.jsonl"), target)
    with pytest.raises(UserError, match=r"data\.source: no such file"):
        Pairs(str(tmp_path / "missing"), target)
    with pytest.raises(UserError, match=r"data\.source=''"):
        Pairs("", target)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"inputs": "a", "targets": "b"}\n{"text": "c"}\n')
    with pytest.raises(UserError, match=r"broken\.jsonl, line 2: is not a pair; .*; it has 'text'"):
        Pairs(str(broken))
    # other keys are no part of a pair
    more = tmp_path / "more.jsonl"
    more.write_text(
        '{"text": "c", "inputs": "a", "targets": "b"}\n{"prompt": "d", "response": "e"}\n'
    )
    assert list(Pairs(str(more))) == [("a", "b"), ("d", "e")]
    with pytest.raises(UserError, match=r"pairs\.jsonl is JSON lines, not lines of text"):
        Pairs(source, str(tmp_path / "pairs.jsonl"))
    for name in ("a.csv", "a.json"):
        (tmp_path / name).write_text("[1]\n")
        for both in ((source, str(tmp_path / name)), (str(tmp_path / name), source)):
            with pytest.raises(UserError, match=name.replace(".", r"\.")):
                Pairs(*both)
    with pytest.raises(UserError, match=r"tfds:x: write tfds:SET:SPLIT:FEATURE"):
        Pairs("tfds:x", "tfds:y")
    with pytest.raises(UserError, match="a data set cannot be part of a list; give it alone"):
        Pairs("a,tfds:x:train:de", "b,tfds:x:train:en")
    (tmp_path / "latin").write_bytes("für\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"not UTF-8 at byte 1"):
        Pairs(str(tmp_path / "latin"), target)
    broken.write_text('{"inputs": "a')
    with pytest.raises(UserError, match=r'line 1: not JSON.*line, \{"inputs": \.\.\., "targets": '):
        Pairs(str(broken))
    with pytest.raises(UserError, match="no pairs found"):
        Pairs(*write(tmp_path, [], []))


# rows


def test_each_epoch_has_every_pair_once_in_another_order(tmp_path):
    pairs = natural(tmp_path)
    source = PairSource(pairs, BYTES, Lengths(120, 120, 1), seed=3, window=100)
    epochs = [
        [text for number in windows for row in source.rows(number) for text in unpack(_batch(row))]
        for windows in (range(3), range(3, 6))
    ]
    everything = sorted(pairs[i] for i in range(len(pairs)))
    assert sorted(epochs[0]) == sorted(epochs[1]) == everything
    assert epochs[0] != epochs[1]


def test_batches_have_every_row_once(tmp_path):
    """Over the ends of windows, whose numbers of rows are not multiples of the batch."""
    pairs = natural(tmp_path)
    source = PairSource(pairs, BYTES, Lengths(60, 60, 1), seed=3, window=100)
    counts = [source.count_rows(window) for window in range(3)]
    batch = next(b for b in (3, 4, 5, 7) if any(count % b for count in counts[:2]))
    read = read_rows(source.make_rows(batch, None), sum(counts) // batch)
    found = [text for each in read for text in unpack(each)]
    rows = [unpack(_batch(row)) for window in range(3) for row in source.rows(window)]
    read_whole = rows[: sum(counts) // batch * batch]
    assert found == [text for row in read_whole for text in row]
    assert len(set(found)) == len(found) > 100


def test_a_pair_may_fill_a_row(tmp_path):
    """A source ends with a token, and a target begins with one."""
    pairs = Pairs(*write(tmp_path, ["a" * 9, "a" * 10], ["b" * 9, "b"]))
    source = PairSource(pairs, BYTES, Lengths(10, 10, 1), seed=0)
    (batch,) = read_rows(source.make_rows(1, None), 1)
    assert unpack(batch) == [("a" * 9, "b" * 9)]


def _batch(row):
    return {name: values[None] for name, values in row.items()}


def test_rows_of_sentences_are_at_most_a_tenth_padding(tmp_path):
    source = PairSource(natural(tmp_path, 2000), BYTES, Lengths(128, 128, 1), seed=0)
    report = source.report()
    assert report.startswith("2,000 pairs; rows are ")
    assert float(report.split("rows are ")[1].split("%")[0]) < 10


def test_the_report_says_where_much_padding_comes_from(tmp_path):
    pairs = natural(tmp_path, 2000)

    def told(source, target, block):
        lengths = Lengths(source, target, block)
        return PairSource(pairs, BYTES, lengths, seed=0).report().split("rows are ")[1]

    wide = told(256, 128, 1)
    wanted = int(wide.split("data.source_length=")[1].split()[0])
    assert wide.endswith(f"data.source_length={wanted} would suit data.length=128")
    assert "% of sources, " in wide
    # what it proposes is enough
    assert float(told(wanted, 128, 1).split("%")[0]) < 10
    assert told(128, 128, 16).endswith("; targets begin on blocks of model.block_len=16")
    few = PairSource(natural(tmp_path, 12), BYTES, Lengths(200, 200, 1), seed=0).report()
    assert few.endswith("% of targets)")


def test_a_target_begins_on_a_block(tmp_path):
    source = PairSource(natural(tmp_path), BYTES, Lengths(128, 128, 8), seed=0)
    for batch in read_rows(source.make_rows(4, None), 5):
        starts = np.argwhere(batch["reset"])
        assert (starts[:, 1] % 8 == 0).all()
        assert (batch["reset"].sum(1) == batch["segment"].max(1)).all()
        np.testing.assert_array_equal(batch["valid"], batch["segment"] > 0)
        np.testing.assert_array_equal(batch["weights"], batch["valid"].astype(np.float32))


def test_pairs_that_do_not_fit_are_left_out_and_told(tmp_path):
    pairs = Pairs(*write(tmp_path, ["ab", "a" * 50, "c"], ["x", "y", "z" * 50]))
    source = PairSource(pairs, BYTES, Lengths(20, 20, 1), seed=0)
    assert "2 are longer than data.source_length=20 or data.length=20 and left out" in (
        source.report()
    )
    (batch,) = read_rows(source.make_rows(1, None), 1)
    assert unpack(batch) == [("ab", "x")]
    with pytest.raises(UserError, match="none of 3 pairs fits"):
        read_rows(PairSource(pairs, BYTES, Lengths(2, 2, 1), seed=0).make_rows(1, None), 1)


def test_a_single_pair_is_told_as_one(tmp_path):
    pairs = Pairs(*write(tmp_path, ["", "a" * 50], ["x", "y"]))
    report = PairSource(pairs, BYTES, Lengths(20, 20, 1), seed=0).report()
    assert report.startswith("2 pairs; 1 has an empty source; 1 is longer than data.source_length=")
    (tmp_path / "a.src").write_text("b\n")
    (tmp_path / "a.tgt").write_text("c\n")
    pairs = Pairs(*(str(tmp_path / name) for name in ("a.src", "a.tgt")))
    report = PairSource(pairs, BYTES, Lengths(20, 20, 1), seed=0).report()
    assert report.startswith("1 pair; rows are ")


def test_pairs_left_out_of_later_windows_are_told_after_the_epoch(tmp_path):
    lines = ["a" * (50 if i % 5 == 0 else 2) for i in range(40)]
    pairs = Pairs(*write(tmp_path, lines, lines))
    source = PairSource(pairs, BYTES, Lengths(20, 20, 1), seed=0, window=16)
    first = sum(len(text) > 20 for text, _ in source._read_window(0))
    assert f"; {first} of the first 16 are longer than data.source_length=20" in source.report()
    told = []
    for row in source.make_rows(1, None):
        told.append(source.epoch_report())
        if source.count_rows.cache_info().currsize > 5:  # of two epochs
            break
        assert row["valid"].any()
    assert [line for line in told if line] == [
        "8 of 40 pairs are longer than data.source_length=20 or data.length=20 and left out"
    ]
    # a run that continues within an epoch tells after a whole one
    resumed = PairSource(pairs, BYTES, Lengths(20, 20, 1), seed=0, window=16)
    resumed.report()  # of the first window
    for window in (2, 3, 4):
        resumed.rows(window)
        assert not resumed.epoch_report()
    resumed.rows(5)
    assert resumed.epoch_report().startswith("8 of 40 pairs")
    assert not PairSource(pairs, BYTES, Lengths(20, 20, 1), seed=0).epoch_report()


def test_a_window_in_which_nothing_fits_is_passed_over(tmp_path):
    """The last window of an epoch has the pairs that are left, here one, which may be too long."""
    pairs = Pairs(*write(tmp_path, ["a" * 50, "b", "c"], ["x", "y", "z"]))
    for seed in range(6):  # in some orders the long one is the last
        source = PairSource(pairs, BYTES, Lengths(4, 4, 1), seed, window=2)
        rows = source.make_rows(1, None)
        read = {text for batch in read_rows(rows, 6) for text in unpack(batch)}
        assert read == {("b", "y"), ("c", "z")}


def test_a_batch_that_spans_windows_packs_each_of_them_once(tmp_path, monkeypatch):
    source = PairSource(natural(tmp_path), BYTES, Lengths(60, 60, 1), seed=1, window=60)
    packed = []
    read_window = source._read_window
    monkeypatch.setattr(source, "_read_window", lambda n: packed.append(n) or read_window(n))
    assert len(source.rows(0)) < 20
    read_rows(source.make_rows(40, None), 5)
    # counted, and then read: those of a batch's beginning are read again
    assert len(packed) <= 2 * (max(packed) + 1)


def test_targets_that_the_tokenizer_cannot_write_are_told(tmp_path):
    pairs = Pairs(*write(tmp_path, ["un chat", "zzz", "ab"], ["a  cat", "a dog", "a \ufffd"]))

    def report(tokenizer):
        return PairSource(pairs, tokenizer, Lengths(20, 20, 1), seed=0).report()

    words = WordTokenizer("words.txt", ["a", "cat", "\ufffd"])
    assert "; 1 target has text that tokenizer words.txt cannot write; " in report(words)
    assert "cannot write" not in report(BYTES)


def test_sources_that_the_tokenizer_cannot_read_are_told(tmp_path):
    pairs = Pairs(*write(tmp_path, ["un chat", "a dog", "a dog"], ["a cat"] * 3))
    words = WordTokenizer("words.txt", ["a", "cat", "dog"])
    report = PairSource(pairs, words, Lengths(20, 20, 1), seed=0).report()
    assert "; 1 source has text that tokenizer words.txt cannot read; " in report
    assert "cannot" not in PairSource(pairs, BYTES, Lengths(20, 20, 1), seed=0).report()


def test_targets_of_later_windows_that_cannot_be_written_are_told_after_the_epoch(tmp_path):
    targets = ["a dog" if i % 4 == 0 else "a cat" for i in range(40)]
    pairs = Pairs(*write(tmp_path, ["un chat"] * 40, targets))
    words = WordTokenizer("words.txt", ["a", "cat", "un"])
    source = PairSource(pairs, words, Lengths(20, 20, 1), seed=0, window=16)
    source.report()
    for window in range(3):
        source.rows(window)
    assert (
        source.epoch_report() == "10 of the targets have text that tokenizer words.txt cannot "
        "write; 40 of the sources have text that tokenizer words.txt cannot read"
    )
    assert not source.epoch_report()


def test_packing_keeps_to_both_lengths():
    rng = np.random.default_rng(0)
    pairs = [
        Pair(np.zeros(s, np.int32), np.zeros(t, np.int32)) for s, t in rng.integers(1, 31, (200, 2))
    ]
    lengths = Lengths(40, 48, 4)
    rows = pack(pairs, lengths)
    assert sum(map(len, rows)) == 200
    for row in rows:
        assert sum(len(pair.source) for pair in row) <= 40
        assert sum(target_size(pair, 4) for pair in row) <= 48
    assert all(fits(pair, lengths) for pair in pairs)
    assert not fits(Pair(np.zeros(5, np.int32), np.zeros(48, np.int32)), lengths)


def test_rows_continue_from_their_state(tmp_path):
    source = PairSource(natural(tmp_path), BYTES, Lengths(60, 60, 1), seed=1, window=64)
    rows = source.make_rows(3, None)
    iterator = iter(rows)
    for _ in range(40):  # over the ends of windows and of the epoch
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = [next(iterator) for _ in range(30)]
    again = iter(rows)
    again.set_state(state)
    for batch in expected:
        for name, values in next(again).items():
            np.testing.assert_array_equal(values, batch[name])


def test_processes_read_parts_of_the_same_batches(tmp_path):
    source = PairSource(natural(tmp_path), BYTES, Lengths(60, 60, 1), seed=1)
    whole, part = (read_rows(source.make_rows(4, rows), 6) for rows in (None, [1, 3]))
    for batch, local in zip(whole, part, strict=True):
        np.testing.assert_array_equal(batch["source"][[1, 3]], local["source"])


def test_a_run_does_not_continue_with_other_pairs(tmp_path, monkeypatch):
    source = PairSource(natural(tmp_path), BYTES, Lengths(60, 60, 1), seed=0)
    state = source.get_state()
    source.set_state(state)
    # each checkpoint has it, and it is a hash of all texts
    monkeypatch.setattr(source.pairs, "digest", pytest.fail)
    assert source.get_state() == state
    other = PairSource(natural(tmp_path, 299), BYTES, Lengths(60, 60, 1), seed=0)
    with pytest.raises(UserError, match=r"the pairs changed since the run was saved \(300 then"):
        other.set_state(state)


def test_runs_whose_targets_began_on_blocks_are_refused(tmp_path):
    pairs = Pairs(*write(tmp_path, ["ab", "c"], ["x", "y"]))
    old = PairSource(pairs, BYTES, Lengths(24, 24, 8), seed=0).get_state()
    new = PairSource(pairs, BYTES, Lengths(24, 24, 1), seed=0, ignores_blocks=True)
    with pytest.raises(UserError, match="saved by an older famjax"):
        new.set_state(old)
    new.set_state(new.get_state())
