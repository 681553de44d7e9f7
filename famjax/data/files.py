"""One text file: opened, decompressed, probed, and read in pieces of constant memory.

No file is read partially without notice. A file that is damaged, truncated, binary or not UTF-8 is
an error if the user named it, and counted as skipped if it was found in a folder.
"""

from __future__ import annotations

import codecs
import gzip
import lzma
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from famjax.core.errors import UserError
from famjax.core.json_files import regular_file_size

PIECE_BYTES = 64 << 10
_PROBE_BYTES = 8 << 10
# Linux's virtual file systems: files there are generated on read and may be endless
_KERNEL = ("/proc/", "/sys/")
# ASCII white space never occurs inside a multi-byte character
SPACE = re.compile(rb"[ \t\n\r]")


@dataclass(frozen=True)
class TextFile:
    """A text file.

    Attributes:
      path: as found; part of the keys of its documents.
      name: path relative to the folder that was searched: the same on every machine.
      rows: byte offsets of the documents of a .jsonl file, [n] int64; None for other files.
      plain: temporary file with the decompressed lines of a .jsonl file.
    """

    path: str
    name: str
    rows: np.ndarray | None = None
    plain: Any = None

    def __len__(self) -> int:
        return 1 if self.rows is None else len(self.rows)


@contextmanager
def wrap_read_errors(path: str) -> Iterator[None]:
    """Convert errors from reading `path` into a `UserError` of one line."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile):
        raise UserError(f"{path}: truncated or damaged; fetch or compress it again") from None
    except OSError as error:
        raise UserError(read_error_message(path, error)) from None


def read_error_message(path: str, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return f"{path}: no permission to read it; chmod it (u+rX), or leave it out"
    return f"{path}: {error.strerror or error}"


def open_text(path: str) -> BinaryIO:
    """Open a text file as a stream of bytes, decompressing .gz and .xz."""
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    with wrap_read_errors(path):
        return openers.get(Path(path).suffix, open)(path, "rb")


def read_text_pieces(path: str) -> Iterator[str]:
    """Yield the text of one file, which is one document, in pieces of about 64 KiB."""
    if is_jsonl(path):
        raise UserError(f"{path}: holds many documents; give a file that is one document")
    if probe_text(path, explicit=True):
        raise UserError(f"{path}: empty")
    with open_text(path) as stream:
        for offset, data in iter_pieces(stream, path, 0, None):
            yield decode_utf8(data, path, offset)


def iter_pieces(
    stream: BinaryIO, path: str, begin: int, end: int | None
) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of the text from byte `begin` to `end`, cut between characters."""
    with wrap_read_errors(path):
        stream.seek(begin)
    offset, buffer, ended = begin, b"", False
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
    """Return where to cut: at the first white space from `at` on, else between characters."""
    if len(buffer) <= at:
        return len(buffer)
    if space := SPACE.search(buffer, at):
        return space.start()
    # at most three continuation bytes; with more the text is not UTF-8, and decoding fails
    for back in range(min(4, at)):
        if buffer[at - back] & 0xC0 != 0x80:
            return at - back
    return at


def decode_utf8(data: bytes, path: str, offset: int) -> str:
    """Return the text of the bytes of `path` from `offset` on."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(utf8_error_message(path, offset + error.start)) from None


def utf8_error_message(path: str, offset: int) -> str:
    return f"{path}: not UTF-8 at byte {offset}; convert it (iconv -t utf-8) or leave it out"


def is_jsonl(path: str) -> bool:
    return path.removesuffix(".gz").removesuffix(".xz").endswith(".jsonl")


def is_system_path(path: str) -> bool:
    """Return whether a path is the root or in one of the kernel's virtual file systems."""
    real = os.path.realpath(path)
    return real == os.sep or real.startswith(_KERNEL) or f"{real}{os.sep}" in _KERNEL


def probe_text(path: str, explicit: bool) -> str | None:
    """Return why a file is not text, from its first KiBs; an error if the user named it."""
    try:
        # opening a pipe may block forever, and a device may be endless
        regular_file_size(path)
    except UserError:
        if explicit:
            raise
        return "no regular file"
    except OSError:
        if not explicit:
            return "no regular file"  # a dangling link
    if os.path.realpath(path).startswith(_KERNEL):
        return "no regular file"
    with open_text(path) as stream, wrap_read_errors(path):
        head = stream.read(_PROBE_BYTES)
    if not head:
        return "empty"
    if (at := head.find(0)) >= 0:
        if explicit:
            raise UserError(
                f"{path}: binary, byte {at} is zero; give UTF-8 text, or .gz or .xz of it"
            )
        return "binary"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError as error:
        if explicit:
            raise UserError(utf8_error_message(path, error.start)) from None
        return "not UTF-8"
    return None
