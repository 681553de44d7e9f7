"""Finds the text files that `data.files` names: files, folders, globs, and lists of them."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import sysconfig
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence, Set

from famjax.core.errors import UserError, did_you_mean_path
from famjax.data.files import TextFile, is_system_path, probe_text, read_error_message
from famjax.data.other_json import check_not_all_json, check_not_json
from famjax.data.scan import CheckedFiles, Scanner
from famjax.data.tables import check_not_all_tables, check_not_table
from famjax.tokenizers.chat import ChatTemplate

MAX_FILES = 1_000_000
# maximum size of a file's name, in most file systems
_MAX_NAME = 255
# reasons for skipping a folder
_UNREADABLE = "folder without permission"
_RUN = "folder of a run"


def find_files(
    files: str,
    template: ChatTemplate | None = None,
    checked: CheckedFiles | None = None,
    max_files: int = MAX_FILES,
    probe_only: bool = False,
) -> tuple[list[TextFile], Counter[str]]:
    """Return the text files that `data.files` names, and the number of files skipped, by reason.

    Files are read completely, so that what cannot be read later, such as a line which
    `read_json_line` would reject, is an error or skipped now.

    Args:
      template: chat template that renders conversations.
      checked: record of files that are not checked again; files checked now are added to it.
      max_files: maximum number of files in a folder or matching a glob.
      probe_only: whether texts are only probed, since an error when they are read loses little.
    """
    skipped: Counter[str] = Counter()
    by_path: dict[str, TextFile] = {}
    named: set[str] = set()
    entries = split_entries(files)
    if not entries and not files.strip():
        entries = [""]
    if not entries or "\0" in files:
        raise UserError(f"data.files={files!r}: names no file; give a file, a folder or a glob")
    for entry in entries:
        for path, name, explicit in _expand_entry(os.path.expanduser(entry), skipped, max_files):
            if reason := probe_text(path, explicit):
                skipped[reason] += 1
            else:
                if explicit:
                    check_not_json(path)
                    check_not_table(path)
                    named.add(os.path.realpath(path))
                by_path.setdefault(os.path.realpath(path), TextFile(path, name))
    if not by_path:
        raise UserError(f"data.files={files}: no text found{describe_skipped(skipped)}")
    paths = [file.path for file in by_path.values()]
    check_not_all_json(files, paths)
    check_not_all_tables(files, paths)
    scan = Scanner(template, checked or CheckedFiles(None, template))
    indexed = []
    for real, file in by_path.items():
        reason = None if probe_only else scan.check_text(file.path, explicit=real in named)
        if reason:
            skipped[reason] += 1
        else:
            indexed.append(scan.index_documents(file))
    if not indexed:
        raise UserError(f"data.files={files}: no text found{describe_skipped(skipped)}")
    if any(map(len, indexed)) and not scan.found_text:
        raise UserError(f"data.files={files}: all documents are empty; give one with text in it")
    return indexed, skipped


def split_entries(files: str) -> list[str]:
    """Return the entries of a list of files, folders and globs that are separated by commas.

    A name may have commas, too, if there is such a file or folder.
    """
    if _exists(files):
        return [files.strip()]
    parts = files.split(",")
    entries, at = [], 0
    while at < len(parts):
        end = _find_entry_end(parts, at)
        entries.append(",".join(parts[at:end]).strip())
        at = end
    return [entry for entry in entries if entry]


def _find_entry_end(parts: Sequence[str], begin: int) -> int:
    """Return the end of the parts from `begin` on that are one name."""
    if not _exists(parts[begin]):
        size = len(parts[begin])
        for end in range(begin + 2, len(parts) + 1):
            size += 1 + len(parts[end - 1])
            if size > len(parts[begin]) + _MAX_NAME:
                break
            if _exists(",".join(parts[begin:end])):
                return end
    return begin + 1


def _exists(entry: str) -> bool:
    return bool(entry.strip()) and os.path.exists(os.path.expanduser(entry.strip()))


def list_files(files: str, option: str, repeated: bool = False) -> list[str]:
    """Return the files named by a list of files, folders and globs, whatever they contain.

    Args:
      option: name of the option that the list was given to, for error messages.
      repeated: return a file twice if it is named twice.
    """
    found: list[str] = []
    try:
        for entry in split_entries(files):
            for path, *_ in _expand_entry(os.path.expanduser(entry), Counter(), MAX_FILES):
                found.append(path)
    except UserError as error:
        raise UserError(str(error).replace("data.files", option, 1)) from None
    if not found:
        raise UserError(f"{option} {files}: names no file")
    return found if repeated else list(dict.fromkeys(found))


def _expand_entry(
    entry: str, skipped: Counter[str], max_files: int
) -> Iterator[tuple[str, str, bool]]:
    """Yield (path, relative name, whether the user named it) for each file of an entry."""
    unread = skipped[_UNREADABLE]
    if not entry:
        library = sysconfig.get_paths()["stdlib"]
        for path in _walk(library, skipped):
            if path.endswith(".py"):
                yield path, os.path.relpath(path, library), False
    elif is_system_path(entry):
        raise UserError(f"data.files={entry}: is a system folder; name the folder of the texts")
    elif os.path.isdir(entry):
        for path in _limit_count(_walk(entry, skipped), entry, max_files):
            yield path, os.path.relpath(path, entry), False
    elif os.path.exists(entry):
        yield entry, os.path.basename(entry), True
    elif matches := sorted(filter(os.path.isfile, _glob_files(entry, skipped, max_files))):
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
        raise UserError(f"data.files: no such file or folder: {entry}{did_you_mean_path(entry)}")


def _literal_folder(entry: str) -> str:
    """Return the folder of a path, or of the part of a glob before its first wildcard."""
    return os.path.dirname(re.split(r"[*?[]", entry)[0])


def _check_listable(folder: str) -> None:
    """Raise a `UserError` if the permission to list a folder is missing."""
    try:
        with os.scandir(folder or "."):
            pass
    except PermissionError as error:
        raise UserError(read_error_message(folder or ".", error)) from None
    except OSError:
        return  # missing: the caller reports it


def _skip_unreadable(error: OSError, named: str, skipped: Counter[str]) -> None:
    """Count a folder that cannot be listed for lack of permission.

    Raises:
      UserError: the user named it, or listing it failed for another reason than permission.
    """
    if not isinstance(error, PermissionError) or error.filename == named:
        raise UserError(read_error_message(error.filename, error)) from None
    skipped[_UNREADABLE] += 1


def _glob_files(entry: str, skipped: Counter[str], max_files: int = MAX_FILES) -> Iterator[str]:
    """Yield the paths that match a pattern."""
    folder = _literal_folder(entry) or "."
    # without "**" at most one folder is listed for each name of the pattern
    if is_system_path(folder) and ("**" in entry or os.path.realpath(folder) != os.sep):
        raise UserError(f"data.files={entry}: is a system folder; name the folder of the texts")
    parts = entry.split(os.sep)
    if "**" not in parts:
        yield from _limit_count(glob.iglob(entry), entry, max_files)
        return
    at = parts.index("**")
    head = os.sep.join(parts[:at])
    folders = sorted(filter(os.path.isdir, glob.iglob(head))) if at else [""]
    yield from _limit_count(_walk_pattern(folders, parts[at:], head, skipped), entry, max_files)


def _walk_pattern(
    folders: Sequence[str], pattern: Sequence[str], named: str, skipped: Counter[str]
) -> Iterator[str]:
    """Yield the files below `folders` whose relative paths match a pattern with "**".

    Like `glob.glob`, it follows links to folders. A folder that is reached again is listed again
    only if other names in it would match, so that links to a parent folder do not loop forever.

    Args:
      folders: folders to search; "" is the current folder.
      named: the folder for which a lack of permission is an error; for other folders it is counted
        in `skipped`.
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
                continue  # nothing in this folder can match: it is hidden, for example
            elif not entry.is_symlink():
                todo.append((path, after))
            elif not is_system_path(path):
                links.append((path, after))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # a link to itself


def _match_name(name: str, at: Set[int], pattern: Sequence[str]) -> frozenset[int]:
    """Return the positions in a pattern after matching a name, given the positions before it.

    Hidden names match only a part of the pattern that begins with a dot.
    """
    after = set()
    for i in at - {len(pattern)}:
        hidden = name.startswith(".") and not pattern[i].startswith(".")
        if not hidden and fnmatch.fnmatchcase(name, pattern[i]):
            after.add(i if pattern[i] == "**" else i + 1)
    return _expand_positions(after, pattern)


def _expand_positions(at: Set[int], pattern: Sequence[str]) -> frozenset[int]:
    """Return the positions, and those after each "**" at them, since "**" may match nothing."""
    positions = set(at)
    for i, part in enumerate(pattern):
        if i in positions and part == "**":
            positions.add(i + 1)
    return frozenset(positions)


def _limit_count(paths: Iterable[str], entry: str, max_files: int) -> Iterator[str]:
    for count, path in enumerate(paths):
        if count == max_files:
            raise UserError(
                f"data.files={entry}: more than {max_files:,} files; name a folder with fewer, "
                "or write the texts as lines of .jsonl files"
            )
        yield path


def _walk(folder: str, skipped: Counter[str]) -> Iterator[str]:
    """Yield the files below `folder`, sorted, except hidden ones, installed packages and runs.

    Links to folders come last, so that files are found by their own paths first. A folder is listed
    once, so that links to a parent folder do not loop forever.
    """

    def skip(error: OSError) -> None:
        _skip_unreadable(error, folder, skipped)

    todo, seen = deque([folder]), set[tuple[int, int]]()
    while todo:
        for root, folders, names in os.walk(todo.popleft(), onerror=skip):
            status = os.stat(root)
            if (key := (status.st_dev, status.st_ino)) in seen:
                folders.clear()
                continue
            seen.add(key)
            if _is_run(folders, names):
                # with data.files=. the runs in runs/ would be documents; as they change, a run
                # could not be resumed
                skipped[_RUN] += 1
                folders.clear()
                continue
            hidden = [name for name in folders + names if name.startswith(".")]
            skipped["hidden"] += len(hidden)
            kept = sorted(set(folders) - set(hidden) - {"site-packages", "dist-packages"})
            links = [name for name in kept if os.path.islink(os.path.join(root, name))]
            todo.extend(p for p in (os.path.join(root, n) for n in links) if not is_system_path(p))
            folders[:] = [name for name in kept if name not in links]
            for name in sorted(set(names) - set(hidden)):
                yield os.path.join(root, name)


def _is_run(folders: list[str], names: list[str]) -> bool:
    """Return whether a folder with these contents is a run, perhaps one that is just starting."""
    return "train.lock" in names or ("config.json" in names and "checkpoints" in folders)


def describe_skipped(skipped: Counter[str]) -> str:
    """Return a note on the files that were skipped, by reason; "" if there are none."""
    parts = [
        f"{count:,} {reason if count == 1 else reason.replace('folder ', 'folders ')}"
        for reason, count in sorted(skipped.items())
        if count
    ]
    return f"; skipped {', '.join(parts)}" if parts else ""
