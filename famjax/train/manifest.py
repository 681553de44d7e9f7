"""The files of a checkpoint, and the manifest with the size and sha256 of each other file."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from famjax.core.errors import UserError
from famjax.core.json_files import parse_json, read_whole, regular_file_size
from famjax.core.names import is_inside

MANIFEST, TREE, EXTRA = "manifest.json", "tree.json", "extra.json"
RESTORE_HINT = "restore the folder from a copy or start a new run"
# files that are hashed at a time: SHA-256 on one core is slower than a good disk, and a bucket is
# slow with one request at a time
_THREADS = 16


def _list_files(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix()


def write_manifest(folder: Path) -> None:
    """Write the manifest; fsync every file and folder, before the checkpoint is renamed."""
    names = list(_list_files(folder))
    with ThreadPoolExecutor(_THREADS) as pool:
        infos = list(pool.map(lambda name: file_info(folder / name, sync=True), names))
    files = dict(zip(names, infos, strict=True))
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=1))
    fsync(folder / MANIFEST)
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            fsync(path)


def file_info(path: Path, sync: bool = False) -> dict[str, Any]:
    regular_file_size(path)
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": digest}


def fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def load_json(path: Path) -> Any:
    return parse_json(read_whole(path, RESTORE_HINT).decode("utf-8"))


def find_damage(folder: Path, keys: list[str]) -> str | None:
    """Return the first problem in the files that these top-level keys need; None if all is well."""
    try:
        files = dict(load_json(folder / MANIFEST)["files"])
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return f"{MANIFEST} cannot be read"
    for name in (TREE, EXTRA):
        if name not in files:
            return f"{MANIFEST} does not list {name}"
    for key in keys:
        if (folder / key).is_dir() and not any(str(name).startswith(f"{key}/") for name in files):
            return f"{MANIFEST} lists nothing of {key}"
    for name in files:
        if not is_inside(name):
            return f"{MANIFEST} names {name!r}, which is not in its folder"
    needed = [name for name in files if name.split("/")[0] in (TREE, EXTRA, *keys)]
    pool = ThreadPoolExecutor(_THREADS)
    try:
        wrong = pool.map(lambda name: _compare_file(folder / name, files[name]), needed)
        return next((f"{n} {w}" for n, w in zip(needed, wrong, strict=True) if w), None)
    finally:
        pool.shutdown(cancel_futures=True)


def _compare_file(path: Path, info: dict[str, Any]) -> str | None:
    try:
        size = path.stat().st_size
        if not isinstance(info, dict) or size != info.get("size"):
            listed = info.get("size") if isinstance(info, dict) else info
            return f"has {size} bytes instead of {listed}"
        return None if file_info(path) == info else "has other contents than were written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except UserError:
        return "is not a regular file"
