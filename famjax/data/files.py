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
import sys
import sysconfig
import tempfile
import time
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

import famjax
from famjax.core.errors import UserError, nearest_path
from famjax.core.json_files import parse_json, read_json, regular_file_size
from famjax.data.chat import ChatTemplate

PIECE_BYTES = 64 << 10
_PROBE_BYTES = 8 << 10
_SCAN_BYTES = 1 << 20
# Linux's folders of files that are made when they are read, and may never end
_KERNEL = ("/proc/", "/sys/")
_MAX_FILES = 1_000_000
# of the opening scan without a word
_SILENT_SECONDS = 5.0
# read by the opening scan between looks at the clock
_REPORT_BYTES = 1 << 20
# sequences of roles on which the opening scan tries a chat template
_TRIED = 256
# of the checks of a line: a record of files that passed others does not count
_RULES = 1
# why a folder was skipped
_UNREAD = "folder without permission"
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
        raise UserError(_not_readable(path, error)) from None


def _not_readable(path: str, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return f"{path}: no permission to read it; chmod it (u+rX), or leave it out"
    return f"{path}: {error.strerror or error}"


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


def find_files(
    files: str, template: ChatTemplate | None = None, checked: Checked | None = None
) -> tuple[list[TextFile], Counter[str]]:
    """Return the text files that `data.files` names, and how many were skipped, by reason.

    Files of JSON lines are read to their ends, and what `read_json_line` would refuse later is refused
    now. Other files are probed: only reading tells whether they are UTF-8 throughout.

    Args:
      template: that will write conversations.
      checked: files whose lines are not checked again; those checked now are added.
    """
    skipped: Counter[str] = Counter()
    found: dict[str, TextFile] = {}
    parts = [part.strip() for part in files.split(",")]
    entries = [files] if os.path.exists(files) else [part for part in parts if part]
    if not entries and not files.strip():
        entries = [""]
    if not entries or "\0" in files:
        raise UserError(f"data.files={files!r}: names no file; give a file, a folder or a glob")
    for entry in entries:
        for path, name, explicit in _expand(os.path.expanduser(entry), skipped):
            if reason := _probe(path, explicit):
                skipped[reason] += 1
            else:
                found.setdefault(os.path.realpath(path), TextFile(path, name))
    if not found:
        raise UserError(f"data.files={files}: no text in there{skips(skipped)}")
    scan = _Scanner(template, checked or Checked(None, template))
    return [scan.indexed(file) for file in found.values()], skipped


def _expand(entry: str, skipped: Counter[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield (path, relative name, whether named by the user) of the files an entry stands for."""
    unread = skipped[_UNREAD]
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
    elif matches := sorted(filter(os.path.isfile, _glob_files(entry, skipped))):
        folder = _fixed_folder(entry)
        for path in matches:
            yield path, os.path.relpath(path, folder or "."), False
    else:
        _refuse_unlisted(_fixed_folder(entry))
        if skipped[_UNREAD] > unread:
            raise UserError(f"data.files={entry}: no text in there{skips(skipped)}")
        if os.path.islink(entry):
            raise UserError(
                f"data.files: {entry} is a link to {os.readlink(entry)}, where nothing is to read"
            )
        raise UserError(f"data.files: no such file or folder: {entry}{nearest_path(entry)}")


def _fixed_folder(entry: str) -> str:
    """Return the folder of a path or a glob, as far as it has no wildcard."""
    return os.path.dirname(re.split(r"[*?[]", entry)[0])


def _refuse_unlisted(folder: str) -> None:
    """Raise a `UserError` if a folder may not be listed, so that nothing in it could be found."""
    try:
        with os.scandir(folder or "."):
            pass
    except PermissionError as error:
        raise UserError(_not_readable(folder or ".", error)) from None
    except OSError:
        return  # not there: whoever looks for something in it says so


def _skip_unread(error: OSError, named: str, skipped: Counter[str]) -> None:
    """Count a folder that may not be listed.

    Raises:
      UserError: it is the one that the user named, or there is something else wrong with it.
    """
    if not isinstance(error, PermissionError) or error.filename == named:
        raise UserError(_not_readable(error.filename, error)) from None
    skipped[_UNREAD] += 1


def _glob_files(entry: str, skipped: Counter[str]) -> Iterator[str]:
    """Yield what a pattern matches."""
    folder = _fixed_folder(entry) or "."
    # without "**" no more is looked at than one folder for each name of the pattern
    if _is_system(folder) and ("**" in entry or os.path.realpath(folder) != os.sep):
        raise UserError(f"data.files={entry}: is the system's; name the folder of the texts")
    parts = entry.split(os.sep)
    if "**" not in parts:
        yield from _counted(glob.iglob(entry), entry)
        return
    at = parts.index("**")
    head = os.sep.join(parts[:at])
    folders = sorted(filter(os.path.isdir, glob.iglob(head))) if at else [""]
    yield from _counted(_below(folders, parts[at:], head, skipped), entry)


def _below(
    folders: Sequence[str], pattern: Sequence[str], named: str, skipped: Counter[str]
) -> Iterator[str]:
    """Yield the files below some folders whose path in there is of a pattern with "**".

    As `glob.glob` does it, following links to folders, but a folder that is reached again is read
    again only if other names in it would match: links that lead to a folder above end.

    Args:
      folders: "" is the current one.
      named: the folder whose lack of permission is an error; others are counted in `skipped`.
    """
    wanted = [part for part in pattern if part]
    start = _positions({0}, wanted)
    # links come after everything else, so that files are found by their own paths first
    todo, links = deque((folder, start) for folder in folders), deque[tuple[str, frozenset[int]]]()
    seen: set[tuple[int, int, frozenset[int]]] = set()
    while todo or links:
        folder, at = todo.popleft() if todo else links.popleft()
        try:
            status = os.stat(folder or ".")
            if (key := (status.st_dev, status.st_ino, at)) in seen:
                continue
            seen.add(key)
            with os.scandir(folder or ".") as listed:
                entries = sorted(listed, key=lambda entry: entry.name)
        except OSError as error:
            _skip_unread(error, named or ".", skipped)
            continue
        for entry in entries:
            path, after = os.path.join(folder, entry.name), _match(entry.name, at, wanted)
            if not _is_folder(entry):
                if len(wanted) in after:
                    yield path
            elif not after - {len(wanted)}:
                continue  # nothing in there can match: a hidden folder, say
            elif not entry.is_symlink():
                todo.append((path, after))
            elif not _is_system(path):
                links.append((path, after))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # a link to itself


def _match(name: str, at: Set[int], pattern: Sequence[str]) -> frozenset[int]:
    """Return the positions in a pattern after a name, given those before it.

    Hidden names match only a part that begins with a dot.
    """
    after = set()
    for i in at - {len(pattern)}:
        hidden = name.startswith(".") and not pattern[i].startswith(".")
        if not hidden and fnmatch.fnmatchcase(name, pattern[i]):
            after.add(i if pattern[i] == "**" else i + 1)
    return _positions(after, pattern)


def _positions(at: Set[int], pattern: Sequence[str]) -> frozenset[int]:
    """Return positions in a pattern, and those after each "**" there: it stands for nothing too."""
    found = set(at)
    for i, part in enumerate(pattern):
        if i in found and part == "**":
            found.add(i + 1)
    return frozenset(found)


def _counted(paths: Iterable[str], entry: str) -> Iterator[str]:
    for count, path in enumerate(paths):
        if count == _MAX_FILES:
            raise UserError(
                f"data.files={entry}: more than {_MAX_FILES:,} files; name a folder with fewer, "
                "or write the texts as lines of .jsonl files"
            )
        yield path


def _is_system(path: str) -> bool:
    """Tell whether a path is the whole file system, or made up by the kernel as it is read."""
    real = os.path.realpath(path)
    return real == os.sep or real.startswith(_KERNEL) or f"{real}{os.sep}" in _KERNEL


def _walk(folder: str, skipped: Counter[str]) -> Iterator[str]:
    """Yield the files below `folder`, sorted, without hidden ones and installed packages."""

    def skip(error: OSError) -> None:
        _skip_unread(error, folder, skipped)

    for root, folders, names in os.walk(folder, onerror=skip):
        hidden = [name for name in folders + names if name.startswith(".")]
        skipped["hidden"] += len(hidden)
        folders[:] = sorted(set(folders) - set(hidden) - {"site-packages", "dist-packages"})
        for name in sorted(set(names) - set(hidden)):
            yield os.path.join(root, name)


def _probe(path: str, explicit: bool) -> str | None:
    """Return why a file is not text, judged by its first KiBs; an error if the user named it."""
    try:
        # opening a pipe may wait for ever, and a device may never end
        regular_file_size(path)
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
    parts = [
        f"{count:,} {reason if count == 1 else reason.replace('folder ', 'folders ')}"
        for reason, count in sorted(skipped.items())
        if count
    ]
    return f"; skipped {', '.join(parts)}" if parts else ""


class Checked:
    """Which files of JSON lines passed the checks of the opening scan in an earlier one.

    A file is known by its path, its size and the time of its last change.

    Args:
      path: of the record; None keeps none. One that cannot be read counts as empty.
      template: that wrote the conversations which were tried.
    """

    def __init__(self, path: Path | None, template: ChatTemplate | None):
        self._path = path
        self._rules = [_RULES, famjax.__version__, template.digest if template else ""]
        self._before = self._read()
        self._now: dict[str, list[int]] = {}

    def _read(self) -> dict[str, Any]:
        if self._path is None:
            return {}
        try:
            found = read_json(self._path, "remove it")
        except (UserError, OSError):
            return {}
        if not isinstance(found, dict) or found.get("rules") != self._rules:
            return {}
        files = found.get("files")
        return files if isinstance(files, dict) else {}

    def has(self, path: str) -> bool:
        """Tell whether a file passed before; it is one of those from now on.

        To be asked before the file is read, so that a change meanwhile counts as one.
        """
        with reading(path):
            status = os.stat(path)
        known = [status.st_size, status.st_mtime_ns]
        path = os.path.abspath(path)
        self._now[path] = known
        return self._before.get(path) == known

    def save(self) -> None:
        """Write the record, where it differs from the one there: it is the old or the new one."""
        if self._path is None or self._now == self._before:
            return
        new = self._path.with_suffix(".tmp")
        # without a record the next start takes longer, and that is all
        with suppress(OSError):
            new.write_text(json.dumps({"rules": self._rules, "files": self._now}), "utf-8")
            os.replace(new, self._path)
            self._before = dict(self._now)


class _Scanner:
    """Finds the documents of files of JSON lines, and checks the lines.

    It says how far it is when it takes more than 5 seconds.

    Args:
      template: of conversations, tried on the first of each sequence of roles.
      checked: files whose lines need no check.
    """

    def __init__(self, template: ChatTemplate | None, checked: Checked):
        self._template, self._checked = template, checked
        self._tried: set[Any] = set()
        self._begin = self._said = time.monotonic()
        self._bytes = 0

    def indexed(self, file: TextFile) -> TextFile:
        """Return the file with its documents found: those of .jsonl, one a line not blank."""
        if not _is_jsonl(file.path):
            return file
        compressed = not file.path.endswith(".jsonl")
        known = self._checked.has(file.path)
        # Lines are read in random order, which compressed files do not allow.
        spool = _Spool(file.path) if compressed else None
        rows = array("q")
        offset = number = told = 0
        named = _naming_line(file.path, lambda: number)
        with reading(file.path), open_text(file.path) as stream, named:
            for number, line in enumerate(stream, 1):  # noqa: B007, read by the lambda
                if not line.isspace():
                    rows.append(offset)
                    if not known:
                        self._check(line)
                offset += len(line)
                if offset - told >= _REPORT_BYTES:
                    self._tell(file.path, offset - told)
                    told = offset
                if spool:
                    spool.write(line)
        if spool:
            spool.flush()
        return replace(file, rows=np.array(rows, np.int64), plain=spool and spool.file)

    def _check(self, line: bytes) -> None:
        _, messages = _record(line, self._template)
        if not messages:
            return
        assert self._template is not None
        kind = tuple((message["role"], *message) for message in messages)
        # rendering takes a hundred times longer than reading: what the template says of roles in
        # this order it says of all such conversations
        if kind not in self._tried and len(self._tried) < _TRIED:
            self._tried.add(kind)
            self._template.document(messages)

    def _tell(self, path: str, size: int) -> None:
        self._bytes += size
        now = time.monotonic()
        # ever more rarely: 5, 10, 20, 40 seconds after the beginning
        if now - self._begin > max(_SILENT_SECONDS, 2 * (self._said - self._begin)):
            self._said = now
            rate = self._bytes / (now - self._begin)
            print(
                f"famjax: reading data.files: {self._bytes / 1e6:,.0f} MB so far, "
                f"{rate / 1e6:,.0f} MB/s, now in {path}",
                file=sys.stderr,
            )


class _Spool:
    """The text of a compressed file in a temporary one, which is gone when nobody holds it."""

    def __init__(self, path: str):
        self._path = path
        with self._explained():
            self.file = tempfile.NamedTemporaryFile(prefix="famjax-")  # noqa: SIM115

    def write(self, data: bytes) -> None:
        with self._explained():
            self.file.write(data)

    def flush(self) -> None:
        with self._explained():
            self.file.flush()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self._path}: its text could not be written to {tempfile.gettempdir()} "
                f"({error.strerror or error}); set TMPDIR to a folder with space, or decompress it"
            ) from None


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


def read_json_line(file: TextFile, row: int, template: ChatTemplate | None) -> Line:
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
    with _naming_line(file.path, lambda: _line_number(plain, begin)):
        parts, messages = _record(line, template)
        if not messages:
            return Line(parts)
        assert template is not None
        texts = template.document(messages)
        return Line([(text.encode("utf-8"), weight) for text, weight in texts], rendered=True)


@contextmanager
def _naming_line(path: str, number: Callable[[], int]) -> Iterator[None]:
    """Turn what is wrong with a line into one that names file and line.

    Args:
      number: gives that of the line, counted from 1.
    """
    try:
        yield
    except UserError as error:
        wrong = str(error)
    except json.JSONDecodeError as error:
        wrong = (
            f"not JSON with valid text ({error.msg.removesuffix(' at')} at column {error.colno}); "
            'write one object on each line, {"text": ...}'
        )
    except UnicodeDecodeError as error:
        wrong = (
            f"not UTF-8 at byte {error.start} of the line; convert the file (iconv -t utf-8) or "
            "leave it out"
        )
    except ValueError as error:
        wrong = f"not JSON with valid text ({error})"
    else:
        return
    raise UserError(f"{path}, line {number()}: {wrong}")


def _record(
    line: bytes, template: ChatTemplate | None
) -> tuple[list[tuple[bytes, float]], list[dict[str, Any]]]:
    """Return what a line says: UTF-8 with weights, or the messages of a conversation.

    All is checked but what only the template can tell. Of the two the other is empty.

    Raises:
      UserError, ValueError: see `_naming_line`.
    """
    found = parse_json(line)
    if not isinstance(found, dict):
        raise UserError(f"a {type(found).__name__} where an object must be; {_FORMS}")
    if found.get("text") is not None:
        return [(_string(found, "text"), 1.0)], []
    if "targets" in found:
        return [(_string(found, "inputs"), 0.0), (_string(found, "targets"), 1.0)], []
    if "messages" in found:
        return [], _messages(found["messages"], template)
    prompt, response = _string(found, "prompt"), _string(found, "response")
    if template is None:
        return [(prompt, 0.0), (response, 1.0)], []
    turns = (("user", found["prompt"]), ("assistant", found["response"]))
    return [], [{"role": who, "content": said} for who, said in turns]


_FORMS = (
    'no "text", and no "inputs" with "targets", "prompt" with "response", or "messages", with a '
    "string in it"
)


def _string(found: dict[str, Any], key: str) -> bytes:
    value = found.get(key)
    if type(value) is not str:
        there = f"; it has {', '.join(map(repr, list(found)[:5]))}" if found else ""
        raise UserError(_FORMS + there)
    return value.encode("utf-8")


def _messages(messages: Any, template: ChatTemplate | None) -> list[dict[str, Any]]:
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
        for key in keys:
            message[key].encode("utf-8")  # half a pair of surrogates is no text
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError('no message has the role "assistant": there is nothing to learn')
    return messages


def _line_number(path: str, offset: int) -> int:
    with open(path, "rb") as stream:
        blocks = iter(lambda: stream.read(min(_SCAN_BYTES, offset - stream.tell())), b"")
        return 1 + sum(block.count(b"\n") for block in blocks)


def fingerprint(files: Sequence[TextFile], sizes: Sequence[int]) -> str:
    """Return a hash of the files' names, sizes and numbers of documents, in their order."""
    listed = [(file.name, size, len(file)) for file, size in zip(files, sizes, strict=True)]
    return hashlib.blake2b(json.dumps(listed).encode(), digest_size=8).hexdigest()


def choose_holdout(files: Sequence[TextFile], holdout: int) -> np.ndarray:
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
