"""Text files: finds them, reads them in pieces of constant memory, and parses lines of .jsonl.

No file is read partially without notice. A file that is damaged, truncated, binary or not UTF-8 is
an error if the user named it, and counted as skipped if it was found in a folder.
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
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

import famjax
from famjax.core.errors import UserError, nearest_path
from famjax.core.json_files import MAX_BYTES, parse_json, read_json, regular_file_size
from famjax.tokenizers.chat import ChatTemplate

PIECE_BYTES = 64 << 10
_PROBE_BYTES = 8 << 10
_SCAN_BYTES = 1 << 20
# Linux's virtual file systems: files there are generated on read and may be endless
_KERNEL = ("/proc/", "/sys/")
_MAX_FILES = 1_000_000
# before the opening scan reports its progress
_SILENT_SECONDS = 5.0
# of a line of .jsonl, which is read as a whole; other texts are read in pieces
_MAX_LINE_BYTES = MAX_BYTES
# read by the opening scan between checks of the clock
_REPORT_BYTES = 1 << 20
# distinct sequences of roles on which the opening scan tries the chat template
_MAX_TRIED = 256
# version of the checks of a line: records of files that passed another version are ignored
_CHECKS_VERSION = 2
# reasons for skipping a folder
_UNREADABLE = "folder without permission"
_RUN = "folder of a run"
# ASCII white space never occurs inside a multi-byte character
SPACE = re.compile(rb"[ \t\n\r]")

# ---------------------------------------------------------------------------------------------
# Reading one file


@contextmanager
def wrap_read_errors(path: str) -> Iterator[None]:
    """Convert errors from reading `path` into a `UserError` of one line."""
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile):
        raise UserError(f"{path}: truncated or damaged; fetch or compress it again") from None
    except OSError as error:
        raise UserError(_read_error_message(path, error)) from None


def _read_error_message(path: str, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return f"{path}: no permission to read it; chmod it (u+rX), or leave it out"
    return f"{path}: {error.strerror or error}"


def open_text(path: str) -> BinaryIO:
    """Open a text file as a stream of bytes, decompressing .gz and .xz."""
    suffix = Path(path).suffix
    with wrap_read_errors(path):
        if suffix == ".gz":
            return cast(BinaryIO, gzip.open(path, "rb"))
        if suffix == ".xz":
            # .lzma, which is read by default too, takes zeros for any number of empty texts
            return cast(BinaryIO, lzma.open(path, "rb", format=lzma.FORMAT_XZ))
        return open(path, "rb")


def seek_text(stream: BinaryIO, path: str, offset: int | None) -> int:
    """Go to a byte of a text, or to its end (None), and return its offset.

    A compressed text is decompressed up to there, with reports of progress.
    """
    with wrap_read_errors(path):
        if not isinstance(stream, gzip.GzipFile | lzma.LZMAFile):
            return stream.seek(0, os.SEEK_END) if offset is None else stream.seek(offset)
        progress, at = _ReadProgress(), stream.seek(0)
        while True:
            size = _SCAN_BYTES if offset is None else min(_SCAN_BYTES, offset - at)
            if not (size := len(stream.read(size))):
                return at
            at += size
            progress.add(path, size)


def read_text_pieces(path: str) -> Iterator[str]:
    """Yield the text of one file, which is one document, in pieces of about 64 KiB."""
    if _is_jsonl(path):
        raise UserError(f"{path}: holds many documents; give a file that is one document")
    if _probe_text(path, explicit=True):
        raise UserError(f"{path}: empty")
    with open_text(path) as stream:
        for offset, data in iter_pieces(stream, path, 0, None):
            yield decode_text(data, path, offset)


def iter_pieces(
    stream: BinaryIO, path: str, begin: int, end: int | None
) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of the text from byte `begin` to `end`, cut between characters."""
    seek_text(stream, path, begin)
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


def decode_text(data: bytes, path: str, offset: int) -> str:
    """Return the text of the bytes of a text file from `offset` on."""
    if (at := data.find(0)) >= 0:
        raise UserError(_binary_error_message(path, offset + at))
    return decode_utf8(data, path, offset)


def decode_utf8(data: bytes, path: str, offset: int) -> str:
    """Return the text of the bytes of `path` from `offset` on."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(_utf8_error_message(path, offset + error.start)) from None


def _binary_error_message(path: str, offset: int) -> str:
    return f"{path}: binary, byte {offset} is zero; give UTF-8 text, or .gz or .xz of it"


def _utf8_error_message(path: str, offset: int) -> str:
    return f"{path}: not UTF-8 at byte {offset}; convert it (iconv -t utf-8) or leave it out"


def _is_jsonl(path: str) -> bool:
    return path.removesuffix(".gz").removesuffix(".xz").endswith(".jsonl")


# ---------------------------------------------------------------------------------------------
# Finding files


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


def find_files(
    files: str, template: ChatTemplate | None = None, checked: CheckedFiles | None = None
) -> tuple[list[TextFile], Counter[str]]:
    """Return the text files that `data.files` names, and the number skipped, by reason.

    Files of JSON lines are read to their ends, and lines that `read_json_line` would reject are an
    error now. Other files are probed only: whether all of a file is UTF-8 shows when it is read.

    Args:
      template: chat template that renders conversations.
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
        for path, name, explicit in _expand_entry(os.path.expanduser(entry), skipped):
            if reason := _probe_text(path, explicit):
                skipped[reason] += 1
            else:
                found.setdefault(os.path.realpath(path), TextFile(path, name))
    if not found:
        raise UserError(f"data.files={files}: no text found{describe_skipped(skipped)}")
    scan = _Scanner(template, checked or CheckedFiles(None, template))
    return [scan.index_documents(file) for file in found.values()], skipped


def _expand_entry(entry: str, skipped: Counter[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield (path, relative name, whether the user named it) of the files of an entry."""
    unread = skipped[_UNREADABLE]
    if not entry:
        library = sysconfig.get_paths()["stdlib"]
        for path in _walk(library, skipped):
            if path.endswith(".py"):
                yield path, os.path.relpath(path, library), False
    elif _is_system_path(entry):
        raise UserError(f"data.files={entry}: is a system folder; name the folder of the texts")
    elif os.path.isdir(entry):
        for path in _limit_count(_walk(entry, skipped), entry):
            yield path, os.path.relpath(path, entry), False
    elif os.path.exists(entry):
        yield entry, os.path.basename(entry), True
    elif matches := sorted(filter(os.path.isfile, _glob_files(entry, skipped))):
        folder = _literal_folder(entry)
        for path in matches:
            yield path, os.path.relpath(path, folder or "."), False
    else:
        _check_listable(_literal_folder(entry))
        if skipped[_UNREADABLE] > unread:
            raise UserError(f"data.files={entry}: no text found{describe_skipped(skipped)}")
        if os.path.islink(entry):
            raise UserError(
                f"data.files: {entry} is a link to {os.readlink(entry)}, which is missing"
            )
        raise UserError(f"data.files: no such file or folder: {entry}{nearest_path(entry)}")


def _literal_folder(entry: str) -> str:
    """Return the folder of a path or glob, up to its first wildcard."""
    return os.path.dirname(re.split(r"[*?[]", entry)[0])


def _check_listable(folder: str) -> None:
    """Raise a `UserError` if a folder may not be listed, so that nothing in it can be found."""
    try:
        with os.scandir(folder or "."):
            pass
    except PermissionError as error:
        raise UserError(_read_error_message(folder or ".", error)) from None
    except OSError:
        return  # missing: the caller reports it


def _skip_unreadable(error: OSError, named: str, skipped: Counter[str]) -> None:
    """Count a folder that may not be listed.

    Raises:
      UserError: the user named it, or listing it failed for another reason than permission.
    """
    if not isinstance(error, PermissionError) or error.filename == named:
        raise UserError(_read_error_message(error.filename, error)) from None
    skipped[_UNREADABLE] += 1


def _glob_files(entry: str, skipped: Counter[str]) -> Iterator[str]:
    """Yield the paths that match a pattern."""
    folder = _literal_folder(entry) or "."
    # without "**" at most one folder is listed for each name of the pattern
    if _is_system_path(folder) and ("**" in entry or os.path.realpath(folder) != os.sep):
        raise UserError(f"data.files={entry}: is a system folder; name the folder of the texts")
    parts = entry.split(os.sep)
    if "**" not in parts:
        yield from _limit_count(glob.iglob(entry), entry)
        return
    at = parts.index("**")
    head = os.sep.join(parts[:at])
    folders = sorted(filter(os.path.isdir, glob.iglob(head))) if at else [""]
    yield from _limit_count(_walk_pattern(folders, parts[at:], head, skipped), entry)


def _walk_pattern(
    folders: Sequence[str], pattern: Sequence[str], named: str, skipped: Counter[str]
) -> Iterator[str]:
    """Yield the files below some folders whose relative path matches a pattern with "**".

    As `glob.glob`, following links to folders. A folder that is reached again is listed again only
    if other names in it would match, so links to a parent folder terminate.

    Args:
      folders: "" is the current one.
      named: the folder whose lack of permission is an error; others are counted in `skipped`.
    """
    wanted = [part for part in pattern if part]
    start = _expand_positions({0}, wanted)
    # links come last, so that files are found by their own paths first
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
            _skip_unreadable(error, named or ".", skipped)
            continue
        for entry in entries:
            path, after = os.path.join(folder, entry.name), _match_name(entry.name, at, wanted)
            if not _is_folder(entry):
                if len(wanted) in after:
                    yield path
            elif not after - {len(wanted)}:
                continue  # nothing in it can match: a hidden folder, for example
            elif not entry.is_symlink():
                todo.append((path, after))
            elif not _is_system_path(path):
                links.append((path, after))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # a link to itself


def _match_name(name: str, at: Set[int], pattern: Sequence[str]) -> frozenset[int]:
    """Return the positions in a pattern after matching a name, from those before it.

    Hidden names match only a part that begins with a dot.
    """
    after = set()
    for i in at - {len(pattern)}:
        hidden = name.startswith(".") and not pattern[i].startswith(".")
        if not hidden and fnmatch.fnmatchcase(name, pattern[i]):
            after.add(i if pattern[i] == "**" else i + 1)
    return _expand_positions(after, pattern)


def _expand_positions(at: Set[int], pattern: Sequence[str]) -> frozenset[int]:
    """Return positions in a pattern, and those after each "**" there: it matches nothing too."""
    positions = set(at)
    for i, part in enumerate(pattern):
        if i in positions and part == "**":
            positions.add(i + 1)
    return frozenset(positions)


def _limit_count(paths: Iterable[str], entry: str) -> Iterator[str]:
    for count, path in enumerate(paths):
        if count == _MAX_FILES:
            raise UserError(
                f"data.files={entry}: more than {_MAX_FILES:,} files; name a folder with fewer, "
                "or write the texts as lines of .jsonl files"
            )
        yield path


def _is_system_path(path: str) -> bool:
    """Return whether a path is the root or in one of the kernel's virtual file systems."""
    real = os.path.realpath(path)
    return real == os.sep or real.startswith(_KERNEL) or f"{real}{os.sep}" in _KERNEL


def _walk(folder: str, skipped: Counter[str]) -> Iterator[str]:
    """Yield the files below `folder`, sorted, except hidden ones, installed packages and runs."""

    def skip(error: OSError) -> None:
        _skip_unreadable(error, folder, skipped)

    for root, folders, names in os.walk(folder, onerror=skip):
        if _is_run(folders, names):
            # with data.files=. the runs in runs/ would be documents that change, and block resuming
            skipped[_RUN] += 1
            folders.clear()
            continue
        hidden = [name for name in folders + names if name.startswith(".")]
        skipped["hidden"] += len(hidden)
        folders[:] = sorted(set(folders) - set(hidden) - {"site-packages", "dist-packages"})
        for name in sorted(set(names) - set(hidden)):
            yield os.path.join(root, name)


def _is_run(folders: list[str], names: list[str]) -> bool:
    """Return whether a folder with these contents is a run, or one that is starting."""
    return "train.lock" in names or ("config.json" in names and "checkpoints" in folders)


def _probe_text(path: str, explicit: bool) -> str | None:
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
            raise UserError(_binary_error_message(path, at))
        return "binary"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError as error:
        if explicit:
            raise UserError(_utf8_error_message(path, error.start)) from None
        return "not UTF-8"
    return None


def describe_skipped(skipped: Counter[str]) -> str:
    """Return a note on the files that were skipped, by reason; "" if there are none."""
    parts = [
        f"{count:,} {reason if count == 1 else reason.replace('folder ', 'folders ')}"
        for reason, count in sorted(skipped.items())
        if count
    ]
    return f"; skipped {', '.join(parts)}" if parts else ""


class CheckedFiles:
    """A record of the files of JSON lines that passed the checks of an earlier opening scan.

    A file is identified by its path, size and modification time.

    Args:
      path: of the record; None keeps none. A record that cannot be read counts as empty.
      template: chat template that the conversations were tried with.
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

    def has(self, path: str) -> bool:
        """Return whether a file passed before, and add it to the record.

        Call it before the file is read, so that a change in the meantime is detected.
        """
        with wrap_read_errors(path):
            status = os.stat(path)
        known = [status.st_size, status.st_mtime_ns]
        path = os.path.abspath(path)
        self._current[path] = known
        return self._saved.get(path) == known

    def save(self) -> None:
        """Write the record atomically, if it has changed."""
        if self._path is None or self._current == self._saved:
            return
        new = self._path.with_suffix(".tmp")
        # without a record the next start only takes longer
        with suppress(OSError):
            new.write_text(json.dumps({"rules": self._identity, "files": self._current}), "utf-8")
            os.replace(new, self._path)
            self._saved = dict(self._current)


class _Scanner:
    """Finds the documents in files of JSON lines, and checks the lines.

    Reports its progress if it takes more than 5 seconds.

    Args:
      template: chat template, tried on the first conversation of each sequence of roles.
      checked: files whose lines need no check.
    """

    def __init__(self, template: ChatTemplate | None, checked: CheckedFiles):
        self._template, self._checked = template, checked
        self._tried: set[Any] = set()
        self._progress = _ReadProgress()

    def index_documents(self, file: TextFile) -> TextFile:
        """Return the file with the offsets of its documents: the lines of .jsonl not blank."""
        if not _is_jsonl(file.path):
            return file
        compressed = not file.path.endswith(".jsonl")
        known = self._checked.has(file.path)
        # Lines are read in random order, which compressed files do not support.
        spool = _Spool(file.path) if compressed else None
        rows = array("q")
        offset = number = reported = 0
        line_errors = _wrap_line_errors(file.path, lambda: number)
        with wrap_read_errors(file.path), open_text(file.path) as stream, line_errors:
            for number, line in enumerate(_iter_lines(stream), 1):  # noqa: B007, in the lambda
                if not line.isspace():
                    rows.append(offset)
                    if not known:
                        self._check(line)
                offset += len(line)
                if offset - reported >= _REPORT_BYTES:
                    self._progress.add(file.path, offset - reported)
                    reported = offset
                if spool:
                    spool.write(line)
        if spool:
            spool.flush()
        return replace(file, rows=np.array(rows, np.int64), plain=spool and spool.file)

    def _check(self, line: bytes) -> None:
        _, messages = _parse_record(line, self._template)
        if not messages:
            return
        assert self._template is not None
        kind = tuple((message["role"], *message) for message in messages)
        # Rendering takes a hundred times longer than parsing. If the template accepts these roles
        # in this order once, it is taken to accept all such conversations.
        if kind not in self._tried and len(self._tried) < _MAX_TRIED:
            self._tried.add(kind)
            self._template.render_document(messages)


class _ReadProgress:
    """Reports on stderr what is read of data.files, if it takes more than 5 seconds."""

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


class _Spool:
    """The text of a compressed file in a temporary file, deleted with its last reference."""

    def __init__(self, path: str):
        self._path = path
        with self._wrap_errors():
            self.file = tempfile.NamedTemporaryFile(prefix="famjax-")  # noqa: SIM115

    def write(self, data: bytes) -> None:
        with self._wrap_errors():
            self.file.write(data)

    def flush(self) -> None:
        with self._wrap_errors():
            self.file.flush()

    @contextmanager
    def _wrap_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self._path}: its text could not be written to {tempfile.gettempdir()} "
                f"({error.strerror or error}); set TMPDIR to a folder with space, or decompress it"
            ) from None


# ---------------------------------------------------------------------------------------------
# The lines of a .jsonl file


def _iter_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Return the lines of a stream, longer ones cut to `_MAX_LINE_BYTES` + 1."""
    return iter(partial(stream.readline, _MAX_LINE_BYTES + 1), b"")


class Line(NamedTuple):
    """A document on a line of a .jsonl file.

    Attributes:
      parts: of its UTF-8, each with the weight of predicting it.
      rendered: whether a chat template rendered it.
    """

    parts: Sequence[tuple[bytes, float]]
    rendered: bool = False


def read_json_line(file: TextFile, row: int, template: ChatTemplate | None) -> Line:
    """Return the document on a line of a .jsonl file.

    A line with "text" is all targets. A prompt and its response are inputs and targets without a
    template, and a conversation with one, as are messages.
    """
    assert file.rows is not None
    begin = int(file.rows[row])
    plain = file.plain.name if file.plain else file.path
    with open_text(plain) as stream, wrap_read_errors(file.path):
        stream.seek(begin)
        line = next(_iter_lines(stream), b"")
    with _wrap_line_errors(file.path, lambda: _line_number(plain, begin)):
        parts, messages = _parse_record(line, template)
        if not messages:
            return Line(parts)
        assert template is not None
        texts = template.render_document(messages)
        return Line([(text.encode("utf-8"), weight) for text, weight in texts], rendered=True)


@contextmanager
def _wrap_line_errors(path: str, number: Callable[[], int]) -> Iterator[None]:
    """Convert errors of a line into a `UserError` that names file and line.

    Args:
      number: returns the line's number, counted from 1.
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


def _parse_record(
    line: bytes, template: ChatTemplate | None
) -> tuple[list[tuple[bytes, float]], list[dict[str, Any]]]:
    """Parse a line: either UTF-8 with weights, or the messages of a conversation.

    The other of the two is empty. Everything is checked except what only the template can check.

    Raises:
      UserError, ValueError: see `_wrap_line_errors`.
    """
    if len(line) > _MAX_LINE_BYTES:
        raise UserError(
            f"more than {_MAX_LINE_BYTES:,} bytes; write so long a document to a text file of its "
            "own"
        )
    record = parse_json(line)
    if not isinstance(record, dict):
        raise UserError(f"a {type(record).__name__} instead of an object; {_EXPECTED_FORMS}")
    if record.get("text") is not None:
        return [(_get_string(record, "text"), 1.0)], []
    if "targets" in record:
        return [(_get_string(record, "inputs"), 0.0), (_get_string(record, "targets"), 1.0)], []
    if "messages" in record:
        return [], _check_messages(record["messages"], template)
    prompt, response = _get_string(record, "prompt"), _get_string(record, "response")
    if template is None:
        return [(prompt, 0.0), (response, 1.0)], []
    messages = (("user", record["prompt"]), ("assistant", record["response"]))
    return [], [{"role": role, "content": content} for role, content in messages]


_EXPECTED_FORMS = (
    'no "text", and no "inputs" with "targets", "prompt" with "response", or "messages", with a '
    "string in it"
)


def _get_string(record: dict[str, Any], key: str) -> bytes:
    value = record.get(key)
    if type(value) is not str:
        keys = f"; it has {', '.join(map(repr, list(record)[:5]))}" if record else ""
        raise UserError(_EXPECTED_FORMS + keys)
    return value.encode("utf-8")


def _check_messages(messages: Any, template: ChatTemplate | None) -> list[dict[str, Any]]:
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
            raise UserError(f'message {i + 1} needs "role" and "content", both strings')
        for key in keys:
            message[key].encode("utf-8")  # a lone surrogate is not text
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError('no message has the role "assistant": there is nothing to learn')
    return messages


def _line_number(path: str, offset: int) -> int:
    with open(path, "rb") as stream:
        blocks = iter(lambda: stream.read(min(_SCAN_BYTES, offset - stream.tell())), b"")
        return 1 + sum(block.count(b"\n") for block in blocks)


def fingerprint_files(files: Sequence[TextFile], sizes: Sequence[int]) -> str:
    """Return a hash of the files' names, sizes and document counts, in order."""
    listed = [(file.name, size, len(file)) for file, size in zip(files, sizes, strict=True)]
    return hashlib.blake2b(json.dumps(listed).encode(), digest_size=8).hexdigest()


def choose_holdout(files: Sequence[TextFile], holdout: int) -> np.ndarray:
    """Return which documents are held out, [documents] bool: at least one, and not all."""
    hashes = np.concatenate([_splitmix64(_hash_name(file.name), len(file)) for file in files])
    held = hashes % np.uint64(holdout) == 0
    order = hashes.argsort(kind="stable")
    held[order[0]], held[order[-1]] = True, False
    return held


def _hash_name(name: str) -> int:
    data = Path(name).as_posix().encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _splitmix64(seed: int, count: int) -> np.ndarray:
    """Return a hash of each of 0 to count - 1, [count] uint64 (SplitMix64, Steele et al.)."""
    x = np.uint64(seed) + np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
