"""Temporary files with the text of compressed or Parquet files, which can be read in any order."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from famjax.core.errors import UserError


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
            self._file = tempfile.NamedTemporaryFile(prefix="famjax-", delete=False)  # noqa: SIM115
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
