"""Functions of Python's standard library with the beginnings of their docstrings.

These pairs for summarization are on every machine. They depend on the version of Python.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

from famjax.core.atomic import fill_folder
from famjax.core.errors import UserError

# about one module in this many is held out for test, and as many for val
_PARTS = 10
# folders that some installations lack
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
FUNCTIONS, SUMMARIES = "functions", "summaries"


def write_docstrings(folder: Path, words: int, summary_words: int) -> None:
    """Write pairs to train.functions and train.summaries, of other modules to val.* and test.*.

    A line of `functions` is a function without its docstring, comments and layout. That line of
    `summaries` has the first paragraphs of the docstring. If the folder exists, nothing is written.

    Args:
      folder: folder of the files.
      words: maximum number of words of a function; the rest is cut.
      summary_words: maximum number of words of a summary. Functions whose first paragraph is longer
        are left out.

    Raises:
      UserError: this Python has no source code of its library.
    """
    if folder.exists():
        return
    pairs = _find_pairs(words, summary_words)
    if not all(pairs.values()):
        raise UserError(
            f"{_library()}: has too few functions with docstrings; run famjax with a Python whose "
            "library is there as source code"
        )
    with fill_folder(folder, shared=True) as partial:
        for split, both in pairs.items():
            for name, lines in zip((FUNCTIONS, SUMMARIES), zip(*both, strict=True), strict=True):
                text = "".join(f"{line}\n" for line in lines)
                (partial / f"{split}.{name}").write_text(text, encoding="utf-8")


def _find_pairs(words: int, summary_words: int) -> dict[str, list[tuple[str, str]]]:
    """Return the pairs of each split, each pair once."""
    pairs: dict[str, list[tuple[str, str]]] = {split: [] for split in ("train", "val", "test")}
    seen: set[tuple[str, str]] = set()
    for module in sorted(_library().rglob("*.py")):
        name = module.relative_to(_library())
        if _LEFT_OUT & set(name.parts):
            continue
        # by its name, so that a module more or less changes no others
        part = zlib.crc32(name.as_posix().encode()) % _PARTS
        split = {0: "test", 1: "val"}.get(part, "train")
        for function, docstring in _documented_functions(module):
            summary = _summarize(docstring, summary_words)
            pair = " ".join(function.split()[:words]), summary
            if summary and pair not in seen:
                seen.add(pair)
                pairs[split].append(pair)
    return pairs


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _documented_functions(module: Path) -> Iterator[tuple[str, str]]:
    """Yield the code of functions, without the docstring, and the docstring.

    What cannot be parsed, or written as a line of UTF-8, is left out.
    """
    try:
        tree = ast.parse(module.read_bytes())
    except (OSError, SyntaxError, ValueError):  # some files test parsers
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if docstring and len(node.body) > 1:
            node.body = node.body[1:]
            try:
                code = ast.unparse(node)
                f"{code}{docstring}".encode()
            except (ValueError, RecursionError):
                continue
            if "\0" not in code + docstring:
                yield code, docstring


def _summarize(docstring: str, words: int) -> str:
    """Return the first paragraphs that together have at most that many words, in one line."""
    summary: list[str] = []
    for paragraph in re.split(r"\n\s*\n", docstring.strip()):
        own = paragraph.split()
        if len(summary) + len(own) > words:
            break
        summary += own
    return " ".join(summary)
