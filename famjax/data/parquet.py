"""Parquet files, read as JSON lines: one object for each row, with the columns as its keys."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, cast

from famjax.core.errors import UserError
from famjax.core.optional import missing_message, missing_modules

# keys of the forms that a line of JSON or a row may have (`famjax.data.json_lines`)
FORM_KEYS = frozenset({"text", "inputs", "targets", "prompt", "response", "messages"})
# rows decoded at a time: documents may have megabytes each
_ROWS = 16


def is_parquet(path: str) -> bool:
    return path.lower().endswith(".parquet")


def open_parquet(path: str) -> BinaryIO:
    """Open a Parquet file as a stream of JSON lines, which reads forwards only.

    Lines have the columns that JSON can express, without nulls but for that of a text; of those
    in `FORM_KEYS`, the parts that it can. Bytes are taken as UTF-8; others are left out.

    Raises:
      UserError: pyarrow is not installed, or cannot read such a file; also when it is read.
      EOFError: the file is truncated or damaged; also when it is read.
    """
    if missing := missing_modules(["pyarrow"]):
        raise UserError(f"{path}: {missing_message(missing)}")
    import pyarrow.parquet

    def lines() -> Iterator[bytes]:
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                columns = _json_columns(path, file.schema_arrow)
                for batch in file.iter_batches(_ROWS, columns=columns):
                    for row in batch.to_pylist():
                        # if there is nothing but nulls, the error is to name them
                        kept = _without_nulls(row) or dict.fromkeys(row)
                        if row.get("text", "") is None:
                            kept["text"] = None
                        yield json.dumps(kept, ensure_ascii=False).encode() + b"\n"
        except UnicodeDecodeError:
            raise UserError(f"{path}: a text is not UTF-8; write the file again") from None
        except pyarrow.ArrowInvalid:
            raise EOFError(path) from None
        except pyarrow.ArrowException as error:
            reason = str(error).strip().split("\n")[0]
            raise UserError(f"{path}: pyarrow cannot read it ({reason})") from None
        except OSError as error:
            if error.errno:
                raise
            raise EOFError(path) from None  # an error of the format

    return cast(BinaryIO, io.BufferedReader(_Stream(lines())))


def _json_columns(path: str, schema: Any) -> list[str]:
    """Return the names of the columns whose values JSON can express, or that may be text."""
    name, count = Counter(schema.names).most_common(1)[0] if schema.names else ("", 1)
    if count > 1:
        raise UserError(f"{path}: {count} columns are named {name!r}; give each its own name")
    for field in schema:
        if field.name in FORM_KEYS and not _is_read(field):
            raise UserError(
                f"{path}: the column {field.name!r} has the type {field.type}, which is not read; "
                "write it as strings, or rename it"
            )
    return [field.name for field in schema if _is_read(field)]


def _is_read(field: Any) -> bool:
    is_bytes = _is_any(field.type, "binary", "large_binary", "binary_view")
    return is_bytes or _is_json(field.type, any if field.name in FORM_KEYS else all)


def _is_json(kind: Any, parts: Callable[[Iterable[bool]], bool]) -> bool:
    """Return whether JSON can express values of a type; any or all parts of an object."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return _is_json(kind.value_type, parts)
    if types.is_struct(kind):
        return parts(_is_json(field.type, parts) for field in kind)
    if _is_any(kind, "list", "large_list", "fixed_size_list", "list_view", "large_list_view"):
        return _is_json(kind.value_type, parts)
    texts = ("string", "large_string", "string_view")
    return _is_any(kind, *texts, "integer", "floating", "boolean", "null")


def _is_any(kind: Any, *names: str) -> bool:
    from pyarrow import types

    return any(getattr(types, f"is_{name}")(kind) for name in names)


def _without_nulls(value: Any) -> Any:
    """Return what JSON can express of a value, without the nulls of keys that an object lacks."""
    if isinstance(value, dict):
        kept = ((key, _without_nulls(each)) for key, each in value.items())
        return {key: each for key, each in kept if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return None
    return value if isinstance(value, str | int | float) else None


class _Stream(io.RawIOBase):
    """A stream of the bytes of an iterator."""

    def __init__(self, parts: Iterator[bytes]):
        self._parts = parts
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        # a view, since slices of bytes would copy the rest of a long line each time
        self._rest = self._rest or memoryview(next(self._parts, b""))
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size
