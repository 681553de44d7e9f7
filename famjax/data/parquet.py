"""Parquet files, read as JSON lines: one object for each row, with the columns as its keys."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import BinaryIO, cast

from famjax.core.errors import UserError
from famjax.core.optional import missing_message, missing_modules

# rows decoded at a time: documents may have megabytes each
_ROWS = 16


def is_parquet(path: str) -> bool:
    return path.lower().endswith(".parquet")


def open_parquet(path: str) -> BinaryIO:
    """Open a Parquet file as a stream of JSON lines, which reads forwards only.

    Values without a form in JSON, such as dates and bytes, become strings.

    Raises:
      UserError: pyarrow is not installed.
      EOFError: the file is truncated or damaged; also when it is read.
    """
    if missing := missing_modules(["pyarrow"]):
        raise UserError(f"{path}: {missing_message(missing)}")
    import pyarrow.parquet

    def lines() -> Iterator[bytes]:
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(_ROWS):
                    for row in batch.to_pylist():
                        yield json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n"
        except (pyarrow.ArrowException, UnicodeDecodeError):
            raise EOFError(path) from None
        except OSError as error:
            if error.errno:
                raise
            raise EOFError(path) from None  # an error of the format

    return cast(BinaryIO, io.BufferedReader(_Stream(lines())))


class _Stream(io.RawIOBase):
    """A stream of the bytes of an iterator."""

    def __init__(self, parts: Iterator[bytes]):
        self._parts = parts
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        self._rest = self._rest or next(self._parts, b"")
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size
