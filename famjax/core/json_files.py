"""Untrusted JSON and files: damaged, hostile or special files raise a one-line error.

`parse_json` is the only JSON parser in famjax: text nested a hundred thousand levels deep, a number
of ten thousand digits and a half-written file all raise a `ValueError`.
"""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

from famjax.core.atomic import write_file
from famjax.core.errors import UserError

# Maximum levels of nested lists and tables. Python's own limit depends on the depth of the call
# stack, and consumers of the result (repr, json.dumps) reach their limits earlier.
MAX_DEPTH = 100
# maximum bytes of a file that is read as a whole; a tokenizer.json of 256,000 tokens has 35 MB
MAX_BYTES = 256 << 20
# hint for a damaged file that a command makes again
RUN_AGAIN = "remove it, and run again"


class JsonError(ValueError):
    """JSON that cannot be parsed, or is rejected. The message gives the reason in one line."""


def parse_json(text: str | bytes, unique: bool = False) -> Any:
    """Parse JSON text.

    Args:
      text: bytes must be UTF-8.
      unique: reject duplicate keys of a table; otherwise the last one counts.

    Raises:
      JsonError: the text is nested too deep, or has a number of too many digits or a duplicate key.
      json.JSONDecodeError: the text is not JSON.
      UnicodeDecodeError: the bytes are not UTF-8. All of these are a `ValueError`.
    """
    try:
        value = json.loads(text, object_pairs_hook=_build_unique if unique else None)
    except RecursionError:
        raise JsonError(_depth_message()) from None
    except (JsonError, UnicodeDecodeError, json.JSONDecodeError):
        raise
    except ValueError:  # a number with more digits than sys.get_int_max_str_digits()
        raise JsonError("a number of thousands of digits") from None
    if _count_brackets(text) > MAX_DEPTH:
        _check_depth(value)
    return value


def read_json(path: Path, hint: str) -> Any:
    """Parse a JSON file.

    Args:
      path: path of the file.
      hint: what to do if the file is damaged, such as "copy it again".

    Raises:
      UserError: the file is damaged, not a regular file, or too large.
      OSError: the file cannot be opened.
    """
    content = read_whole(path, hint)
    try:
        return parse_json(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: damaged (not UTF-8 at byte {error.start}); {hint}") from None
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}); {hint}") from None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically: at any time the whole old or the whole new file exists."""
    write_file(path, json.dumps(value, indent=1))


def dump_strictly(value: Any, indent: int | None = None) -> str:
    """Return JSON text; numbers that JSON lacks, such as infinity, become null.

    Args:
      value: JSON types, and NumPy arrays.
      indent: spaces for each level; None writes one line.
    """
    return json.dumps(_without_non_finite(value), indent=indent, allow_nan=False)


def _without_non_finite(value: Any) -> Any:
    if hasattr(value, "tolist"):  # NumPy, which is not imported here, for a fast start
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _without_non_finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_without_non_finite(part) for part in value]
    return value


def read_whole(path: Path, hint: str) -> bytes:
    """Return the content of a file that is small, since it is not a text to train on.

    Args:
      path: path of the file.
      hint: what to do if the file is too large, such as "copy it again".

    Raises:
      UserError: the file is not a regular file, or has more than `MAX_BYTES`.
      OSError: the file cannot be opened.
    """
    size = regular_file_size(path)
    if size > MAX_BYTES:
        raise UserError(
            f"{path}: {size:,} bytes, more than the {MAX_BYTES:,} that such a file may have; {hint}"
        )
    return path.read_bytes()


def regular_file_size(path: str | Path) -> int:
    """Return the size of a regular file in bytes.

    Raises:
      UserError: the file is a device, a pipe or a socket, and reading it may block forever.
      OSError: there is no such file.
    """
    status = Path(path).stat()
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise UserError(f"{path}: not a regular file (a device or a pipe); copy it into a file")
    return status.st_size


def shorten(value: Any, length: int = 80) -> str:
    """Return a value as text of limited length, for an error message."""
    try:
        text = str(value)
    except ValueError:  # see `parse_json`
        text = "a number of thousands of digits"
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _build_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonError(f"the key {shorten(twice)!r} occurs twice")
    return table


def _count_brackets(text: str | bytes) -> int:
    """Return an upper bound on the number of lists and tables."""
    if isinstance(text, bytes):
        return text.count(b"[") + text.count(b"{")
    return text.count("[") + text.count("{")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise JsonError(_depth_message())


def _children(node: Any) -> Any:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def _depth_message() -> str:
    return f"nested more than {MAX_DEPTH} levels deep"
