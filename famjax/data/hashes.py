"""Hashes of files and documents: whether they changed, and which documents are held out."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from famjax.core.errors import UserError
from famjax.data.files import TextFile

# total bytes up to which files are hashed as a whole, and bytes hashed at each end of larger files
_WHOLE, _END = 1 << 26, 1 << 12


def fingerprint_files(files: Sequence[TextFile], sizes: Sequence[int]) -> str:
    """Return a hash of the files' names, sizes and document counts, in order."""
    listed = [(file.name, size, len(file)) for file, size in zip(files, sizes, strict=True)]
    return hashlib.blake2b(json.dumps(listed).encode(), digest_size=8).hexdigest()


def fingerprint_contents(paths: Sequence[str | Path], whole: int = _WHOLE) -> str:
    """Return a hash of the contents of files, in order.

    If the files have more than `whole` bytes in total, the hash is of their sizes, modification
    times, first and last bytes.
    """
    hashed = hashlib.blake2b(digest_size=8)
    total = sum(os.path.getsize(path) for path in paths)
    for path in paths:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            hashed.update(f"{status.st_size},".encode())
            if total <= whole:
                hashed.update(file.read())
                continue
            hashed.update(f"{status.st_mtime_ns},".encode() + file.read(_END))
            file.seek(-min(_END, status.st_size), os.SEEK_END)
            hashed.update(file.read())
    return hashed.hexdigest()


def choose_holdout(files: Sequence[TextFile], holdout: int) -> np.ndarray:
    """Return which documents are held out, [documents] bool: at least one, and not all.

    Raises:
      UserError: most documents are held out together, since their files have one name.
    """
    hashes = np.concatenate([_splitmix64(_hash_name(file.name), len(file)) for file in files])
    held = hashes % np.uint64(holdout) == 0
    order = hashes.argsort(kind="stable")
    held[order[0]], held[order[-1]] = True, False
    alike = Counter({file.name: 0 for file in files})
    for file in files:
        alike[file.name] += len(file) == 1
    name, count = alike.most_common(1)[0]
    if min(count, held.sum()) > len(held) / 2:
        raise UserError(
            f"data.holdout={holdout}: holds out {held.sum()} of {len(held)} documents, since "
            f"{count} of the files are named {name}, and a document is chosen by its name; give "
            "their folder, or a pattern such as FOLDER/*/NAME, in place of the files"
        )
    return held


def _hash_name(name: str) -> int:
    data = Path(name).as_posix().encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _splitmix64(seed: int, count: int) -> np.ndarray:
    """Return a hash of each number below `count`, [count] uint64 (SplitMix64, Steele et al.)."""
    x = np.uint64(seed) + np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
