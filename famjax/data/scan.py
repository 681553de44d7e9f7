"""The opening scan of files: checks every byte of a text, and finds and checks lines of .jsonl.

Files that passed the checks of an earlier scan are not checked again.
"""

from __future__ import annotations

import json
import os
from array import array
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import famjax
from famjax.core.atomic import write_file
from famjax.core.errors import UserError
from famjax.core.json_files import read_json
from famjax.data.files import (
    ReadProgress,
    TextFile,
    check_text,
    is_compressed,
    is_jsonl,
    is_probed_whole,
    open_text,
    wrap_read_errors,
)
from famjax.data.json_lines import iter_lines, parse_record, wrap_line_errors
from famjax.data.plain_text import PlainTextWriter
from famjax.tokenizers.chat import ChatTemplate

# bytes that the opening scan reads between checks of the clock
_REPORT_BYTES = 1 << 20
# maximum number of distinct role sequences on which the opening scan tries the chat template
_MAX_TRIED = 256
# version of the checks of a line: a record made with another version is ignored
_CHECKS_VERSION = 3


class CheckedFiles:
    """A record of the files that passed the checks of an earlier opening scan.

    A file is identified by its path, size and modification time.

    Args:
      path: path of the record; None keeps no record. A record that cannot be read counts as empty.
      template: chat template with which the conversations were tried.
    """

    def __init__(self, path: Path | None, template: ChatTemplate | None):
        self._path = path
        self._identity = [_CHECKS_VERSION, famjax.__version__, template.digest if template else ""]
        self._saved = self._read()
        self._current: dict[str, list[int]] = {}

    def _read(self) -> dict[str, Any]:
        if self._path is None:
            return {}
        try:
            record = read_json(self._path, "remove it")
        except (UserError, OSError):
            return {}
        if not isinstance(record, dict) or record.get("rules") != self._identity:
            return {}
        files = record.get("files")
        return files if isinstance(files, dict) else {}

    def record(self, path: str) -> bool:
        """Add a file to the record; return whether an earlier scan passed it unchanged.

        Call this before the file is read, so that a change in the meantime is detected.
        """
        with wrap_read_errors(path):
            status = os.stat(path)
        known = [status.st_size, status.st_mtime_ns]
        path = os.path.abspath(path)
        self._current[path] = known
        return self._saved.get(path) == known

    def remove(self, path: str) -> None:
        """Remove a file that did not pass."""
        del self._current[os.path.abspath(path)]

    def save(self) -> None:
        """Write the record atomically, if it has changed."""
        if self._path is None or self._current == self._saved:
            return
        # an error is ignored: without a record the next start only takes longer
        with suppress(OSError):
            write_file(self._path, json.dumps({"rules": self._identity, "files": self._current}))
            self._saved = dict(self._current)


class Scanner:
    """Checks files, and finds the documents in JSON-lines files.

    It reports its progress if it takes more than 5 seconds.

    Args:
      template: chat template, tried on the first conversation with each sequence of roles.
      checked: record of files that need no check.

    Attributes:
      found_text: whether a document has any text. Files that were not read now count as text.
    """

    def __init__(self, template: ChatTemplate | None, checked: CheckedFiles):
        self._template, self._checked = template, checked
        self.found_text = False
        self._tried: set[Any] = set()
        self._progress = ReadProgress()

    def check_text(self, path: str, explicit: bool) -> str | None:
        """Return why a file of text cannot be read to its end; None if it can, or has JSON lines.

        Raises:
          UserError: the file is damaged, or the user has named it (`explicit`), and it is binary or
            not UTF-8.
        """
        if is_jsonl(path) or is_probed_whole(path) or self._checked.record(path):
            return None
        if reason := check_text(path, explicit, self._progress):
            self._checked.remove(path)
        return reason

    def index_documents(self, file: TextFile) -> TextFile:
        """Return the file; if of JSON lines, with the offsets of its documents: non-blank lines."""
        if not is_jsonl(file.path):
            self.found_text = True
            return file
        compressed = is_compressed(file.path)
        known = self._checked.record(file.path)
        self.found_text |= known
        # Lines are read in random order, which compressed files do not support.
        writer = PlainTextWriter(file.path) if compressed else None
        rows = array("q")
        offset = number = reported = 0
        line_errors = wrap_line_errors(file.path, lambda: number)
        with wrap_read_errors(file.path), open_text(file.path) as stream, line_errors:
            for number, line in enumerate(iter_lines(stream), 1):  # noqa: B007, in the lambda
                if not line.isspace():
                    rows.append(offset)
                    if not known:
                        self._check(line)
                offset += len(line)
                if offset - reported >= _REPORT_BYTES:
                    self._progress.add(file.path, offset - reported)
                    reported = offset
                if writer:
                    writer.write(line)
        if writer:
            writer.close()
        plain = writer.plain if writer else None
        return replace(file, rows=np.array(rows, np.int64), plain=plain)

    def _check(self, line: bytes) -> None:
        parts, messages = parse_record(line, self._template)
        self.found_text |= bool(messages) or any(text for text, _ in parts)
        if not messages:
            return
        assert self._template is not None
        kind = tuple((message["role"], *message) for message in messages)
        # Rendering takes a hundred times longer than parsing. If the template accepts one
        # conversation with these roles in this order, all such conversations are taken as valid.
        if kind not in self._tried and len(self._tried) < _MAX_TRIED:
            self._tried.add(kind)
            self._template.render_document(messages)
