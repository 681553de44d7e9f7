"""The lines of a .jsonl or .ndjson file, or the rows of a Parquet file: each is a document.

A line is {"text": ...}, {"inputs": ..., "targets": ...}, {"prompt": ..., "response": ...} or
{"messages": [{"role": ..., "content": ...}, ...]}. A content may be a list of parts
{"type": "text", "text": ...}, which are joined.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import NoneType
from typing import Any, BinaryIO, NamedTuple

from famjax.core.errors import UserError
from famjax.core.json_files import MAX_BYTES, parse_json, shorten
from famjax.data.files import TextFile, open_text, wrap_read_errors
from famjax.data.other_json import conversion
from famjax.data.parquet import FORM_KEYS, is_parquet
from famjax.tokenizers.chat import ChatTemplate

_SCAN_BYTES = 1 << 20
# maximum bytes of a line: it is read as a whole, unlike other texts, which are read in pieces
_MAX_LINE_BYTES = MAX_BYTES
_EXPECTED_FORMS = (
    'no "text", and neither "inputs" and "targets", "prompt" and "response", nor "messages"; the '
    "values must be strings, or a list of messages"
)
# JSON's names of values
_KINDS = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
    NoneType: "null",
    str: "a string",
}


# keys of a source and its target
_PAIR_KEYS = (("inputs", "targets"), ("prompt", "response"))


class Line(NamedTuple):
    """A document on a line of a .jsonl file.

    Attributes:
      parts: the parts of the document, each with its UTF-8 bytes and loss weight.
      rendered: whether a chat template rendered the document.
    """

    parts: Sequence[tuple[bytes, float]]
    rendered: bool = False


def read_json_line(file: TextFile, row: int, template: ChatTemplate | None) -> Line:
    """Return the document on a line of a .jsonl file.

    All of a line with "text" is predicted. With a template, a prompt and its response are rendered
    as a conversation, like "messages"; without one they are inputs and targets.
    """
    assert file.rows is not None
    begin = int(file.rows[row])
    plain = file.plain.path if file.plain else file.path
    with open_text(plain) as stream, wrap_read_errors(file.path):
        stream.seek(begin)
        line = next(iter_lines(stream), b"")
    with wrap_line_errors(file.path, lambda: _line_number(plain, begin)):
        parts, messages = parse_record(line, template)
        if not messages:
            return Line(parts)
        assert template is not None
        texts = template.render_document(messages)
        return Line([(text.encode("utf-8"), weight) for text, weight in texts], rendered=True)


def iter_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Return the lines of a stream, cut to a length that `parse_record` rejects as too long."""
    return iter(partial(stream.readline, _MAX_LINE_BYTES + 1), b"")


@contextmanager
def wrap_line_errors(
    path: str, number: Callable[[], int], form: str = '{"text": ...}'
) -> Iterator[None]:
    """Convert errors from a line into a `UserError` that names the file and the line.

    Args:
      number: returns the line's number, counted from 1.
      form: what a line should look like, for the error message.
    """
    try:
        yield
    except UserError as error:
        wrong = str(error)
    except json.JSONDecodeError as error:
        wrong = (
            f"not JSON with valid text ({error.msg.removesuffix(' at')} at column {error.colno}); "
            f"write one object on each line, {form}"
        )
    except UnicodeDecodeError as error:
        wrong = (
            f"not UTF-8 at byte {error.start} of the line; convert the file (iconv -t utf-8) or "
            "leave it out"
        )
    except ValueError as error:
        wrong = f"not JSON with valid text ({error})"
    else:
        return
    raise UserError(f"{path}, {'row' if is_parquet(path) else 'line'} {number()}: {wrong}")


def parse_record(
    line: bytes, template: ChatTemplate | None
) -> tuple[list[tuple[bytes, float]], list[dict[str, Any]]]:
    """Parse a line into UTF-8 parts with their weights, or into the messages of a conversation.

    One of the two results is empty. Everything is checked except what only the template can check.

    Raises:
      UserError, ValueError: see `wrap_line_errors`.
    """
    record = _parse_object(line)
    # a null counts as a text, and is an error, unless the line has another form
    if record.get("text") is not None or record.keys() & FORM_KEYS == {"text"}:
        return [(_get_string(record, "text"), 1.0)], []
    if "targets" in record:
        return [(_get_string(record, "inputs"), 0.0), (_get_string(record, "targets"), 1.0)], []
    if "messages" in record:
        return [], _check_messages(record["messages"], template)
    prompt, response = _get_string(record, "prompt"), _get_string(record, "response")
    if template is None:
        return [(prompt, 0.0), (response, 1.0)], []
    messages = (("user", record["prompt"]), ("assistant", record["response"]))
    return [], [{"role": role, "content": content} for role, content in messages]


def parse_pair(line: bytes) -> tuple[bytes, bytes]:
    """Parse a line into a source and its target; its other keys do not count.

    Raises:
      UserError, ValueError: see `wrap_line_errors`.
    """
    record = _parse_object(line)
    for source, target in _PAIR_KEYS:
        if source in record and target in record:
            return _get_string(record, source), _get_string(record, target)
    forms = ", or ".join(f'"{source}" with "{target}"' for source, target in _PAIR_KEYS)
    keys = ", ".join(map(repr, list(record)[:5]))
    has = f"; it has {keys}" if record else ""
    how = f"; {command}" if (command := conversion(record)) else ""
    raise UserError(f"is not a pair; it needs {forms}{has}{how}")


def _parse_object(line: bytes) -> dict[str, Any]:
    if len(line) > _MAX_LINE_BYTES:
        raise UserError(
            f"more than {_MAX_LINE_BYTES:,} bytes; write so long a document to a text file of its "
            "own"
        )
    record = parse_json(line)
    if not isinstance(record, dict):
        raise UserError(f"{_KINDS[type(record)]} instead of an object; {_EXPECTED_FORMS}")
    return record


def _get_string(record: dict[str, Any], key: str) -> bytes:
    if key not in record:
        keys = ", ".join(map(repr, list(record)[:5]))
        if command := conversion(record):
            raise UserError(f"it has {keys}, a form that is not read; {command}")
        raise UserError(_EXPECTED_FORMS + (f"; it has {keys}" if record else ""))
    value = record[key]
    if type(value) is not str:
        raise UserError(f'"{key}" is {_KINDS[type(value)]}, not a string; write it as a string')
    return value.encode("utf-8")


def _check_messages(messages: Any, template: ChatTemplate | None) -> list[dict[str, Any]]:
    if template is None:
        raise UserError(
            '"messages" needs a tokenizer with a chat template; set data.tokenizer to one, or '
            'write "inputs" and "targets"'
        )
    if not isinstance(messages, list) or not messages:
        raise UserError('"messages" is not a list with messages in it')
    for i, message in enumerate(messages):
        keys = ("role", "content")
        if isinstance(message, dict) and isinstance(message.get("content"), list):
            message["content"] = _join_text_parts(message["content"], i)
        if not (isinstance(message, dict) and all(type(message.get(k)) is str for k in keys)):
            raise UserError(f'message {i + 1} needs "role" and "content", both strings')
        for key in keys:
            message[key].encode("utf-8")  # a lone surrogate is not text
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError('no message has the role "assistant": there is nothing to learn')
    return messages


def _join_text_parts(parts: list[Any], i: int) -> str:
    """Return the text of a message whose content is a list of {"type": "text", "text": ...}."""
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or type(part.get("text")) is not str:
            raise UserError(
                f"the content of message {i + 1} has a part of type {shorten(repr(kind))}; only "
                'strings and parts {"type": "text", "text": ...} are read: leave out such messages'
            )
    return "".join(part["text"] for part in parts)


def _line_number(path: str, offset: int) -> int:
    with open(path, "rb") as stream:
        blocks = iter(lambda: stream.read(min(_SCAN_BYTES, offset - stream.tell())), b"")
        return 1 + sum(block.count(b"\n") for block in blocks)
