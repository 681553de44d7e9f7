"""Tables that fit the terminal without breaking numbers.

If a table is too wide, its headings and labels are wrapped; if it is still too wide, each number
gets a line. Output that is not a terminal has unlimited width, unless COLUMNS is set.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from famjax.cli.layout import terminal_width, wrap

# heading of a column with the paper's numbers
PAPER_NUMBERS = "the paper"
_GAP = "  "
# minimum width of a wrapped column of words
_MIN_WIDTH = 12


class Table:
    """A table of text cells under headings, printed by `Output`.

    Args:
      title: title, wrapped only after commas and the like, if its phrases fit; "" for none.
      columns: headings; if all are "", there is no heading row.
      words: indices of text columns, aligned left, whose cells may be wrapped. All other columns
        are aligned right and never wrapped.
    """

    def __init__(self, title: str, columns: Sequence[str], words: Sequence[int] = ()):
        self._title, self._columns, self._words = title, tuple(columns), frozenset(words)
        # None is a horizontal rule
        self._rows: list[list[str] | None] = []

    def add_row(self, *cells: str) -> None:
        """Add a row; missing cells are empty."""
        self._rows.append([*cells, *[""] * (len(self._columns) - len(cells))])

    def add_rule(self) -> None:
        """Add a horizontal rule."""
        self._rows.append(None)

    def markdown(self) -> str:
        """Return the table in Markdown, without its title and rules."""
        rows = [f"| {' | '.join(row)} |" for row in (self._columns, *self._cells())]
        return "\n".join([rows[0], f"|{'---|' * len(self._columns)}", *rows[1:]])

    def lines(self, width: int | None) -> list[str]:
        """Return the lines of the table, at most `width` columns wide if given."""
        title = _fill(_phrases(self._title), width)
        widths = self._widths(self._columns)
        if width is None or _total(widths) <= width:
            return [*title, *self._grid(self._columns, widths)]
        columns = self._short_headings()
        widths = self._squeeze(self._widths(columns), width)
        if _total(widths) <= width:
            return [*title, *self._grid(columns, widths)]
        return [*title, *self._records(width)]

    def _cells(self) -> list[list[str]]:
        return [row for row in self._rows if row is not None]

    def _widths(self, columns: Sequence[str]) -> list[int]:
        stacks = zip(columns, *self._cells(), strict=True)
        return [max(len(line) for cell in stack for line in cell.split("\n")) for stack in stacks]

    def _short_headings(self) -> list[str]:
        """Return headings wrapped to the width of the cells below, or to their own longest word."""
        headings = []
        for i, heading in enumerate(self._columns):
            cells = max((len(row[i]) for row in self._cells()), default=0)
            headings.append("\n".join(wrap(heading, max(cells, _longest_word(heading)))))
        return headings

    def _squeeze(self, widths: list[int], width: int) -> list[int]:
        """Return the widths with the widest text column narrowed so that the table fits."""
        if not self._words:
            return widths
        widest = max(self._words, key=lambda i: widths[i])
        cells = [self._columns[widest], *(row[widest] for row in self._cells())]
        min_width = max(_MIN_WIDTH, *map(_longest_word, cells))
        narrower = max(min_width, widths[widest] - (_total(widths) - width))
        return [min(w, narrower) if i == widest else w for i, w in enumerate(widths)]

    def _grid(self, columns: Sequence[str], widths: list[int]) -> list[str]:
        lines = []
        rule = _GAP.join("-" * width for width in widths)
        if any(columns):
            heads = [heading.split("\n") for heading in columns]
            depth = max(map(len, heads))
            # headings are aligned at the bottom
            lines = self._join_columns(
                [[""] * (depth - len(head)) + head for head in heads], widths
            )
            lines.append(rule)
        for row in self._rows:
            if row is None:
                lines.append(rule)
            else:
                cells = (wrap(cell, w) or [""] for cell, w in zip(row, widths, strict=True))
                lines += self._join_columns(list(cells), widths)
        return lines

    def _join_columns(self, cells: list[list[str]], widths: list[int]) -> list[str]:
        """Return the lines of a row of multi-line cells."""
        lines = []
        for k in range(max(map(len, cells))):
            parts = [cell[k] if k < len(cell) else "" for cell in cells]
            aligned = [
                part.ljust(width) if i in self._words else part.rjust(width)
                for i, (part, width) in enumerate(zip(parts, widths, strict=True))
            ]
            lines.append(_GAP.join(aligned).rstrip())
        return lines

    def _records(self, width: int) -> list[str]:
        """Return a line "name: value" for each cell; all but a row's first line are indented."""
        lines = []
        for row in self._cells():
            if not any(self._columns):
                lines += _record(row[0], " ".join(row[1:]), "", width)
                continue
            named = [(name, cell) for name, cell in zip(self._columns, row, strict=True) if cell]
            for i, (name, cell) in enumerate(named):
                lines += _record(name, cell, "  " * (i > 0), width)
        return lines


class Output:
    """Prints lines and tables to standard output or error, with blank lines around tables."""

    def __init__(self, stderr: bool = False):
        self._stderr, self._after_table = stderr, False

    def print(self, item: str | Table) -> None:
        stream = sys.stderr if self._stderr else sys.stdout
        width = terminal_width(stream)
        lines = wrap(item, width) if isinstance(item, str) else item.lines(width)
        is_table = isinstance(item, Table)
        if is_table or self._after_table:
            lines = ["", *lines]
        self._after_table = is_table
        print("\n".join(lines), file=stream, flush=True)


def _record(name: str, cell: str, indent: str, width: int) -> list[str]:
    line = f"{indent}{name}: {cell}" if name else f"{indent}{cell}"
    if len(line) <= width:
        return [line]
    inside = f"{indent}  "
    if not name:
        return wrap(cell, width, inside, indent)
    return [*wrap(f"{name}:", width, inside, indent), *wrap(cell, width, f"{inside}  ", inside)]


def _phrases(title: str) -> list[str]:
    return re.split(r"(?<=[,;:]) |(?= \()", title) if title else []


def _fill(phrases: list[str], width: int | None) -> list[str]:
    """Return phrases joined to lines; a phrase wider than a line is broken between words."""
    lines: list[str] = []
    for phrase in map(str.strip, phrases):
        if lines and (width is None or len(lines[-1]) + 1 + len(phrase) <= width):
            lines[-1] += f" {phrase}"
        else:
            lines += wrap(phrase, width)
    return lines


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def _total(widths: list[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)
