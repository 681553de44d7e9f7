"""Text files: finding them, reading one in pieces of constant memory, and the lines of .jsonl.

Nothing is read in part silently: what is damaged, truncated, binary or no UTF-8 is an error when
the user named the file, and counted when it lay in a folder.
"""

from __future__ import annotations

import codecs
import fnmatch
import glob
import gzip
import hashlib
import json
import lzma
import os
import re
import sysconfig
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from famjax.core.errors import UserError, nearest
from famjax.core.json_files import parse_json, regular_size
from famjax.data.chat import ChatTemplate

PIECE_BYTES = 64 << 10
_PROBE_BYTES = 8 << 10
_SCAN_BYTES = 1 << 20
# Linux's folders of files that are made when they are read, and may never end
_KERNEL = ("/proc/", "/sys/")
_MOST_FILES = 1_000_000
# ASCII white space never stands inside a character of several bytes
SPACE = re.compile(rb"[ \t\n\r]")

# ---------------------------------------------------------------------------------------------
# Reading one file


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn what can go wrong while reading `path` into one line."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile):
        raise UserError(f"{path}: truncated or damaged; fetch or compress it again") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def open_text(path: str) -> BinaryIO:
    """Open a text file for reading its bytes, decompressing .gz and .xz."""
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    with reading(path):
        return openers.get(Path(path).suffix, open)(path, "rb")


def read_text_pieces(path: str) -> Iterator[str]:
    """Yield the text of one file, which is one document, in pieces of about 64 KiB."""
    if _is_jsonl(path):
        raise UserError(f"{path}: holds many documents; give a file that is one document")
    if _probe(path, explicit=True):
        raise UserError(f"{path}: empty")
    with open_text(path) as stream:
        for offset, data in pieces(stream, path, 0, None):
            yield decode(data, path, offset)


def pieces(stream: BinaryIO, path: str, begin: int, end: int | None) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of the text from byte `begin` to `end`, cut between characters."""
    with reading(path):
        stream.seek(begin)
    offset, buffer, ended = begin, b"", False
    while True:
        while not ended and len(buffer) < 2 * PIECE_BYTES:
            wanted = 2 * PIECE_BYTES - len(buffer)
            if end is not None:
                wanted = min(wanted, end - offset - len(buffer))
            with reading(path):
                data = stream.read(wanted)
            ended = not data
            buffer += data
        if not buffer:
            return
        size = _cut(buffer, PIECE_BYTES)
        yield offset, buffer[:size]
        offset, buffer = offset + size, buffer[size:]


def _cut(buffer: bytes, at: int) -> int:
    """Return where to cut: at the first white space from `at` on, or else between characters."""
    if len(buffer) <= at:
        return len(buffer)
    if space := SPACE.search(buffer, at):
        return space.start()
    # three continuation bytes at most; with more the text is not UTF-8, and decoding says so
    for back in range(min(4, at)):
        if buffer[at - back] & 0xC0 != 0x80:
            return at - back
    return at


def decode(data: bytes, path: str, offset: int) -> str:
    """Return the text of the bytes of `path` from `offset` on."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(_not_utf8(path, offset + error.start)) from None


def _not_utf8(path: str, offset: int) -> str:
    return f"{path}: not UTF-8 at byte {offset}; convert it (iconv -t utf-8) or leave it out"


def _is_jsonl(path: str) -> bool:
    return path.removesuffix(".gz").removesuffix(".xz").endswith(".jsonl")


# ---------------------------------------------------------------------------------------------
# Finding files


@dataclass(frozen=True)
class TextFile:
    """A text file.

    Attributes:
      path: as found; names the file's documents in keys.
      name: relative to the folder it was found in: the same on every machine.
      rows: byte offsets of the documents of a .jsonl file, [n] int64; None for any other.
      plain: where the lines of a .jsonl file can be read from, decompressed.
    """

    path: str
    name: str
    rows: np.ndarray | None = None
    plain: Any = None

    def __len__(self) -> int:
        return 1 if self.rows is None else len(self.rows)


def find_files(files: str) -> tuple[list[TextFile], Counter[str]]:
    """Return the text files that `data.files` names, and how many were skipped, by reason."""
    skipped: Counter[str] = Counter()
    found: dict[str, TextFile] = {}
    parts = [part.strip() for part in files.split(",")]
    entries = [files] if os.path.exists(files) else [part for part in parts if part] or [""]
    for entry in entries:
        for path, name, explicit in _expand(os.path.expanduser(entry), skipped):
            if reason := _probe(path, explicit):
                skipped[reason] += 1
            else:
                found.setdefault(os.path.realpath(path), TextFile(path, name))
    if not found:
        raise UserError(f"data.files={files}: no text in there{skips(skipped)}")
    return [_indexed(file) for file in found.values()], skipped


def _expand(entry: str, skipped: Counter[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield (path, relative name, whether named by the user) of the files an entry stands for."""
    if not entry:
        library = sysconfig.get_paths()["stdlib"]
        for path in _walk(library, skipped):
            if path.endswith(".py"):
                yield path, os.path.relpath(path, library), False
    elif _is_system(entry):
        raise UserError(f"data.files={entry}: is the system's; name the folder of the texts")
    elif os.path.isdir(entry):
        for path in _counted(_walk(entry, skipped), entry):
            yield path, os.path.relpath(path, entry), False
    elif os.path.exists(entry):
        yield entry, os.path.basename(entry), True
    elif matches := sorted(filter(os.path.isfile, _globbed(entry))):
        folder = os.path.dirname(re.split(r"[*?[]", entry)[0])
        for path in matches:
            yield path, os.path.relpath(path, folder or "."), False
    else:
        folder, name = os.path.split(entry)
        near = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
        raise UserError(f"data.files: no such file or folder: {entry}{nearest(name, near)}")


def _globbed(entry: str) -> Iterator[str]:
    """Yield what a pattern matches."""
    folder = os.path.dirname(re.split(r"[*?[]", entry)[0]) or "."
    # without "**" no more is looked at than one folder for each name of the pattern
    if _is_system(folder) and ("**" in entry or os.path.realpath(folder) != os.sep):
        raise UserError(f"data.files={entry}: is the system's; name the folder of the texts")
    parts = entry.split(os.sep)
    if "**" not in parts:
        yield from _counted(glob.iglob(entry), entry)
        return
    at = parts.index("**")
    head = os.sep.join(parts[:at]) or ("." if at == 0 else os.sep)
    below = (path for found in glob.iglob(head) for path in _below(found, parts[at:]))
    yield from _counted(below, entry)


def _below(folder: str, pattern: Sequence[str]) -> Iterator[str]:
    """Yield the files below a folder whose path in it is of a pattern with "**".

    As `glob.glob` does it, but links to folders are not followed: with two of them that lead to a
    folder above, it would not end.
    """
    wanted = [part for part in pattern if part]
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.normpath(os.path.join(root, name))
            if _is_like(os.path.relpath(path, folder).split(os.sep), wanted):
                yield path


def _is_like(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Tell whether the names of a path are of a pattern; hidden ones only where it says so."""

    def skipping(places: set[int]) -> set[int]:
        # "**" stands for nothing too
        for i, part in enumerate(pattern):
            if i in places and part == "**":
                places.add(i + 1)
        return places

    places = skipping({0})  # of the pattern, that may come next
    for part in parts:
        after = set()
        for i in places - {len(pattern)}:
            hidden = part.startswith(".") and not pattern[i].startswith(".")
            if not hidden and fnmatch.fnmatchcase(part, pattern[i]):
                after |= {i} if pattern[i] == "**" else {i + 1}
        places = skipping(after)
    return len(pattern) in places


def _counted(paths: Iterable[str], entry: str) -> Iterator[str]:
    for count, path in enumerate(paths):
        if count == _MOST_FILES:
            raise UserError(
                f"data.files={entry}: more than {_MOST_FILES:,} files; name a folder with fewer, "
                "or write the texts as lines of .jsonl files"
            )
        yield path


def _is_system(path: str) -> bool:
    """Tell whether a path is the whole file system, or made up by the kernel as it is read."""
    real = os.path.realpath(path)
    return real == os.sep or real.startswith(_KERNEL) or f"{real}{os.sep}" in _KERNEL


def _walk(folder: str, skipped: Counter[str]) -> Iterator[str]:
    """Yield the files below `folder`, sorted, without hidden ones and installed packages."""
    for root, folders, names in os.walk(folder):
        hidden = [name for name in folders + names if name.startswith(".")]
        skipped["hidden"] += len(hidden)
        folders[:] = sorted(set(folders) - set(hidden) - {"site-packages", "dist-packages"})
        for name in sorted(set(names) - set(hidden)):
            yield os.path.join(root, name)


def _probe(path: str, explicit: bool) -> str | None:
    """Return why a file is not text, judged by its first KiBs; an error if the user named it."""
    try:
        # opening a pipe may wait for ever, and a device may never end
        regular_size(path)
    except UserError:
        if explicit:
            raise
        return "no regular file"
    except OSError:
        if not explicit:
            return "no regular file"  # a link to nothing
    if os.path.realpath(path).startswith(_KERNEL):
        return "no regular file"
    with open_text(path) as stream, reading(path):
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
            raise UserError(_not_utf8(path, error.start)) from None
        return "not UTF-8"
    return None


def skips(skipped: Counter[str]) -> str:
    """Return what to say of the files that were skipped, by reason; nothing if there are none."""
    parts = [f"{count:,} {reason}" for reason, count in sorted(skipped.items()) if count]
    return f"; skipped {', '.join(parts)}" if parts else ""


def _indexed(file: TextFile) -> TextFile:
    """Find the documents of a .jsonl file: one on each line that is not blank."""
    if not _is_jsonl(file.path):
        return file
    compressed = not file.path.endswith(".jsonl")
    # Lines are read in random order, which compressed files do not allow.
    spool = NamedTemporaryFile(prefix="famjax-") if compressed else None  # noqa: SIM115
    rows = array("q")
    offset = 0
    with open_text(file.path) as stream, reading(file.path):
        for line in stream:
            if not line.isspace():
                rows.append(offset)
            offset += len(line)
            if spool:
                spool.write(line)
    if spool:
        spool.flush()
    return replace(file, rows=np.array(rows, np.int64), plain=spool)


# ---------------------------------------------------------------------------------------------
# The lines of a .jsonl file


class Line(NamedTuple):
    """A document on a line of a .jsonl file.

    Attributes:
      parts: of its UTF-8, each with the weight of predicting it.
      rendered: whether a chat template wrote it.
    """

    parts: Sequence[tuple[bytes, float]]
    rendered: bool = False


def json_line(file: TextFile, row: int, template: ChatTemplate | None) -> Line:
    """Return the document on a line of a .jsonl file.

    A line with "text" is all targets. Without a template, a prompt and its response are inputs and
    targets; with one, they are a conversation, as are messages.
    """
    assert file.rows is not None
    begin = int(file.rows[row])
    plain = file.plain.name if file.plain else file.path
    with open_text(plain) as stream, reading(file.path):
        stream.seek(begin)
        line = stream.readline()
    try:
        return _parsed(parse_json(line), template)
    except UnicodeDecodeError as error:
        raise UserError(_not_utf8(file.path, begin + error.start)) from None
    except UserError as error:
        wrong = str(error)
    except ValueError as error:
        wrong = f"not JSON with valid text ({error})"
    except RecursionError:
        wrong = "nested too deep"
    except (KeyError, TypeError, AttributeError):
        wrong = (
            'no "text", and no "inputs" with "targets", "prompt" with "response", or "messages", '
            "with a string in it"
        )
    raise UserError(f"{file.path}, line {_line_number(plain, begin)}: {wrong}")


def _parsed(found: dict[str, Any], template: ChatTemplate | None) -> Line:
    if found.get("text") is not None:
        return _weighted([(found["text"], 1.0)])
    if "targets" in found:
        return _weighted([(found["inputs"], 0.0), (found["targets"], 1.0)])
    if "messages" in found:
        return _conversation(found["messages"], template)
    prompt, response = found["prompt"], found["response"]
    if template is None or not (isinstance(prompt, str) and isinstance(response, str)):
        return _weighted([(prompt, 0.0), (response, 1.0)])
    turns = (("user", prompt), ("assistant", response))
    return _conversation([{"role": who, "content": said} for who, said in turns], template)


def _conversation(messages: Any, template: ChatTemplate | None) -> Line:
    if template is None:
        raise UserError(
            '"messages" needs a tokenizer with a chat template; set data.tokenizer to one, or '
            'write "inputs" and "targets"'
        )
    if not isinstance(messages, list) or not messages:
        raise UserError('"messages" is not a list with messages in it')
    for i, message in enumerate(messages):
        keys = ("role", "content")
        if not (isinstance(message, dict) and all(type(message.get(k)) is str for k in keys)):
            raise UserError(f'message {i + 1} has not both "role" and "content" with a string')
    return _weighted(template.document(messages), rendered=True)


def _weighted(parts: Sequence[tuple[str, float]], rendered: bool = False) -> Line:
    return Line([(text.encode("utf-8"), weight) for text, weight in parts], rendered)


def _line_number(path: str, offset: int) -> int:
    with open(path, "rb") as stream:
        blocks = iter(lambda: stream.read(min(_SCAN_BYTES, offset - stream.tell())), b"")
        return 1 + sum(block.count(b"\n") for block in blocks)


def fingerprint(files: Sequence[TextFile], sizes: Sequence[int]) -> str:
    """Return a hash of the files' names, sizes and numbers of documents, in their order."""
    listed = [(file.name, size, len(file)) for file, size in zip(files, sizes, strict=True)]
    return hashlib.blake2b(json.dumps(listed).encode(), digest_size=8).hexdigest()


def held_out(files: Sequence[TextFile], holdout: int) -> np.ndarray:
    """Return which documents are held out, [documents] bool: neither none nor all of them."""
    hashes = np.concatenate([_mix(_digest(file.name), len(file)) for file in files])
    held = hashes % np.uint64(holdout) == 0
    order = hashes.argsort(kind="stable")
    held[order[0]], held[order[-1]] = True, False
    return held


def _digest(name: str) -> int:
    data = Path(name).as_posix().encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _mix(seed: int, count: int) -> np.ndarray:
    """Return a hash of each of 0 to count - 1, [count] uint64 (Steele et al., SplitMix64)."""
    x = np.uint64(seed) + np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
