"""JSON that is not in a form of `famjax.data.json_lines`: how to bring it there, with jq.

A .json file is not read as JSON, and as plain text a model would learn its quotes and brackets. So
one that the user names is refused. In a folder or a glob it is a text like others, since folders of
code have such files; unless all files are .json with records like those of data sets.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from typing import Any

from famjax.core.errors import UserError
from famjax.core.json_files import parse_json
from famjax.data.files import DECOMPRESSORS, is_json, read_head, split_compression

# a key that records of data sets have
_RECORD_KEY = re.compile(
    rb'"(text|inputs|targets|prompt|response|messages|instruction|conversations)"\s*:'
)
# Alpaca's input may be missing or empty
_ALPACA = (
    '{prompt: ([.instruction, .input // empty | select(. != "")] | join("\\n\\n")), '
    "response: .output}"
)
_SHAREGPT = (
    "{messages: [.conversations[] | "
    '{role: ({human: "user", gpt: "assistant"}[.from] // .from), content: .value}]}'
)


def check_not_json(path: str) -> None:
    """Raise a `UserError` for a .json file, which says how to make JSON lines of it."""
    if is_json(path):
        raise UserError(_json_error_message(path))


def check_not_all_json(files: str, paths: Sequence[str]) -> None:
    """Raise a `UserError` if all files found in folders are .json files with records.

    Args:
      files: `data.files`.
      paths: the files, at least one.
    """
    if all(is_json(path) and _has_records(read_head(path)) for path in paths):
        raise UserError(f"data.files={files}: {_json_error_message(paths[0])}")


def _json_error_message(path: str) -> str:
    head, (name, compression) = read_head(path), split_compression(path)
    plain = f"to .txt{compression} to train on it as plain text"
    if _has_lines(head):
        return f"{path}: has JSON lines; rename it to .jsonl{compression}, or {plain}"
    program = "'.[]'" if head.lstrip().startswith(b"[") else "."
    source, target = shlex.quote(path), shlex.quote(os.path.splitext(name)[0] + ".jsonl")
    command = f"jq -c {program} {source} > {target}"
    if compression:
        command = f"{DECOMPRESSORS[compression]} -dc {source} | jq -c {program} > {target}"
    wrong = f"{path}: JSON is read as .jsonl, one object on each line"
    return f"{wrong}; run {command}, or rename it {plain}"


def _has_records(head: bytes) -> bool:
    return head.lstrip()[:1] in (b"[", b"{") and bool(_RECORD_KEY.search(head))


def _has_lines(head: bytes) -> bool:
    """Return whether the first line of a file is an object of its own."""
    line, *_ = head.lstrip().split(b"\n", 1)
    try:
        return isinstance(parse_json(line), dict)
    except ValueError:
        return False


def conversion(record: dict[str, Any]) -> str:
    """Return how to convert JSON lines with records of a form of other programs, or ""."""
    if {"instruction", "output"} <= record.keys():
        program = _ALPACA
    elif {"prompt", "completion"} <= record.keys():
        program = "{prompt, response: .completion}"
    elif isinstance(turns := record.get("conversations"), list) and turns:
        has_roles = isinstance(turns[0], dict) and "role" in turns[0]
        program = "{messages: .conversations}" if has_roles else _SHAREGPT
    else:
        return ""
    return f"convert the file with jq -c '{program}' OLD.jsonl > NEW.jsonl"
