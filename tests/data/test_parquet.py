"""A Parquet file is read like JSON lines with the same records."""

import datetime
import json
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tiny_tokenizers import byte_level

from famjax.core.errors import UserError
from famjax.data.files import open_text, read_text_pieces
from famjax.data.pairs import Pairs
from famjax.data.sources import TextSource
from famjax.tasks.questions.records import parse_leval, read_documents
from famjax.tokenizers.load import load_tokenizer

BYTES = load_tokenizer("bytes")
ROWS = [{"text": f"document {i}: äöü 漢字\0\n" * 50, "id": i} for i in range(40)]


def _schema(rows):
    """Return the types of the columns, of which each row may have some."""
    columns = {key: value for row in rows for key, value in row.items() if value is not None}
    types = {key: pyarrow.scalar(value).type for key, value in columns.items()}
    nothing = {key: pyarrow.null() for row in rows for key in row if key not in types}
    return pyarrow.schema(list((types | nothing).items()))


def write(path, rows):
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows, _schema(rows)), path, row_group_size=7
    )
    return path


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def make(files, holdout=0, split="train"):
    return TextSource(str(files), BYTES, 0, holdout, split)


def read(source):
    keys = (source.key(0, 1, k) for k in range(len(source)))
    return [
        (key[1], [(piece.tokens.tolist(), piece.weights.tolist()) for piece in source.open(key)])
        for key in keys
    ]


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        [{"prompt": "question", "response": f"answer {i}"} for i in range(20)],
        [{"inputs": "no loss", "targets": "loss", "text": None}, {"inputs": "", "targets": "b"}],
    ],
)
def test_documents_are_those_of_json_lines(tmp_path, rows):
    table, lines = write(tmp_path / "a.parquet", rows), write_lines(tmp_path / "a.jsonl", rows)
    assert read(make(table)) == read(make(lines))
    assert make(table).epoch_tokens() == make(lines).epoch_tokens()
    assert make(table).text_bytes is None


def test_rows_are_held_out_and_named(tmp_path):
    path = write(tmp_path / "a.parquet", ROWS)
    train, held = make(path, 5), make(path, 5, "holdout")
    assert held.holds_out
    assert len(train) + len(held) == len(ROWS)
    assert {row for row, _ in read(train)}.isdisjoint(row for row, _ in read(held))
    assert train.name([str(path), 3, 0]) == f"{path}:4"


def test_messages_are_rendered_by_a_chat_template(tmp_path):
    rows = [
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": f"answer {i}"},
            ]
        }
        for i in range(3)
    ]
    tokenizer = load_tokenizer(str(byte_level(tmp_path / "tokenizer")))
    table, lines = write(tmp_path / "a.parquet", rows), write_lines(tmp_path / "a.jsonl", rows)
    first, second = (TextSource(str(path), tokenizer, 0, 0, "train") for path in (table, lines))
    assert read(first) == read(second)


def test_folders_have_texts_and_tables(tmp_path):
    write(tmp_path / "train-00000-of-00001.parquet", ROWS[:3])
    (tmp_path / "README.md").write_text("about the data")
    assert len(make(tmp_path)) == 4


def test_columns_that_json_lacks_are_left_out(tmp_path):
    row = {"text": "a", "day": datetime.date(2026, 11, 26), "image": b"\xff", "n": [{"m": 1}]}
    path = write(tmp_path / "a.parquet", [row])
    with open_text(str(path)) as stream:
        assert [json.loads(line) for line in stream] == [{"text": "a", "n": [{"m": 1}]}]
    assert len(make(path)) == 1
    # what should be a text is not made one
    path = write(tmp_path / "b.parquet", [{"text": datetime.date(2026, 11, 26), "id": 1}])
    with pytest.raises(UserError, match=r"b\.parquet: the column 'text' has the type date32"):
        make(path)


def test_parts_of_a_value_that_json_lacks_are_left_out(tmp_path):
    """Messages may have a time, which is not read."""
    day = datetime.datetime(2026, 11, 26)
    messages = [{"role": "user", "content": "a", "sent": day, "raw": b"\xff"}]
    path = write(tmp_path / "a.parquet", [{"messages": messages}])
    with open_text(str(path)) as stream:
        assert json.loads(stream.read()) == {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize("kind", [pyarrow.string_view(), pyarrow.binary_view()])
def test_texts_may_be_views(tmp_path, kind):
    table = pyarrow.table({"text": pyarrow.array(["a", "b"], pyarrow.string()).cast(kind)})
    try:
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    except pyarrow.ArrowNotImplementedError:
        pytest.skip("this pyarrow does not write views")
    assert sorted(make(tmp_path / "a.parquet").texts()) == ["a", "b"]


def test_texts_may_be_bytes(tmp_path):
    path = write(tmp_path / "a.parquet", [{"text": "äöü".encode()}])
    assert list(make(path).texts()) == ["äöü"]
    path = write(tmp_path / "b.parquet", [{"text": b"\xff"}])
    with pytest.raises(UserError, match=r"b\.parquet, row 1"):
        make(path)


def test_rows_of_different_forms_lack_the_keys_of_others(tmp_path):
    rows = [{"inputs": "a", "targets": "b"}, {"prompt": "c", "response": "d"}, {"text": "e"}]
    table, lines = write(tmp_path / "a.parquet", rows), write_lines(tmp_path / "a.jsonl", rows)
    assert read(make(table)) == read(make(lines))


def test_columns_of_the_same_name_are_rejected(tmp_path):
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: 2 columns are named 'text'; give each"):
        make(tmp_path)


def test_a_row_without_a_document_is_named(tmp_path):
    path = write(tmp_path / "a.parquet", [{"text": "a"}, {"text": None}])
    with pytest.raises(UserError, match=r'a\.parquet, row 2: "text" is null, not a string'):
        make(path)
    path = write(tmp_path / "c.parquet", [{"text": "a", "id": 1}, {"text": None, "id": 2}])
    with pytest.raises(UserError, match=r'c\.parquet, row 2: "text" is null, not a string'):
        make(path)
    path = write(tmp_path / "b.parquet", [{"content": "a", "id": 1}])
    with pytest.raises(UserError, match=r"b\.parquet, row 1: no \"text\".*it has 'content', 'id'"):
        make(path)


def test_damaged_and_empty_tables_are_rejected(tmp_path):
    path = write(tmp_path / "a.parquet", ROWS)
    data = path.read_bytes()
    for damaged in (data[:-100], data[100:], b"no table", data[:200] + bytes(400) + data[600:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"a\.parquet: truncated or damaged; fetch or"):
            make(path)
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], "string")}), path)
    with pytest.raises(UserError, match=r"no text found; skipped 1 empty"):
        make(path)


def test_many_documents_are_no_prompt(tmp_path):
    with pytest.raises(UserError, match=r"a\.parquet: holds many documents; give a file that is"):
        list(read_text_pieces(str(write(tmp_path / "a.parquet", ROWS))))


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    write(tmp_path / "a.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"a\.parquet: pyarrow not installed; pip install -e "):
        make(tmp_path)


def test_a_document_longer_than_a_buffer_is_whole(tmp_path):
    text = "".join(map(chr, np.random.default_rng(0).integers(32, 2000, 300_000)))
    path = write(tmp_path / "a.parquet", [{"text": text}])
    source = make(path)
    assert "".join(source.texts()) == text


def test_pairs_and_questions_are_read(tmp_path):
    pairs = write(tmp_path / "a.parquet", [{"inputs": "ein", "targets": "one"}] * 3)
    assert [Pairs(str(pairs))[i] for i in range(3)] == [("ein", "one")] * 3
    rows = [{"input": f"text {i}", "instructions": ["what?"], "outputs": ["this"]} for i in (0, 1)]
    table, lines = write(tmp_path / "b.parquet", rows), write_lines(tmp_path / "b.jsonl", rows)
    (found, _), (expected, _) = (read_documents(str(path), parse_leval) for path in (table, lines))
    assert [document.name for document in found] == [f"{table}:1", f"{table}:2"]
    assert [document._replace(name="") for document in found] == [
        document._replace(name="") for document in expected
    ]


def test_a_file_named_json_parquet_is_parquet(tmp_path):
    write(tmp_path / "a.json.parquet", ROWS)
    assert len(TextSource(str(tmp_path / "a.json.parquet"), BYTES, seed=0, holdout=0)) == len(ROWS)
