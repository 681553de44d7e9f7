"""Tables of comma- or tab-separated values: how to make JSON lines of them.

As plain text a model would learn their separators and all of their columns. A table that the user
names is refused; in a folder or a glob it is a text like others, unless all files are tables.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from famjax.core.errors import UserError
from famjax.data.files import DECOMPRESSORS, split_compression

# the arguments of csv.DictReader
_TABLES = {".csv": "sys.stdin", ".tsv": r'sys.stdin, delimiter="\t"'}


def check_not_table(path: str) -> None:
    """Raise a `UserError` for a .csv or .tsv file, which says how to make JSON lines of it."""
    if _kind(path) in _TABLES:
        raise UserError(_message(path))


def check_not_all_tables(files: str, paths: Sequence[str]) -> None:
    """Raise a `UserError` if all files found in folders are tables.

    Args:
      files: `data.files`.
      paths: the files, at least one.
    """
    if all(_kind(path) in _TABLES for path in paths):
        raise UserError(f"data.files={files}: {_message(paths[0])}")


def _kind(path: str) -> str:
    return os.path.splitext(split_compression(path)[0])[1].lower()


def _message(path: str) -> str:
    (name, compression), source = split_compression(path), shlex.quote(path)
    target = shlex.quote(os.path.splitext(name)[0] + ".jsonl")
    rows = f"csv.DictReader({_TABLES[_kind(path)]})"
    program = f"import csv, json, sys; [print(json.dumps(row)) for row in {rows}]"
    convert = f"python3 -c {shlex.quote(program)}"
    read = f"{DECOMPRESSORS[compression]} -dc {source} | {convert}" if compression else ""
    command = f"{read or f'{convert} < {source}'} > {target}"
    plain = f"to .txt{compression} to train on it as plain text"
    return f"{path}: a table is not read as text; run {command}, or rename it {plain}"
