"""JSON lines are documents; other formats are named with their conversion."""

import gzip
import itertools
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from source_helpers import OPENERS, TOKENIZER, epoch, make

from famjax.core.errors import UserError


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


@pytest.mark.parametrize("content", [b"ARROW1\0ab", b"ARROW1\xefab"])
def test_formats_that_are_not_text(tmp_path, content):
    (tmp_path / "a.arrow").write_bytes(content)
    said = r"a\.arrow: \.arrow is not text; write it as \.jsonl, \.parquet or \.txt$"
    with pytest.raises(UserError, match=said):
        make(tmp_path / "a.arrow")
    (tmp_path / "b.txt").write_text("x")
    assert "skipped 1 " in make(tmp_path).report()
