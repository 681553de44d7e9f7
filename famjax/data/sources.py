"""Documents for lanes and packing, and the text files they come from.

A document is [bos] tokens [eos]. It is read in pieces of about 64 KiB of text, each tokenised by
itself, so that memory stays constant and the tokens do not depend on where reading was resumed.
"""

from __future__ import annotations

import bisect
import codecs
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import sysconfig
import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

import grain
import numpy as np

from famjax.core.errors import UserError, nearest
from famjax.data.tokenizers import Tokenizer

PIECE_BYTES = 64 << 10
_PROBE_BYTES = 8 << 10
_SCAN_BYTES = 1 << 20
# ASCII white space never stands inside a character of several bytes
_SPACE = re.compile(rb"[ \t\n\r]")

# JSON, and equal to itself after a round trip through JSON
Key = list[Any]
Split = Literal["train", "holdout"]


class Piece(NamedTuple):
    """Consecutive tokens of a document.

    Attributes:
      tokens: [n] int32.
      weights: [n] float32, the weight of predicting each token.
      passing: of a document's first piece: it begins with the FAM that the lane's last document
        left, and not with the prompt.
    """

    tokens: np.ndarray
    weights: np.ndarray
    passing: bool = False


class Source(Protocol):
    """Endless documents for a number of lanes. Every document starts with bos, unless it begins
    with the memory of the one before it, and ends with eos.
    """

    def key(self, lane: int, lanes: int, k: int, before: Key | None = None) -> Key:
        """Return the JSON-able name of the k-th document of `lane`; `before` is the last one's."""

    def open(self, key: Key, piece: int = 0) -> Iterator[Piece]:
        """Yield the pieces of the document `key` from the piece-th on."""

    def get_state(self) -> dict[str, Any]:
        """Return what `key` depends on besides its arguments, JSON-able."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Set what `get_state` returned."""


# ---------------------------------------------------------------------------------------------
# Reading one file


@contextmanager
def _reading(path: str) -> Iterator[None]:
    """Turn what can go wrong while reading `path` into one line."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile):
        raise UserError(f"{path}: truncated or damaged; fetch or compress it again") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def _open_text(path: str) -> BinaryIO:
    """Open a text file for reading its bytes, decompressing .gz and .xz."""
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    with _reading(path):
        return openers.get(Path(path).suffix, open)(path, "rb")


def read_text_pieces(path: str) -> Iterator[str]:
    """Yield the text of one file, which is one document, in pieces of about 64 KiB."""
    if _is_jsonl(path):
        raise UserError(f"{path}: holds many documents; give a file that is one document")
    if _probe(path, explicit=True):
        raise UserError(f"{path}: empty")
    with _open_text(path) as stream:
        for offset, data in _pieces(stream, path, 0, None):
            yield _decode(data, path, offset)


def iter_tokens(path: str, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yield the tokens [n] int32 of one file, piece by piece: [bos] tokens [eos]."""
    for piece in _document(read_text_pieces(path), tokenizer, 0):
        yield piece.tokens


def _document(texts: Iterator[str], tokenizer: Tokenizer, piece: int) -> Iterator[Piece]:
    """Yield bos (piece 0), the tokens of each of `texts`, eos. `texts` starts at its due piece."""
    if piece == 0:
        yield Piece(np.array([tokenizer.bos_id], np.int32), np.zeros(1, np.float32))
    for text in texts:
        tokens = tokenizer.encode(text)
        yield Piece(tokens, np.ones(len(tokens), np.float32))
    yield Piece(np.array([tokenizer.eos_id], np.int32), np.ones(1, np.float32))


def _pieces(
    stream: BinaryIO, path: str, begin: int, end: int | None
) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of the text from byte `begin` to `end`, cut between characters."""
    with _reading(path):
        stream.seek(begin)
    offset, buffer, ended = begin, b"", False
    while True:
        while not ended and len(buffer) < 2 * PIECE_BYTES:
            wanted = 2 * PIECE_BYTES - len(buffer)
            if end is not None:
                wanted = min(wanted, end - offset - len(buffer))
            with _reading(path):
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
    if space := _SPACE.search(buffer, at):
        return space.start()
    # three continuation bytes at most; with more the text is not UTF-8, and decoding says so
    for back in range(min(4, at)):
        if buffer[at - back] & 0xC0 != 0x80:
            return at - back
    return at


def _decode(data: bytes, path: str, offset: int) -> str:
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
class _File:
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


def _find(files: str) -> tuple[list[_File], Counter[str]]:
    """Return the text files that `data.files` names, and how many were skipped, by reason."""
    skipped: Counter[str] = Counter()
    found: dict[str, _File] = {}
    parts = [part.strip() for part in files.split(",")]
    entries = [files] if os.path.exists(files) else [part for part in parts if part] or [""]
    for entry in entries:
        for path, name, explicit in _expand(os.path.expanduser(entry), skipped):
            if reason := _probe(path, explicit):
                skipped[reason] += 1
            else:
                found.setdefault(os.path.realpath(path), _File(path, name))
    if not found:
        raise UserError(f"data.files={files}: no text in there{_skips(skipped)}")
    return [_indexed(file) for file in found.values()], skipped


def _expand(entry: str, skipped: Counter[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield (path, relative name, whether named by the user) of the files an entry stands for."""
    if not entry:
        library = sysconfig.get_paths()["stdlib"]
        for path in _walk(library, skipped):
            if path.endswith(".py"):
                yield path, os.path.relpath(path, library), False
    elif os.path.isdir(entry):
        for path in _walk(entry, skipped):
            yield path, os.path.relpath(path, entry), False
    elif os.path.exists(entry):
        yield entry, os.path.basename(entry), True
    elif matches := sorted(filter(os.path.isfile, glob.glob(entry, recursive=True))):
        folder = os.path.dirname(re.split(r"[*?[]", entry)[0])
        for path in matches:
            yield path, os.path.relpath(path, folder or "."), False
    else:
        folder, name = os.path.split(entry)
        near = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
        raise UserError(f"data.files: no such file or folder: {entry}{nearest(name, near)}")


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
    with _open_text(path) as stream, _reading(path):
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


def _skips(skipped: Counter[str]) -> str:
    parts = [f"{count:,} {reason}" for reason, count in sorted(skipped.items()) if count]
    return f"; skipped {', '.join(parts)}" if parts else ""


def _indexed(file: _File) -> _File:
    """Find the documents of a .jsonl file: one on each line that is not blank."""
    if not _is_jsonl(file.path):
        return file
    compressed = not file.path.endswith(".jsonl")
    # Lines are read in random order, which compressed files do not allow.
    spool = NamedTemporaryFile(prefix="famjax-") if compressed else None  # noqa: SIM115
    rows = array("q")
    offset = 0
    with _open_text(file.path) as stream, _reading(file.path):
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
# The source


class TextSource:
    """Documents from text files, in an order that depends on the seed only.

    A file is a document; of a .jsonl file, every line is one: {"text": ...}. In each epoch the
    documents are permuted anew and lane i takes the positions i, i + lanes, and so on. With fewer
    documents than lanes each lane takes all of them, in its own order; lanes that would read the
    same document at the same time begin their first document at different parts of it.

    One document in `holdout`, chosen by a hash of its name, is kept from "train" and is what
    "holdout" reads. Of a single document it is the last 1/holdout of its bytes.

    Args:
      files: path, folder or glob, several separated by commas; "" is Python's own library.
      tokenizer: makes tokens of the text.
      seed: of the order.
      holdout: one document in so many is held out; 0 holds out none.
      split: which documents to give.
    """

    def __init__(
        self, files: str, tokenizer: Tokenizer, seed: int, holdout: int, split: Split = "train"
    ):
        if holdout < 0 or holdout == 1:
            raise UserError(f"data.holdout={holdout}: must be 0 (none) or 2 and more")
        self._tokenizer = tokenizer
        self._seed = seed
        found, self._skipped = _find(files)
        self._files = {file.path: file for file in found}
        sizes = [os.path.getsize(file.path) for file in found]
        self._given, self._bytes, self._digest = files, sum(sizes), _fingerprint(found, sizes)
        # the number of the first document of each file, and of all documents behind the last
        self._starts = np.cumsum([0, *(len(file) for file in found)])
        self._paths = [file.path for file in found]
        self._begin = 0
        self._end: int | None = None
        documents = int(self._starts[-1])
        if documents == 0:
            raise UserError(f"data.files={files}: no documents in there{_skips(self._skipped)}")
        self._documents = np.arange(documents)
        self._held_out = "none held out"
        if holdout and documents > 1:
            held = _held_out(found, holdout)
            self._documents = np.flatnonzero(held if split == "holdout" else ~held)
            self._held_out = f"{int(held.sum()):,} held out"
        elif holdout:
            self._hold_out_tail(holdout, split)
        elif split == "holdout":
            raise UserError("data.holdout=0: nothing is held out to evaluate on; set data.holdout")

    def _hold_out_tail(self, holdout: int, split: Split) -> None:
        key = self._name(0)
        size = self._size(key)
        cut = self._boundary(key, size - size // holdout)
        if split == "train":
            self._end = cut
        elif cut == size:
            raise UserError(f"{key[0]}: too short to hold out a part of it; give more text")
        else:
            self._begin = cut
        self._held_out = f"its last {(size - cut) / size:.1%} held out" if size else "empty"

    def __len__(self) -> int:
        """Return how many documents there are: the keys of one lane of one before they repeat."""
        return len(self._documents)

    @property
    def text_bytes(self) -> int | None:
        """The bytes of all documents, or None where only reading them would tell."""
        suffixes = (".gz", ".xz", ".jsonl")
        whole = len(self) == self._starts[-1] and self._begin == 0 and self._end is None
        return self._bytes if whole and not any(p.endswith(suffixes) for p in self._paths) else None

    def report(self) -> str:
        """Return a line for the user: how much there is, what is held out, what was skipped."""
        count = int(self._starts[-1])
        return (
            f"{count:,} document{'s' * (count != 1)}, {self._bytes / 1e6:,.1f} MB, "
            f"{self._held_out}{_skips(self._skipped)}"
        )

    def key(self, lane: int, lanes: int, k: int, before: Key | None = None) -> Key:
        count = len(self._documents)
        if count >= lanes:
            epoch, position = divmod(k, len(range(lane, count, lanes)))
            return self._name(self._shuffled(lane + position * lanes, epoch, 0))
        # group g of `count` lanes follows its own permutations, each lane one document ahead of
        # the lane before it
        group, ahead = divmod(lane, count)
        epoch, position = divmod(k, count)
        key = self._name(self._shuffled((position + ahead) % count, epoch, group))
        if k == 0 and group:
            groups = -(-lanes // count)
            first, last = key[2], self._size(key) if self._end is None else self._end
            key[2] = self._boundary(key, first + (last - first) * group // groups)
        return key

    def _shuffled(self, position: int, epoch: int, group: int) -> int:
        """Return the number of the document at a position of a permutation."""
        seed = np.random.SeedSequence((self._seed, epoch, group)).generate_state(1)[0]
        last = len(self._documents) - 1
        index = grain.experimental.index_shuffle(position, max_index=last, seed=int(seed), rounds=4)
        return int(self._documents[index])

    def _name(self, document: int) -> Key:
        """Return a document's key: path, row in the file, first byte."""
        file = bisect.bisect_right(self._starts, document) - 1
        return [self._paths[file], document - int(self._starts[file]), self._begin]

    def open(self, key: Key, piece: int = 0) -> Iterator[Piece]:
        texts = self._texts(key, skip=max(piece - 1, 0))
        return _document(texts, self._tokenizer, piece)

    def texts(self) -> Iterator[str]:
        """Yield the text of all documents once, in the order of the first epoch."""
        for k in range(len(self._documents)):
            yield from self._texts(self.key(0, 1, k), skip=0)

    def get_state(self) -> dict[str, Any]:
        """Return a fingerprint of the documents: keys and cursors mean something in these only."""
        return {"documents": int(self._starts[-1]), "bytes": self._bytes, "names": self._digest}

    def set_state(self, state: dict[str, Any]) -> None:
        now = self.get_state()
        if state != now:
            saved = (f"{state[key]:,} {key}" for key in ("documents", "bytes"))
            here = (f"{now[key]:,} {key}" for key in ("documents", "bytes"))
            raise UserError(
                f"data.files={self._given}: the documents changed since the run was saved "
                f"({' of '.join(saved)} then, {' of '.join(here)} now, by name and size); "
                "restore them, or start another run"
            )

    def _texts(self, key: Key, skip: int) -> Iterator[str]:
        path, _, begin = key
        with self._stream(key) as stream:
            pieces = _pieces(stream, path, begin, self._end)
            for offset, data in islice(pieces, skip, None):
                yield _decode(data, path, offset)

    def _stream(self, key: Key) -> BinaryIO:
        """Open the bytes of a document's text."""
        path, row, _ = key
        file = self._files.get(path)
        if file is None or row >= len(file):
            raise UserError(f"{path}: changed since the run was saved; restore it or start anew")
        return _open_text(path) if file.rows is None else io.BytesIO(_json_text(file, row))

    def _size(self, key: Key) -> int:
        """Return the bytes of a document's text."""
        with self._stream(key) as stream, _reading(key[0]):
            return stream.seek(0, os.SEEK_END)

    def _boundary(self, key: Key, offset: int) -> int:
        """Return where to cut a document at or soon behind a byte offset."""
        with self._stream(key) as stream, _reading(key[0]):
            stream.seek(offset)
            window = stream.read(PIECE_BYTES)
        if space := _SPACE.search(window):
            return offset + space.start()
        ends = (i for i, byte in enumerate(window) if byte & 0xC0 != 0x80)
        return offset + next(ends, len(window))  # inside the last character: behind it


def _json_text(file: _File, row: int) -> bytes:
    """Return the text of a line of a .jsonl file, as UTF-8."""
    assert file.rows is not None
    begin = int(file.rows[row])
    plain = file.plain.name if file.plain else file.path
    with _open_text(plain) as stream, _reading(file.path):
        stream.seek(begin)
        line = stream.readline()
    try:
        return json.loads(line)["text"].encode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(_not_utf8(file.path, begin + error.start)) from None
    except ValueError as error:
        wrong = f"not JSON with valid text ({error})"
    except (KeyError, TypeError, AttributeError):
        wrong = 'no "text" with a string in it'
    raise UserError(f"{file.path}, line {_line_number(plain, begin)}: {wrong}")


def _line_number(path: str, offset: int) -> int:
    with open(path, "rb") as stream:
        blocks = iter(lambda: stream.read(min(_SCAN_BYTES, offset - stream.tell())), b"")
        return 1 + sum(block.count(b"\n") for block in blocks)


def _fingerprint(files: Sequence[_File], sizes: Sequence[int]) -> str:
    """Return a hash of the files' names, sizes and numbers of documents, in their order."""
    listed = [(file.name, size, len(file)) for file, size in zip(files, sizes, strict=True)]
    return hashlib.blake2b(json.dumps(listed).encode(), digest_size=8).hexdigest()


def _held_out(files: Sequence[_File], holdout: int) -> np.ndarray:
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
