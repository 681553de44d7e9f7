"""JSON from outside: any invalid content is a one-line error."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import numpy as np
import pytest

import famjax
from famjax.core.errors import UserError
from famjax.core.json_files import (
    MAX_DEPTH,
    JsonError,
    dump_strictly,
    parse_json,
    read_json,
    regular_file_size,
    shorten,
)

DEEP = 100_000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * DEEP + "]" * DEEP, "nested more than 100 levels deep"),
        ('{"a":' * DEEP + "1" + "}" * DEEP, "nested more than 100 levels deep"),
        ("[" * DEEP, "nested more than 100 levels deep"),
        ("[" * 200 + "]" * 200, "nested more than 100 levels deep"),
        ("1" * 10_000, "a number of thousands of digits"),
        ('{"a": 1', "Expecting ',' delimiter"),
        ("", "Expecting value"),
    ],
)
@pytest.mark.parametrize("kind", [str, str.encode])
def test_invalid_json_is_rejected(text, said, kind):
    with pytest.raises(ValueError, match=said) as error:
        parse_json(kind(text))
    assert "\n" not in str(error.value)


def test_a_byte_order_mark_is_rejected_in_text_and_dropped_from_bytes():
    with pytest.raises(ValueError, match="BOM"):
        parse_json("\ufeff{}")
    assert parse_json("\ufeff{}".encode()) == {}


def test_valid_json_is_parsed_as_by_json():
    tree: object = {"a": [1, 2.5, None, True, "é", {"b": []}] * 80, "NaN": float("inf")}
    assert parse_json(json.dumps(tree)) == tree
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(deepest) == json.loads(deepest)
    assert parse_json('["' + "[" * 1000 + '"]') == ["[" * 1000]


def test_duplicate_keys_are_rejected():
    assert parse_json('{"a": 1, "a": 2}') == {"a": 2}
    with pytest.raises(JsonError, match="the key 'a' occurs twice"):
        parse_json('{"b": {"a": 1, "a": 2}}', unique=True)


def test_invalid_files_are_rejected(tmp_path):
    path = tmp_path / "config.json"
    os.mkfifo(path)
    with pytest.raises(UserError, match="not a regular file"):
        read_json(path, "copy it again")
    with pytest.raises(UserError, match="not a regular file"):
        regular_file_size("/dev/zero")
    path.unlink()
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(UserError, match=r"config.json: damaged \(not UTF-8 at byte 7\); copy it"):
        read_json(path, "copy it again")
    with path.open("wb") as file:
        file.truncate(10**12)  # sparse: uses no disk space
    with pytest.raises(UserError, match="1,000,000,000,000 bytes, more than"):
        read_json(path, "copy it again")


def test_values_in_messages_are_shortened():
    assert shorten("x" * 100, 10) == "xxxxxxx..."
    assert shorten([1, 2]) == "[1, 2]"


def test_no_other_module_parses_json():
    """Another reader would have to handle all of these errors again."""
    home = Path(famjax.__file__).parent
    wrong = []
    for path in home.rglob("*.py"):
        if path.name == "json_files.py" or "pytorch" in path.parts:
            continue
        wrong += [
            f"{path.relative_to(home)}:{node.lineno}"
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
            and node.attr in ("load", "loads", "JSONDecoder")
            and isinstance(node.value, ast.Name)
            and node.value.id == "json"
        ]
    assert not wrong


def test_numbers_that_json_lacks_become_null():
    array = np.array([[1.0, np.nan]], np.float32)
    value = {"a": [float("inf"), 1.5, (float("nan"), 2)], "b": None, "array": array}
    assert json.loads(dump_strictly(value), parse_constant=pytest.fail) == {
        "a": [None, 1.5, [None, 2]],
        "b": None,
        "array": [[1.0, None]],
    }
    assert dump_strictly({"a": [1]}, indent=1) == '{\n "a": [\n  1\n ]\n}'
