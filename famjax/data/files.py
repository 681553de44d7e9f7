"""Text files: opens, decompresses and probes one file, and reads it in pieces of constant size.

Parquet files are read as JSON lines.

No file is read partially without an error or a note. A file that is damaged, truncated, binary or
not UTF-8 is an error if the user named it, and counted as skipped if it was found in a folder.
"""

from __future__ import annotations

import codecs
import gzip
import lzma
import os
import re
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from famjax.core.errors import UserError
from famjax.core.json_files import regular_file_size
from famjax.data.parquet import is_parquet, open_parquet
from famjax.data.plain_text import PlainText

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PIECE_BYTES = 64 << 10
_PROBE_BYTES = 8 << 10
# bytes decompressed or checked between checks of the clock
_SEEK_BYTES = 1 << 20
# seconds before the first report of progress
_SILENT_SECONDS = 5.0
# Linux's virtual file systems: files there are generated on read and may be endless
_KERNEL = ("/proc/", "/sys/")
# endings of compressed files, and the program that decompresses each
DECOMPRESSORS = {".gz": "gzip", ".xz": "xz", ".zst": "zstd"}
# endings of files with a document on each line
_JSON_LINES = (".jsonl", ".ndjson")
# endings of formats that are not text, in which data sets are often kept
_BINARY_FORMATS = (".arrow", ".bin")
_MARK = codecs.BOM_UTF8
# ASCII white space never occurs inside a multi-byte character
SPACE = re.compile(rb"[ \t\n\r]")


@dataclass(frozen=True)
class TextFile:
    """A text file.

    Attributes:
      path: path as it was found; part of the keys of the file's documents.
      name: path relative to the folder that was searched, which is the same on every machine.
      rows: byte offsets of the documents in a file of JSON lines, [n] int64; else None.
      plain: the lines of a compressed or Parquet file, else None.
    """

    path: str
    name: str
    rows: np.ndarray | None = None
    plain: PlainText | None = None

    def __len__(self) -> int:
        return 1 if self.rows is None else len(self.rows)


class ReadProgress:
    """Reports on stderr how much of data.files was read, if reading takes over 5 seconds."""

    def __init__(self) -> None:
        self._begin = self._last_report = time.monotonic()
        self._bytes = 0

    def add(self, path: str, size: int) -> None:
        """Count bytes read from a file."""
        self._bytes += size
        now = time.monotonic()
        # at growing intervals: 5, 10, 20, 40 seconds after the start
        if now - self._begin > max(_SILENT_SECONDS, 2 * (self._last_report - self._begin)):
            self._last_report = now
            rate = self._bytes / (now - self._begin)
            print(
                f"famjax: reading data.files: {self._bytes / 1e6:,.0f} MB so far, "
                f"{rate / 1e6:,.0f} MB/s, now in {path}",
                file=sys.stderr,
            )


@contextmanager
def wrap_read_errors(path: str) -> Iterator[None]:
    """Convert errors from reading `path` into a one-line `UserError`."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, zstd.ZstdError):
        raise UserError(f"{path}: truncated or damaged; fetch or compress it again") from None
    except OSError as error:
        raise UserError(read_error_message(path, error)) from None


def read_error_message(path: str, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return f"{path}: no permission to read it; chmod it (u+rX), or leave it out"
    return f"{path}: {error.strerror or error}"


def open_text(path: str) -> BinaryIO:
    """Open a text file as a stream of bytes: decompressed, and Parquet as JSON lines."""
    suffix = Path(path).suffix
    with wrap_read_errors(path):
        if is_parquet(path):
            return open_parquet(path)
        if suffix == ".zst":
            # as long a window as `zstd --long` can write, instead of 128 MiB
            window: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 31}
            return cast(BinaryIO, zstd.open(path, "rb", options=window))
        if suffix == ".gz":
            return cast(BinaryIO, gzip.open(path, "rb"))
        if suffix == ".xz":
            # not .lzma, which is also read by default: it would take zeros for any number of empty
            # texts
            return cast(BinaryIO, lzma.open(path, "rb", format=lzma.FORMAT_XZ))
        return open(path, "rb")


def seek_text(stream: BinaryIO, path: str, offset: int | None) -> int:
    """Go to a byte offset in a text, or to its end if `offset` is None, and return the offset.

    A compressed text is decompressed up to there, with reports of progress.
    """
    with wrap_read_errors(path):
        if not isinstance(stream, gzip.GzipFile | lzma.LZMAFile | zstd.ZstdFile):
            return stream.seek(0, os.SEEK_END) if offset is None else stream.seek(offset)
        progress, at = ReadProgress(), stream.seek(0)
        while True:
            size = _SEEK_BYTES if offset is None else min(_SEEK_BYTES, offset - at)
            if not (size := len(stream.read(size))):
                return at
            at += size
            progress.add(path, size)


def read_text_pieces(path: str) -> Iterator[str]:
    """Yield the text of one file, which is one document, in pieces of about 64 KiB."""
    if is_jsonl(path):
        raise UserError(f"{path}: holds many documents; give a file that is one document")
    if probe_text(path, explicit=True):
        raise UserError(f"{path}: empty")
    with open_text(path) as stream:
        for offset, data in iter_pieces(stream, path, 0, None):
            yield decode_text(data, path, offset)


def iter_pieces(
    stream: BinaryIO, path: str, begin: int, end: int | None
) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of the text from byte `begin` to `end`, cut between characters.

    A byte order mark is not part of the text.
    """
    seek_text(stream, path, begin)
    offset, buffer, ended = begin, b"", False
    if begin == 0:
        with wrap_read_errors(path):
            buffer = stream.read(len(_MARK))[:end]  # of a mark, a part if the text ends in it
        if _MARK.startswith(buffer) and (buffer == _MARK or end is not None):
            offset, buffer = len(buffer), b""
    while True:
        while not ended and len(buffer) < 2 * PIECE_BYTES:
            wanted = 2 * PIECE_BYTES - len(buffer)
            if end is not None:
                wanted = min(wanted, end - offset - len(buffer))
            with wrap_read_errors(path):
                data = stream.read(wanted)
            ended = not data
            buffer += data
        if not buffer:
            return
        size = _find_cut(buffer, PIECE_BYTES)
        yield offset, buffer[:size]
        offset, buffer = offset + size, buffer[size:]


def _find_cut(buffer: bytes, at: int) -> int:
    """Return where to cut: before the first white space from `at` on, else between characters."""
    if len(buffer) <= at:
        return len(buffer)
    if space := SPACE.search(buffer, at):
        return space.start()
    # a character has at most three continuation bytes; with more, decoding fails
    for back in range(min(4, at)):
        if buffer[at - back] & 0xC0 != 0x80:
            return at - back
    return at


def decode_text(data: bytes, path: str, offset: int) -> str:
    """Decode bytes that start at `offset` of a text file.

    Raises:
      UserError: the bytes are not UTF-8, or contain a zero byte.
    """
    if (at := data.find(0)) >= 0:
        raise UserError(_binary_error_message(path, offset + at))
    return decode_utf8(data, path, offset)


def decode_utf8(data: bytes, path: str, offset: int) -> str:
    """Decode bytes that start at `offset` of the file at `path`.

    Raises:
      UserError: the bytes are not UTF-8.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(utf8_error_message(path, offset + error.start)) from None


def _binary_error_message(path: str, offset: int) -> str:
    if path.lower().endswith(_BINARY_FORMATS):
        return f"{path}: {Path(path).suffix} is not text; write it as .jsonl, .parquet or .txt"
    return f"{path}: binary, byte {offset} is zero; give UTF-8 text, or .gz, .xz or .zst of it"


def utf8_error_message(path: str, offset: int) -> str:
    if path.lower().endswith(_BINARY_FORMATS):
        return _binary_error_message(path, offset)
    return f"{path}: not UTF-8 at byte {offset}; convert it (iconv -t utf-8) or leave it out"


def is_jsonl(path: str) -> bool:
    """Return whether a file has JSON lines, or is read as such, by its name."""
    return split_compression(path)[0].lower().endswith(_JSON_LINES) or is_parquet(path)


def is_json(path: str) -> bool:
    """Return whether a file is one JSON value, by its name."""
    return split_compression(path)[0].lower().endswith(".json")


def is_compressed(path: str) -> bool:
    """Return whether a file can only be read forwards: it is compressed, or Parquet."""
    return path.endswith(tuple(DECOMPRESSORS)) or is_parquet(path)


def split_compression(path: str) -> tuple[str, str]:
    """Return a path without the ending of a compression, and the ending, such as ".gz" or ""."""
    return os.path.splitext(path) if path.endswith(tuple(DECOMPRESSORS)) else (path, "")


def is_system_path(path: str) -> bool:
    """Return whether a path is the root folder or in a virtual file system of the kernel."""
    real = os.path.realpath(path)
    return real == os.sep or real.startswith(_KERNEL) or f"{real}{os.sep}" in _KERNEL


def read_head(path: str) -> bytes:
    """Return the first 8 KiB of a text file, decompressed."""
    with open_text(path) as stream, wrap_read_errors(path):
        return stream.read(_PROBE_BYTES)


def probe_text(path: str, explicit: bool) -> str | None:
    """Return why a file is not text, judging by its first 8 KiB; None if it is text.

    Raises:
      UserError: the user has named the file (`explicit`), and it is binary, not UTF-8 or not a
        regular file.
    """
    try:
        # opening a pipe may block forever, and a device may be endless
        regular_file_size(path)
    except UserError:
        if explicit:
            raise
        return "not regular"
    except OSError:
        if not explicit:
            return "not regular"  # a dangling link
    if os.path.realpath(path).startswith(_KERNEL):
        return "not regular"
    if (head := read_head(path)) in (b"", _MARK):
        return "empty"
    return _TextCheck(path, explicit).add(head, is_end=is_probed_whole(path))


def is_probed_whole(path: str) -> bool:
    """Return whether `probe_text` reads all of a file."""
    with wrap_read_errors(path):
        return not is_compressed(path) and os.path.getsize(path) < _PROBE_BYTES


def check_text(path: str, explicit: bool, progress: ReadProgress) -> str | None:
    """Return why a file is not text, after reading all of it; None if it is text.

    Raises:
      UserError: the file is damaged, or the user has named it (`explicit`), and it is binary or not
        UTF-8.
    """
    check = _TextCheck(path, explicit)
    with open_text(path) as stream, wrap_read_errors(path):
        while data := stream.read(_SEEK_BYTES):
            if reason := check.add(data):
                return reason
            progress.add(path, len(data))
    return check.add(b"", is_end=True)


class _TextCheck:
    """Checks the consecutive bytes of a file.

    Args:
      path: path of the file.
      explicit: whether bytes that are not text are an error.
    """

    def __init__(self, path: str, explicit: bool):
        self._path, self._explicit = path, explicit
        self._decoder, self._read = codecs.getincrementaldecoder("utf-8")(), 0

    def add(self, data: bytes, is_end: bool = False) -> str | None:
        """Return why the next bytes are not text, or None; at the end no character is open."""
        if (at := data.find(0)) >= 0:
            if self._explicit:
                raise UserError(_binary_error_message(self._path, self._read + at))
            return "binary"
        # bytes of a character that the next bytes may complete
        waiting = len(self._decoder.getstate()[0])
        try:
            self._decoder.decode(data, is_end)
        except UnicodeDecodeError as error:
            if self._explicit:
                at = self._read - waiting + error.start
                raise UserError(utf8_error_message(self._path, at)) from None
            return "not UTF-8"
        self._read += len(data)
        return None
