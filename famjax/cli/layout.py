"""Layout of text, wrapped to the width of the terminal."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping

# maximum and minimum columns of a help text, and its columns without a terminal
_MAX_WIDTH, _MIN_WIDTH, _PIPE_WIDTH = 100, 20, 80
# minimum width of a two-column list, and maximum width of its names
_TWO_COLUMN_WIDTH, _MAX_NAME_WIDTH = 76, 36


def terminal_width(stream: object) -> int | None:
    """Return COLUMNS if set, else the columns of the terminal, or None if `stream` is not one."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    isatty: Callable[[], bool] = getattr(stream, "isatty", lambda: False)
    try:
        if isatty():
            return os.get_terminal_size(stream.fileno()).columns or None  # type: ignore[attr-defined]
    except (OSError, ValueError):
        pass
    return None


def wrap(text: str, width: int | None, indent: str = "", first: str = "") -> list[str]:
    """Return text in lines that are broken only between words.

    Args:
      text: the text.
      width: maximum width of a line; None is unlimited.
      indent: indent of all lines but the first.
      first: indent of the first line.
    """
    if width is None:
        return [first + text]
    return textwrap.wrap(
        text,
        max(width, 1),
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def help_width() -> int:
    """Return the width of a help text: that of the terminal, at most 100."""
    return max(_MIN_WIDTH, min(terminal_width(sys.stdout) or _PIPE_WIDTH, _MAX_WIDTH))


def format_entries(entries: Mapping[str, str], width: int) -> list[str]:
    """Return names with descriptions, in two columns if the lines are wide enough."""
    name_width = (
        min(max(map(len, entries), default=0) + 2, _MAX_NAME_WIDTH)
        if width >= _TWO_COLUMN_WIDTH
        else 0
    )
    lines = []
    for name, text in entries.items():
        if name_width and len(name) < name_width and text:
            lines += wrap(text, width, " " * (name_width + 2), f"  {name:<{name_width}}")
        else:
            indent = " " * (name_width + 2 if name_width else 6)
            lines += [f"  {name}", *(wrap(text, width, indent, indent) if text else ())]
    return lines


def usage(line: str, width: int) -> list[str]:
    """Return a usage line in lines that are broken only outside of brackets."""
    whole = re.sub(r"\[.*?\]+", lambda match: match[0].replace(" ", "\0"), line)
    return [part.replace("\0", " ") for part in wrap(whole, width, "    ")]


def command(line: str, width: int) -> list[str]:
    """Return a command in lines with shell continuations, a backslash at the end."""
    if len(line) <= width:
        return [line]
    *first, last = wrap(line, width - 2, "    ")
    return [*(f"{part} \\" for part in first), last]
