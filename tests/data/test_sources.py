"""Every byte of the text is read once, in an order of the seed; mistakes are one-line errors."""

import builtins
import errno
import gc
import gzip
import itertools
import json
import lzma
import os
import re
import resource
import shutil
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from famjax.core.errors import UserError
from famjax.data.files import check_text, read_text_pieces, zstd
from famjax.data.find_files import find_files, list_files
from famjax.data.hashes import fingerprint_contents
from famjax.data.json_lines import parse_record
from famjax.data.parts import TextParts
from famjax.data.plain_text import PlainTextWriter
from famjax.data.sources import TextSource
from famjax.tokenizers.load import load_tokenizer

TOKENIZER = load_tokenizer("bytes")
OPENERS = {"": open, ".gz": gzip.open, ".xz": lzma.open, ".zst": zstd.open}


def make(files, seed=0, holdout=0, split="train"):
    return TextSource(str(files), TOKENIZER, seed, holdout, split)


def tokens(source, key, piece=0):
    return np.concatenate([p.tokens for p in source.open(key, piece)])


def text(source, key):
    ids = tokens(source, key)
    assert ids[0] == TOKENIZER.bos_id
    assert ids[-1] == TOKENIZER.eos_id
    return TOKENIZER.decode(ids)


def epoch(source, lanes=1):
    """Return the first epoch of lanes 0 to lanes - 1; there are at least as many documents."""
    count = len(source._documents)
    return [
        [text(source, source.key(lane, lanes, k)) for k in range(len(range(lane, count, lanes)))]
        for lane in range(lanes)
    ]


@pytest.fixture
def folder(tmp_path):
    for i in range(30):
        (tmp_path / f"{i:02}.txt").write_text(f"document {i}")
    return tmp_path


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr("famjax.data.files.PIECE_BYTES", 8)


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


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_line_of_jsonl_is_a_document(tmp_path, suffix):
    opener = gzip.open if suffix else open
    with opener(tmp_path / f"a.jsonl{suffix}", "wt") as file:
        file.writelines(json.dumps({"text": f"zeile ü {i}", "id": i}) + "\n" for i in range(20))
        file.write("\r\n  \n" + json.dumps({"text": "no newline behind"}))
    documents = epoch(make(tmp_path))[0]
    assert sorted(documents) == sorted([*(f"zeile ü {i}" for i in range(20)), "no newline behind"])


def test_inputs_of_jsonl_have_weight_zero(tmp_path, small_pieces):
    lines = [
        {"inputs": "what is two and two? ", "targets": "four, äh, five", "id": 1},
        {"inputs": "", "targets": "no question"},
        {"text": "plain", "targets": "not read"},
        {"text": None, "inputs": "a ", "targets": "b"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = make(tmp_path / "a.jsonl")
    found = set()
    for k in range(4):
        key = source.key(0, 1, k)
        whole = list(source.open(key))
        for skip in range(len(whole)):
            np.testing.assert_equal(list(source.open(key, skip)), whole[skip:])
        tokens = np.concatenate([piece.tokens for piece in whole])
        weights = np.concatenate([piece.weights for piece in whole])
        found.add(tuple(TOKENIZER.decode(tokens[1:-1][weights[1:-1] == w]) for w in (0, 1)))
        assert weights[0] == 0
        assert weights[-1] == 1
    asked = ("what is two and two? ", "four, äh, five")
    assert found == {asked, ("", "no question"), ("", "plain"), ("a ", "b")}


@pytest.mark.parametrize("targets", ["yes", "a much longer answer than its question " * 9])
def test_inputs_keep_their_weight_where_a_document_is_cut(tmp_path, small_pieces, targets):
    inputs = "is it so, is it really so? " * 4
    (tmp_path / "a.jsonl").write_text(json.dumps({"inputs": inputs, "targets": targets}))
    text, found = inputs + targets, ""
    for split in ("train", "holdout"):
        source = make(tmp_path, holdout=2, split=split)
        for lane in (2, 1, 0):  # lanes start at different parts
            key = source.key(lane, 3, 0)
            pieces = list(source.open(key))
            tokens = np.concatenate([piece.tokens for piece in pieces])[1:-1]
            weights = np.concatenate([piece.weights for piece in pieces])[1:-1]
            expected = np.arange(key[2], key[2] + len(tokens)) >= len(inputs)
            np.testing.assert_equal(weights, expected)
            assert TOKENIZER.decode(tokens) in text
        found += TOKENIZER.decode(tokens)
    assert found == text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "line 1002: not JSON"),
        ('{"txt": "x"}', "line 1002: no \"text\".*it has 'txt'"),
        ('{"text": "x"', "line 1002: not JSON"),
        ('{"prompt": "x"}', 'line 1002: no "text"'),
        ('{"messages": []}', 'line 1002: "messages" needs a tokenizer with a chat template'),
        (b'{"text": "na\xefve"}', "line 1002: not UTF-8 at byte 12 of the line"),
        ('{"text": 5}', 'line 1002: "text" is a number, not a string; write it as a string'),
        ('{"text": null}', 'line 1002: "text" is null, not a string'),
        ("[1]", "line 1002: a list instead of an object"),
        ('"text"', "line 1002: a string instead of an object"),
        ("null", "line 1002: null instead of an object"),
        ('{"inputs": "x"}', 'line 1002: no "text", and neither "inputs" and "targets"'),
        ('{"targets": "x"}', 'line 1002: no "text"'),
        ('{"inputs": 5, "targets": "x"}', 'line 1002: "inputs" is a number, not a string'),
        ('{"text": "\\ud800"}', "line 1002: not JSON with valid text"),
    ],
)
@pytest.mark.parametrize("suffix", list(OPENERS))
def test_a_bad_line_of_jsonl_is_named_before_anything_is_read(tmp_path, line, message, suffix):
    data = line if isinstance(line, bytes) else line.encode()
    path = tmp_path / f"a.jsonl{suffix}"
    with OPENERS[suffix](path, "wb") as file:
        # after the part that is probed
        file.write(b'{"text": "fine"}\n' * 1000 + b"\n" + data + b"\n" + b'{"text": "more"}\n')
    with pytest.raises(UserError, match=message) as error:
        make(path)
    assert str(error.value).startswith(f"{path}, line 1002: ")
    assert "\n" not in str(error.value)


TURNS = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]


@pytest.mark.parametrize(
    ("record", "converted"),
    [
        ({"instruction": "a", "output": "b"}, {"prompt": "a", "response": "b"}),
        ({"instruction": "a", "input": "", "output": "b"}, {"prompt": "a", "response": "b"}),
        ({"instruction": "a", "input": "c", "output": "b"}, {"prompt": "a\n\nc", "response": "b"}),
        ({"prompt": "a", "completion": "b"}, {"prompt": "a", "response": "b"}),
        (
            {"conversations": [{"from": "system", "value": "be kind"}, *TURNS]},
            {
                "messages": [
                    {"role": "system", "content": "be kind"},
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": "yo"},
                ]
            },
        ),
        (
            {"conversations": [{"role": "assistant", "content": "yo"}]},
            {"messages": [{"role": "assistant", "content": "yo"}]},
        ),
    ],
)
def test_records_of_other_programs_come_with_a_conversion(tmp_path, record, converted):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match="a form that is not read; convert the file with") as error:
        make(path)
    assert f"it has {', '.join(map(repr, record))}, a form" in str(error.value)
    program = re.search(r"jq -c '(.*)' OLD.jsonl > NEW.jsonl$", str(error.value))[1]
    if not shutil.which("jq"):
        pytest.skip("jq is not installed")
    command = ["jq", "-c", program, str(path)]
    assert json.loads(subprocess.run(command, check=True, capture_output=True).stdout) == converted


@pytest.mark.parametrize("content", ['{"text": ""}\n{"text": ""}\n', '{"inputs":"","targets":""}'])
def test_documents_that_are_all_empty_are_rejected(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"a\.jsonl: all documents are empty; give one with text"):
        make(tmp_path / "a.jsonl")
    (tmp_path / "b.txt").write_text("x")
    assert "" in epoch(make(tmp_path))[0]


@pytest.mark.parametrize("name", ["a.ndjson", "a.ndjson.gz", "A.JSONL"])
def test_other_names_of_json_lines(tmp_path, name):
    opener = gzip.open if name.endswith(".gz") else open
    with opener(tmp_path / name, "wt") as file:
        file.write('{"text": "one"}\n{"text": "two"}\n')
    source = make(tmp_path / name)
    assert sorted(epoch(source)[0]) == ["one", "two"]
    assert source.text_bytes is None


RECORDS = [{"id": 1, "text": "one"}, {"id": 2, "text": "two"}]


@pytest.mark.parametrize("suffix", list(OPENERS))
@pytest.mark.parametrize("indent", [None, 2])
def test_json_that_is_named_comes_with_a_conversion(tmp_path, suffix, indent):
    path = tmp_path / f"my file.json{suffix}"
    with OPENERS[suffix](path, "wb") as file:
        file.write(json.dumps(RECORDS, indent=indent).encode())
    with pytest.raises(UserError, match=r"JSON is read as \.jsonl, one object on") as error:
        make(path)
    command = re.search("line; run (.*), or rename it to .txt", str(error.value))[1]
    if not shutil.which("jq"):
        pytest.skip("jq is not installed")
    subprocess.run(command, shell=True, check=True)
    assert sorted(epoch(make(tmp_path / "my file.jsonl"))[0]) == ["one", "two"]


@pytest.mark.parametrize("suffix", list(OPENERS))
@pytest.mark.parametrize(("ending", "separator"), [(".csv", ","), (".TSV", "\t")])
def test_a_table_that_is_named_comes_with_a_conversion(tmp_path, suffix, ending, separator):
    path = tmp_path / f"my file{ending}{suffix}"
    with OPENERS[suffix](path, "wb") as file:
        file.write(f'id{separator}text\n1{separator}"one, ""1"""\n2{separator}two\n'.encode())
    with pytest.raises(UserError, match=r"a table is not read as text; run ") as error:
        make(path)
    command = re.search("text; run (.*), or rename it to .txt", str(error.value))[1]
    if suffix == ".zst" and not shutil.which("zstd"):
        pytest.skip("zstd is not installed")
    subprocess.run(command, shell=True, check=True)
    assert sorted(epoch(make(tmp_path / "my file.jsonl"))[0]) == ['one, "1"', "two"]


def test_a_table_is_a_text_beside_other_files(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n")
    for files in (tmp_path, f"{tmp_path}/*.csv"):
        with pytest.raises(UserError, match=r"data\.files=.*a\.csv: a table is not read as text"):
            make(files)
    (tmp_path / "a.py").write_text("pass")
    assert sorted(epoch(make(tmp_path))[0]) == ["a,b\n", "pass"]


def test_lines_in_a_json_file_are_renamed(tmp_path):
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    (tmp_path / "a.json").write_text(lines)
    with pytest.raises(
        UserError, match=r"a\.json: has JSON lines; rename it to \.jsonl, or to \.txt"
    ):
        make(tmp_path / "a.json")
    (tmp_path / "a.json").write_text('{\n"text": "one"\n}\n{"text": "two"}\n')
    with pytest.raises(UserError, match=r"one object on each line; run jq -c \. .*a\.json > "):
        make(tmp_path / "a.json")


def test_json_is_a_text_beside_other_files(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(RECORDS))
    for files in (tmp_path, f"{tmp_path}/*.json"):
        with pytest.raises(UserError, match=r"data\.files=.*a\.json: JSON is read as \.jsonl"):
            make(files)
    (tmp_path / "settings.json").write_text('{"width": 4}')
    assert len(epoch(make(tmp_path))[0]) == 2
    (tmp_path / "settings.json").unlink()
    (tmp_path / "a.py").write_text("pass")
    assert sorted(epoch(make(tmp_path))[0]) == [json.dumps(RECORDS), "pass"]


@pytest.mark.parametrize("content", [b"ARROW1\0ab", b"ARROW1\xefab"])
def test_formats_that_are_not_text(tmp_path, content):
    (tmp_path / "a.arrow").write_bytes(content)
    said = r"a\.arrow: \.arrow is not text; write it as \.jsonl, \.parquet or \.txt$"
    with pytest.raises(UserError, match=said):
        make(tmp_path / "a.arrow")
    (tmp_path / "b.txt").write_text("x")
    assert "skipped 1 " in make(tmp_path).report()


def test_the_reader_accepts_scanned_lines_and_names_a_changed_one(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": "good"}\n')
    source = make(path)
    path.write_text('{"text": "fine"}\n{"txet": "good"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 2: no \"text\".*it has 'txet'"):
        epoch(source)


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_long_scan_reports_its_progress(tmp_path, monkeypatch, capsys, name):
    # progress is reported by MiB
    (tmp_path / name).write_text(('{"text": "' + "fine" * 2**18 + '"}\n') * 30)
    make(tmp_path)
    assert capsys.readouterr().err == ""
    seconds = itertools.count()
    monkeypatch.setattr("famjax.data.files.time.monotonic", lambda: float(next(seconds)))
    make(tmp_path)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3  # at 6, 13 and 27 seconds
    assert said[0].startswith("famjax: reading data.files: 6 MB so far, 1 MB/s, now in ")
    assert said[0].endswith(name)


@pytest.mark.parametrize(
    "suffix", [".gz", *(pytest.param(suffix, marks=pytest.mark.long) for suffix in (".xz", ".zst"))]
)
def test_a_long_seek_in_a_compressed_text_is_reported(tmp_path, monkeypatch, capsys, suffix):
    with OPENERS[suffix](tmp_path / f"a.txt{suffix}", "wb") as file:
        file.write(b"word " * 1_500_000)
    plain, seconds = tmp_path / "a.txt", itertools.count()
    plain.write_bytes(b"word " * 1_500_000)

    def open_source(name):
        return TextSource(str(tmp_path / name), TOKENIZER, 0, 10, checked=tmp_path / f"{name}.json")

    for name in (f"a.txt{suffix}", "a.txt"):
        open_source(name).save_checked()
    monkeypatch.setattr("famjax.data.files.time.monotonic", lambda: float(next(seconds)))
    source = open_source(f"a.txt{suffix}")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == (
        f"famjax: reading data.files: 6 MB so far, 1 MB/s, now in {tmp_path / 'a.txt'}{suffix}"
    )
    other = open_source("a.txt")
    assert capsys.readouterr().err == ""
    assert epoch(source) == epoch(other)


@pytest.mark.parametrize("suffix", list(OPENERS))
def test_a_line_too_long_for_memory_is_rejected(tmp_path, monkeypatch, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    with OPENERS[suffix](path, "wb") as file:
        file.write(b'{"text": "fine"}\n{"text": "' + b"a" * 100 + b'"}\n')
    source = make(path)
    monkeypatch.setattr("famjax.data.json_lines._MAX_LINE_BYTES", 100)
    said = r"a\.jsonl.*, line 2: more than 100 bytes; write so long a document to a text file"
    with pytest.raises(UserError, match=said):
        make(path)
    with pytest.raises(UserError, match=said):
        epoch(source)  # the line has grown since the scan


def test_no_disk_space_for_a_decompressed_file_is_an_error(tmp_path, monkeypatch):
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write('{"text": "fine"}\n')
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"a\.jsonl\.gz: its text could not be written to .*TMPDIR"):
        make(tmp_path)


def test_decompressed_files_are_closed_and_deleted_with_the_source(tmp_path, monkeypatch):
    (tmp_path / "spool").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "spool"))
    for number in range(40):
        with gzip.open(tmp_path / f"{number}.jsonl.gz", "wt") as file:
            file.write(f'{{"text": "{number}"}}\n')
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 20, hard))
    try:
        source = make(f"{tmp_path}/*.gz")
        assert sorted(epoch(source)[0], key=int) == [str(number) for number in range(40)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list((tmp_path / "spool").glob("*/*"))) == 40
    del source
    gc.collect()
    assert list((tmp_path / "spool").glob("*/*")) == []


def test_decompressed_files_of_killed_processes_are_removed(tmp_path, monkeypatch):
    """Those of a process that runs are kept until it ends, and other folders for ever."""
    copy = (
        "from famjax.data.plain_text import PlainTextWriter\n"
        "writer = PlainTextWriter('a.gz')\n"
        "writer.close()\n"
        "print(writer.plain.path, flush=True)\n"
        "input()\n"
    )

    def start():
        command, pipe = [sys.executable, "-c", copy], subprocess.PIPE
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    (tmp_path / "famjax-copies-of_mine_").mkdir()
    (tmp_path / "famjax-copies-of_mine_" / "a.txt").write_text("word")
    with start() as killed, start() as running:
        paths = [process.stdout.readline().strip() for process in (killed, running)]
        assert all(os.path.exists(path) for path in paths)
        killed.kill()
        killed.wait()
        assert os.path.exists(paths[0])
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        writer = PlainTextWriter("b.gz")
        assert [os.path.exists(path) for path in paths] == [False, True]
        running.communicate("\n")
    writer.close()
    folders = {os.path.dirname(writer.plain.path), str(tmp_path / "famjax-copies-of_mine_")}
    assert {str(path) for path in tmp_path.iterdir()} == folders
    assert (tmp_path / "famjax-copies-of_mine_" / "a.txt").exists()


def test_files_are_found_by_folder_glob_and_list(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ["a.txt", "b.md", "sub/c.py", ".d.txt", ".hidden/e.txt"]:
        (tmp_path / name).write_text(name)
    (tmp_path / "binary").write_bytes(b"ab\0c")
    (tmp_path / "latin").write_bytes(b"na\xefve text")
    (tmp_path / "empty").write_bytes(b"")
    source = make(tmp_path)
    assert sorted(epoch(source)[0]) == ["a.txt", "b.md", "sub/c.py"]
    size = sum((tmp_path / name).stat().st_size for name in ("a.txt", "b.md", "sub/c.py"))
    skipped = "skipped 1 binary, 1 empty, 2 hidden, 1 not UTF-8"
    report = f"3 documents, {size} bytes, none held out; {skipped}"
    assert source.report() == report
    assert epoch(make(f"{tmp_path}/**/*.py"))[0] == ["sub/c.py"]
    assert sorted(epoch(make(f"{tmp_path}/a.txt, {tmp_path}/b.*, {tmp_path}/a.txt"))[0]) == [
        "a.txt",
        "b.md",
    ]


def test_names_may_have_commas(tmp_path):
    for name in ("Melville, Herman.txt", "b.txt", "c,d"):
        (tmp_path / name).write_text(name)
    both = f"{tmp_path}/Melville, Herman.txt, {tmp_path}/b.txt"
    assert sorted(epoch(make(both))[0]) == ["Melville, Herman.txt", "b.txt"]
    assert list_files(f"{tmp_path}/b.txt,{tmp_path}/c,d", "data.source") == [
        f"{tmp_path}/b.txt",
        f"{tmp_path}/c,d",
    ]
    (tmp_path / "c").write_text("c")
    assert list_files(f"{tmp_path}/c,d", "data.source") == [f"{tmp_path}/c,d"]
    with pytest.raises(UserError, match=r"no such file or folder: .*/x"):
        make(f"{tmp_path}/x, y,{tmp_path}/b.txt")


def test_a_byte_order_mark_is_not_text(tmp_path, small_pieces):
    (tmp_path / "a.txt").write_text("first and second", encoding="utf-8-sig")
    source = make(tmp_path)
    assert epoch(source)[0] == ["first and second"]
    whole = tokens(source, source.key(0, 1, 0))
    for piece in range(1, 4):
        rest = tokens(source, source.key(0, 1, 0), piece)
        np.testing.assert_array_equal(rest, whole[len(whole) - len(rest) :])
    # held-out tails and parts begin elsewhere
    (tmp_path / "a.txt").write_text("word " * 40, encoding="utf-8-sig")
    halves = [make(tmp_path, holdout=2, split=split) for split in ("train", "holdout")]
    assert "".join(text for half in halves for text in half.texts()) == "word " * 40
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(UserError, match="no text found; skipped 1 empty"):
        make(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb")
    with pytest.raises(UserError, match="not UTF-8"):
        make(tmp_path / "a.txt")


def test_folders_follow_links_like_globs(tmp_path):
    for name in ("folder/b", "folder/b/inner", "elsewhere/deep"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    for name in ("folder/z.txt", "folder/b/b.txt", "elsewhere/e.txt", "elsewhere/deep/d.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "folder" / "a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "folder" / "again").symlink_to(tmp_path / "elsewhere" / "deep")
    (tmp_path / "folder" / "own").symlink_to(tmp_path / "folder" / "b")
    (tmp_path / "folder" / "b" / "inner" / "up").symlink_to(tmp_path / "folder")
    (tmp_path / "folder" / "system").symlink_to("/proc")
    (tmp_path / "folder" / "broken").symlink_to(tmp_path / "none")
    folder = str(tmp_path / "folder")
    found = find_files(folder)[0]
    # by their own paths first
    assert [file.name for file in found] == ["z.txt", "b/b.txt", "a/e.txt", "a/deep/d.txt"]
    assert {file.path for file in find_files(f"{folder}/**/*.txt")[0]} == {f.path for f in found}


def test_an_empty_name_does_not_read_pythons_library():
    source = make("", holdout=20)
    assert "documents" in source.report()
    names = [key[0] for key in (source.key(0, 1, k) for k in range(100))]
    assert all(name.endswith(".py") and "site-packages" not in name for name in names)


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


def test_named_files_must_be_text(tmp_path):
    (tmp_path / "binary").write_bytes(b"ab\0c")
    (tmp_path / "latin").write_bytes(b"na\xefve text")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "none").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match="names no file"):
        make(" ,,")
    for name, message in [
        ("binary", "binary, byte 2 is zero"),
        ("latin", "not UTF-8 at byte 2; convert it"),
        ("empty", "no text found; skipped 1 empty"),
        ("none", "no text found"),
        ("latim", f"no such file or folder: .*latim; did you mean '{tmp_path}/latin'"),
        ("nowhere/x", f"no such file or folder: .*; there is no folder {tmp_path}/nowhere"),
        ("*.x", "no such file or folder"),
        ("a\0b", "names no file"),
        ("dangling", f"dangling is a link to {tmp_path}/gone, which is missing"),
    ]:
        with pytest.raises(UserError, match=message):
            make(tmp_path / name)
    with pytest.raises(UserError, match="empty"):
        list(read_text_pieces(str(tmp_path / "empty")))


def deny_permission(monkeypatch, *paths):
    """Deny permission to folders and files, also to root."""
    refused = {str(path) for path in paths}
    scandir, opened = os.scandir, builtins.open

    def scan(path="."):
        if str(path) in refused:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    def read(path, *args, **kwargs):
        if str(path) in refused:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "scandir", scan)
    monkeypatch.setattr(builtins, "open", read)


def test_missing_permission_is_reported(folder, monkeypatch):
    (folder / "sub").mkdir()
    (folder / "sub" / "a.txt").write_text("words")
    message = "no permission to read it; chmod it"
    for refused, files in [
        (folder, folder),
        (folder, f"{folder}/*.txt"),
        (folder, f"{folder}/none.txt"),
        (folder / "sub", folder / "sub"),
        (folder, f"{folder}/**/*.txt"),
        (folder / "03.txt", folder),
        (folder / "03.txt", folder / "03.txt"),
    ]:
        with monkeypatch.context() as patch:
            deny_permission(patch, refused)
            with pytest.raises(UserError) as error:
                make(files)
        assert str(error.value).startswith(f"{refused}: {message}"), files


def test_unreadable_subfolders_are_counted(folder, monkeypatch):
    count = len(make(folder))
    for name in ("lost+found", "root/own"):
        (folder / name).mkdir(parents=True)
        (folder / name / "a.txt").write_text("words")
    deny_permission(monkeypatch, folder / "lost+found")
    for files in (folder, f"{folder}/**/*.txt"):
        source = make(files)
        assert len(source) == count + 1
        assert source.report().endswith("; skipped 1 folder without permission")
    deny_permission(monkeypatch, folder / "root")
    assert make(folder).report().endswith("; skipped 2 folders without permission")
    with pytest.raises(UserError, match="no text found; skipped 1 folder without permission"):
        make(f"{folder}/r*/**")
    with pytest.raises(UserError, match=r"no such file or folder: .*/nope"):
        make(f"{folder}, {folder}/nope")


def test_checked_lines_are_not_checked_again(tmp_path, monkeypatch):
    record = tmp_path / "record.json"
    for suffix, opener in OPENERS.items():
        with opener(tmp_path / f"a.jsonl{suffix}", "wb") as file:
            file.write(b'{"text": "fine"}\n\n{"text": "more"}\n')
    files = [tmp_path / f"a.jsonl{suffix}" for suffix in OPENERS]
    checked = []

    def parse(line, template):
        checked.append(line)
        return parse_record(line, template)

    monkeypatch.setattr("famjax.data.scan.parse_record", parse)

    def checks(save=True):
        checked.clear()
        given = ",".join(map(str, files))
        source = TextSource(given, TOKENIZER, seed=0, holdout=0, checked=record)
        if save:
            source.save_checked()
        assert len(source) == 2 * len(OPENERS)
        return len(checked)

    assert checks(save=False) == 2 * len(OPENERS)
    assert checks() == 2 * len(OPENERS)
    assert checks() == 0
    before = os.stat(files[0])
    files[0].write_bytes(b'{"text": "five"}\n\n{"text": "four"}\n')
    os.utime(files[0], ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert checks() == 2
    assert checks() == 0
    for damaged in (
        "",
        "[]",
        '{"files": 1}',
        record.read_text().replace('"rules": [', '"rules": [0, '),
    ):
        record.write_text(damaged)
        assert checks() == 2 * len(OPENERS)
    record.unlink()
    record.mkdir()
    assert checks() == 2 * len(OPENERS)  # when the result cannot be saved either


@pytest.mark.parametrize("count", [1, 40_000, 300_000])
@pytest.mark.parametrize("rest", [b"", b" word" * 9])
def test_error_names_undecodable_bytes_far_into_a_file(tmp_path, count, rest):
    """Before anything is read; in a folder, the file is skipped."""
    (tmp_path / "a.txt").write_bytes(b"word " * count + b"\xe4" + rest)
    with pytest.raises(UserError, match=rf"a\.txt: not UTF-8 at byte {5 * count};"):
        make(tmp_path / "a.txt")
    with pytest.raises(UserError, match=r"no text found; skipped 1 not UTF-8"):
        make(tmp_path)
    (tmp_path / "b.txt").write_text("word")
    assert make(tmp_path).report() == "1 document, 4 bytes, none held out; skipped 1 not UTF-8"
    assert len(make(tmp_path)) == 1


def test_a_character_may_be_anywhere_in_a_large_file(tmp_path):
    content = "x" * ((1 << 20) - 1) + "äöü" * 400_000
    (tmp_path / "a.txt").write_text(content)
    assert "".join(make(tmp_path).texts()) == content


def test_a_file_that_changes_is_an_error_when_it_is_read(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"word " * 40_000)
    source = make(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"word " * 39_999 + b"wor\xe4 ")
    with pytest.raises(UserError, match=r"a\.txt: not UTF-8 at byte 199998"):
        tokens(source, source.key(0, 1, 0))


def test_checked_texts_are_not_checked_again(tmp_path, monkeypatch):
    record = tmp_path / "record.json"
    (tmp_path / "texts").mkdir()
    for name, end in (("a.txt", b""), ("bad.txt", b"\xe4")):
        (tmp_path / "texts" / name).write_bytes(b"word " * 40_000 + end)
    (tmp_path / "texts" / "short.txt").write_bytes(b"word")
    checked = []

    def check(path, explicit, progress):
        checked.append(os.path.basename(path))
        return check_text(path, explicit, progress)

    monkeypatch.setattr("famjax.data.scan.check_text", check)
    for known in ((), ("a.txt",)):
        source = TextSource(str(tmp_path / "texts"), TOKENIZER, 0, 0, checked=record)
        assert source.report().endswith("; skipped 1 not UTF-8")
        assert sorted(checked) == sorted({"a.txt", "bad.txt"} - {*known})
        source.save_checked()
        checked.clear()
    (tmp_path / "texts" / "a.txt").write_bytes(b"word " * 40_001)
    TextSource(str(tmp_path / "texts"), TOKENIZER, 0, 0, checked=record)
    assert sorted(checked) == ["a.txt", "bad.txt"]


def test_error_names_zeros_far_into_a_file(tmp_path):
    """As a crash may leave them at the end of a file."""
    (tmp_path / "a.txt").write_bytes(b"word " * 40_000 + bytes(9))
    with pytest.raises(UserError, match=r"a\.txt: binary, byte 200000 is zero"):
        make(tmp_path / "a.txt")
    with pytest.raises(UserError, match=r"no text found; skipped 1 binary"):
        make(tmp_path)
    with pytest.raises(UserError, match=r"a\.txt: binary, byte 200000 is zero"):
        list(read_text_pieces(str(tmp_path / "a.txt")))
    # in JSON, NUL is a character like any other
    (tmp_path / "a.txt").rename(tmp_path / "a.bin")
    (tmp_path / "b.jsonl").write_text('{"text": "a\\u0000b"}')
    source = make(tmp_path / "b.jsonl")
    assert 0 in tokens(source, source.key(0, 1, 0))


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_error_names_truncated_archives(tmp_path, suffix):
    compress = {".gz": gzip, ".xz": lzma, ".zst": zstd}[suffix].compress
    data = compress(np.random.default_rng(0).integers(32, 127, 400_000, np.uint8).tobytes())
    for name, content, message in [
        (f"a.txt{suffix}", data[:-1000], "truncated or damaged"),
        (f"b.txt{suffix}", compress(b"word " * 40_000 + b"\xe4"), "not UTF-8 at byte 200000"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name}: {message}"):
            make(tmp_path / name)
    lines = compress(b'{"text": "fine"}\n' * 100_000)
    (tmp_path / f"c.jsonl{suffix}").write_bytes(lines[:-20])
    with pytest.raises(UserError, match=f"c.jsonl{suffix}: truncated or damaged"):
        make(tmp_path / f"c.jsonl{suffix}")
    (tmp_path / f"a.txt{suffix}").write_bytes(b"no archive")
    with pytest.raises(UserError, match="truncated or damaged"):
        make(tmp_path)


def test_zstd_with_a_long_window_is_read(tmp_path):
    options = {zstd.CompressionParameter.window_log: 28}
    with zstd.open(tmp_path / "a.txt.zst", "wb", options=options) as file:
        file.write(b"word " * 1000)
    assert list(make(tmp_path).texts()) == ["word " * 1000]


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
