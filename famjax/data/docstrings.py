"""Functions of Python's standard library with the summaries in their docstrings.

These pairs for summarization are on every machine.
"""

from __future__ import annotations

import ast
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# one module with documented functions in this many is held out
_HELD_OUT = 16
FUNCTIONS, SUMMARIES = "functions", "summaries"


def write_docstrings(folder: Path, words: int) -> None:
    """Write pairs to train.functions and train.summaries, and of other modules to test.*.

    A line of `functions` is a function without its docstring, in one line; that of `summaries` is
    the first paragraph of the docstring (PEP 257). Files that are there are kept.

    Args:
      folder: folder of the files, named for the number of words by the caller.
      words: maximum number of words of a function; the rest is cut.
    """
    if folder.exists():
        return
    # renamed when all files are there, so that the folder is never incomplete
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    pairs: dict[str, list[tuple[str, str]]] = {"train": [], "test": []}
    seen: set[tuple[str, str]] = set()
    for number, found in enumerate(_documented_modules(), start=1):
        split = "train" if number % _HELD_OUT else "test"
        for function, summary in found:
            pair = " ".join(function.split()[:words]), summary
            if pair not in seen:
                seen.add(pair)
                pairs[split].append(pair)
    for split, both in pairs.items():
        for name, lines in zip((FUNCTIONS, SUMMARIES), zip(*both, strict=True), strict=True):
            text = "".join(f"{line}\n" for line in lines)
            (partial / f"{split}.{name}").write_text(text, encoding="utf-8")
    partial.rename(folder)


def _documented_modules() -> Iterator[list[tuple[str, str]]]:
    """Yield the functions and summaries of each module that has any."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if {"site-packages", "dist-packages"} & set(path.parts):
            continue
        try:
            module = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # files that test parsers
            continue
        if found := list(_documented_functions(module)):
            yield found


def _documented_functions(module: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if not docstring or len(node.body) == 1:
            continue
        summary = " ".join(docstring.split("\n\n")[0].split())
        node.body = node.body[1:]
        yield ast.unparse(node), summary
