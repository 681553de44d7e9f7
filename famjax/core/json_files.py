"""JSON and files from outside: what is damaged, hostile or no regular file is one clear line.

`parse_json` is the only reader of JSON in famjax: text nested a hundred thousand levels deep, a
number of ten thousand digits and a half-written file all end in the same exception.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from famjax.core.errors import UserError

# Levels of lists and tables. Python's own limit depends on where it is called from, and what reads
# the result (repr, json.dumps) reaches its limit earlier.
MAX_DEPTH = 100
# of a file that is read whole; a tokenizer.json of 256,000 tokens has 35 MB
MAX_BYTES = 256 << 20


class JsonError(ValueError):
    """JSON that cannot be read, or should not be. The message says why, in one line."""


def parse_json(text: str | bytes, unique: bool = False) -> Any:
    """Return what JSON text holds.

    Args:
      text: if bytes, UTF-8.
      unique: refuse a table that has a key twice; otherwise the last one counts.

    Raises:
      JsonError: it is nested too deep, or has a number of too many digits or a key twice.
      json.JSONDecodeError: it is not JSON.
      UnicodeDecodeError: bytes that are not UTF-8. All of these are a `ValueError`.
    """
    try:
        found = json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise JsonError(_too_deep()) from None
    except (JsonError, UnicodeDecodeError, json.JSONDecodeError):
        raise
    except ValueError:  # int() of more digits than sys.get_int_max_str_digits()
        raise JsonError("a number of thousands of digits") from None
    if _opened(text) > MAX_DEPTH:
        _refuse_deep(found)
    return found


def read_json(path: Path, hint: str, unique: bool = False) -> Any:
    """Return what a JSON file holds.

    Args:
      path: of the file.
      hint: what to do about a damaged one, such as "copy it again".
      unique: see `parse_json`.

    Raises:
      UserError: it is damaged, no regular file, or too large.
      OSError: it cannot be opened.
    """
    size = regular_file_size(path)
    if size > MAX_BYTES:
        raise UserError(
            f"{path}: {size:,} bytes, more than the {MAX_BYTES:,} that a JSON file may have; {hint}"
        )
    try:
        return parse_json(path.read_text(encoding="utf-8"), unique)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: damaged (not UTF-8 at byte {error.start}); {hint}") from None
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}); {hint}") from None


def regular_file_size(path: str | Path) -> int:
    """Return the bytes of a regular file.

    Raises:
      UserError: it is a device, a pipe or a socket: reading it may never end.
      OSError: there is no such file.
    """
    found = Path(path).stat()
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise UserError(f"{path}: not a regular file (a device or a pipe); copy it into a file")
    return found.st_size


def shorten(value: Any, length: int = 80) -> str:
    """Return a value as an error message shows it."""
    try:
        text = str(value)
    except ValueError:  # see `parse_json`
        text = "a number of thousands of digits"
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonError(f"the key {shorten(twice)!r} is there twice")
    return found


def _opened(text: str | bytes) -> int:
    """Return how many lists and tables there are at most."""
    if isinstance(text, bytes):
        return text.count(b"[") + text.count(b"{")
    return text.count("[") + text.count("{")


def _refuse_deep(found: Any) -> None:
    level = [found]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise JsonError(_too_deep())


def _children(node: Any) -> Any:
    if isinstance(node, dict):
        return node.values()
    return node if isinstance(node, list) else ()


def _too_deep() -> str:
    return f"nested more than {MAX_DEPTH} levels deep"
