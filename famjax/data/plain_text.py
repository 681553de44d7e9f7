"""Temporary files with the text of compressed or Parquet files, which can be read in any order.

They lie in a folder of this process, which it keeps locked. The next process that makes such a
folder removes those without a lock: their processes were killed.
"""

from __future__ import annotations

import fcntl
import functools
import os
import re
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from famjax.core.errors import UserError

_FOLDER, _FILE = "famjax-copies-", "text-"


class PlainText:
    """A temporary file with the text of a compressed or Parquet file, deleted with this object.

    It is not kept open: data sets have more files than a process may open.
    """

    def __init__(self, path: str):
        self.path = path
        weakref.finalize(self, Path(path).unlink, missing_ok=True)


class PlainTextWriter:
    """Writes the text of a file to a temporary file.

    Args:
      path: path of the file whose text it is, for errors.
    """

    def __init__(self, path: str):
        self._path = path
        with self._wrap_errors():
            folder = _own_folder(tempfile.gettempdir()).path
            self._file = tempfile.NamedTemporaryFile(prefix=_FILE, dir=folder, delete=False)  # noqa: SIM115
        self.plain = PlainText(self._file.name)

    def write(self, data: bytes) -> None:
        with self._wrap_errors():
            self._file.write(data)

    def close(self) -> None:
        with self._wrap_errors():
            self._file.close()

    @contextmanager
    def _wrap_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self._path}: its text could not be written to {tempfile.gettempdir()} "
                f"({error.strerror or error}); set TMPDIR to a folder with space, or decompress it"
            ) from None


class _OwnFolder:
    """A folder in `parent`, locked until this process ends, and then removed."""

    def __init__(self, parent: str):
        while True:
            self.path = tempfile.mkdtemp(prefix=_FOLDER, dir=parent)
            # another process may remove the folder before it is locked
            with suppress(FileNotFoundError):
                self._lock = _open_folder(self.path)
                with suppress(OSError):  # no locks in this file system: nobody removes the folder
                    fcntl.flock(self._lock, fcntl.LOCK_EX)
                if os.path.isdir(self.path):
                    break
        weakref.finalize(self, _remove_folder, self.path)


@functools.cache
def _own_folder(parent: str) -> _OwnFolder:
    """Return this process's folder in `parent`, after removing those of killed processes."""
    for name in os.listdir(parent):
        if re.fullmatch(rf"{_FOLDER}\w{{8}}", name):
            with suppress(OSError):  # it belongs to another user, or its process is alive
                _remove_unlocked(os.path.join(parent, name))
    return _OwnFolder(parent)


def _remove_unlocked(path: str) -> None:
    lock = _open_folder(path)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_folder(path)
    finally:
        os.close(lock)


def _open_folder(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _remove_folder(path: str) -> None:
    """Remove a folder and the temporary files in it; with other files in it, it is kept."""
    with suppress(OSError):
        for name in os.listdir(path):
            if name.startswith(_FILE):
                os.unlink(os.path.join(path, name))
        os.rmdir(path)
