"""Checkpoints of a training run: written in the background, and verified before they are used.

A checkpoint is a folder named by its step:

    000000200/params/ ...     one Orbax (OCDBT) folder for each top-level key of the tree
    000000200/tree.json       path, shape and dtype of every leaf
    000000200/extra.json      JSON that the caller adds (data cursor, config)
    000000200/manifest.json   size and sha256 of every other file

It is written under a temporary name and renamed when all of it is on disk, so a process killed at
any moment leaves the old checkpoints or the new one, never a partial one. The manifest detects
later damage; then the next older checkpoint is used.

One Orbax folder for each top-level key lets a reader of the parameters verify and read nothing
else. Empty leaves (the keys of zero memory segments) are not written, since Orbax rejects them;
their shape is sufficient.

With several processes, each writes its shards of the arrays into the same folder, as usual with
Orbax, and process 0 writes all else. Process 0 verifies; then each process reads its shards of the
checkpoint that process 0 chose. All must save and restore together. Only process 0 lists the
folder: a network file system may show the others an outdated listing.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from famjax.core.errors import UserError
from famjax.core.json_files import parse_json, read_whole, regular_file_size, shorten
from famjax.core.names import is_inside
from famjax.processes import collective

MANIFEST, TREE, EXTRA = "manifest.json", "tree.json", "extra.json"
_TEMPORARY, _REPLACED = "tmp-", "old-"
_RESTORE_HINT = "restore the folder from a copy or start a new run"

# A tree whose top level is a dict of identifiers, with jax.Array (or ShapeDtypeStruct) leaves.
Tree = dict[str, Any]
Leaves = dict[str, Any]


class Checkpoints:
    """The checkpoints of one run, `folder` being RUN/checkpoints.

    Args:
      folder: created on the first save if it is missing.
      keep: number of the newest checkpoints to keep after a save. 0 opens the folder read-only,
        which is safe while another process trains.

    A folder may have only one writer at a time: it removes partial checkpoints of killed processes.
    Call `wait` before the process ends, also after an exception.
    """

    def __init__(self, folder: Path, keep: int = 0) -> None:
        self.folder = Path(folder).absolute()
        self.keep = keep
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if keep and self.folder.is_dir() and collective.process_index() == 0:
            self._clean()

    def steps(self) -> list[int]:
        """Steps of the existing checkpoints, oldest first. They are not verified."""
        if not self.folder.is_dir():
            return []
        names = (p.name for p in self.folder.iterdir())
        return sorted(int(name) for name in names if re.fullmatch(r"[0-9]{9}|[1-9][0-9]{9,}", name))

    def latest(self) -> int | None:
        """The newest step, not verified; None if there is no checkpoint."""
        return max(self.steps(), default=None)

    def path(self, step: int) -> Path:
        return self.folder / f"{step:09d}"

    def extra(self, step: int) -> dict[str, Any]:
        """The `extra` of a step's checkpoint, not verified; {} if it cannot be read."""
        try:
            extra = _load_json(self.path(step) / EXTRA)
        except (OSError, ValueError, UserError):
            return {}
        return extra if isinstance(extra, dict) else {}

    def save(self, step: int, tree: Tree, extra: dict[str, Any], copy: bool = True) -> None:
        """Copy `tree` (with several processes, this process's shards) to the host, then write it in
        the background.

        On return the arrays may be donated and `extra` changed. An earlier save is awaited first,
        so host memory never holds more than one copy of the tree.

        Once written, a checkpoint replaces one of the same step and removes those of later steps:
        the run has restarted before them, because they were damaged.

        Args:
          step: optimizer steps done, >= 0.
          tree: dict of pytrees of jax.Array; typed keys as `jax.random.key_data`.
          extra: JSON-able.
          copy: False avoids the copy of arrays that are on the host already; they must not change
            before `wait` returns.

        Raises:
          UserError: the earlier save failed (see `wait`); nothing is saved now.
        """
        if not self.keep:
            raise ValueError("opened for reading only: keep=0")
        self.wait()
        to_host = _to_host if collective.process_count() == 1 else _share_to_host
        leaves = {key: _flatten(to_host(value, copy)) for key, value in tree.items()}
        _check_names(leaves)
        note = json.dumps(extra)
        self._thread = threading.Thread(
            target=self._save_in_background, args=(step, leaves, note), name=f"save-{step}"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the pending save is on disk.

        Raises:
          UserError: it failed for lack of space or permission. Earlier checkpoints are unaffected.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def restore(
        self,
        template: Tree | Callable[[int], Tree],
        step: int | None = None,
        report: Callable[[str], None] | None = None,
    ) -> tuple[int, Tree, dict[str, Any]]:
        """Restore the newest valid checkpoint, bit for bit, with the shardings of `template`.

        Args:
          template: tree of jax.ShapeDtypeStruct or jax.Array with the desired shapes, dtypes and
            shardings (no sharding: the first device). It may have a subset of the top-level keys,
            such as {"params": ...}; the files of the others are then neither verified nor read. If
            shapes depend on the step, a function from step to template.
          step: restore this checkpoint only, instead of the newest valid one.
          report: called with one line for each damaged checkpoint skipped; None writes to standard
            error.

        Returns:
          Its step, the tree, and the `extra` given to `save`.

        Raises:
          UserError: there is no valid checkpoint, or it does not match the template.
        """
        template_at = template if callable(template) else lambda _: template
        step, template = self._newest_valid(template_at, step, report or _to_stderr)
        self._check_fit(step, {key: _flatten(value) for key, value in template.items()})
        tree = {
            key: _restore_arrays(self.path(step) / key, value) for key, value in template.items()
        }
        return step, tree, self._load_table(step, EXTRA)

    def _newest_valid(
        self, template_at: Callable[[int], Tree], step: int | None, report: Callable[[str], None]
    ) -> tuple[int, Tree]:
        steps = collective.broadcast_from_first("steps", self.steps)
        if step is not None and step not in steps:
            raise UserError(f"no checkpoint of step {step} in {self.folder}; available: {steps}")
        if not steps:
            raise UserError(f"no checkpoint in {self.folder}; train the run first")
        for candidate in [step] if step is not None else reversed(steps):
            template = template_at(candidate)
            damage = collective.broadcast_from_first(
                "damage", functools.partial(_find_damage, self.path(candidate), sorted(template))
            )
            if damage is None:
                return candidate, template
            report(f"checkpoint {self.path(candidate)} is damaged: {damage}; it is not used")
        tried = steps if step is None else [step]
        raise UserError(f"no good checkpoint in {self.folder}: {tried} damaged; {_RESTORE_HINT}")

    def _load_table(self, step: int, name: str) -> dict[str, Any]:
        """Return the JSON object in a file of a verified checkpoint."""
        path = self.path(step) / name
        try:
            table = _load_json(path)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: damaged ({error}); {_RESTORE_HINT}") from None
        if not isinstance(table, dict):
            raise UserError(f"{path}: damaged (not a table of keys); {_RESTORE_HINT}")
        return table

    def _check_fit(self, step: int, wanted: dict[str, Leaves]) -> None:
        saved = self._load_table(step, TREE)
        for key, leaves in wanted.items():
            try:
                saved_info = {name: tuple(info) for name, info in saved.get(key, {}).items()}
            except (AttributeError, TypeError):
                path = self.path(step) / TREE
                raise UserError(
                    f"{path}: damaged (not a table of arrays); {_RESTORE_HINT}"
                ) from None
            wanted_info = {name: _array_info(leaf) for name, leaf in leaves.items()}
            for name in [*wanted_info, *saved_info]:
                if saved_info.get(name) != wanted_info.get(name):
                    full = f"{key}/{name}" if name else key
                    raise UserError(
                        f"checkpoint {self.path(step)} does not fit: {full} is "
                        f"{_describe_array(saved_info.get(name))} in it and "
                        f"{_describe_array(wanted_info.get(name))} here; "
                        "use the config the run was trained with (config.json beside checkpoints)"
                    )

    def _save_in_background(self, step: int, leaves: dict[str, Leaves], note: str) -> None:
        try:
            self._write(step, leaves, note)
        except BaseException as error:
            if collective.process_index() == 0:
                shutil.rmtree(self._temporary_path(step), ignore_errors=True)
            self._error = self._explain_error(step, list(leaves), error)

    def _write(self, step: int, leaves: dict[str, Leaves], note: str) -> None:
        writing = self._temporary_path(step)
        if collective.process_index() == 0:
            writing.mkdir(parents=True)
        collective.barrier("save begins")
        for key, values in leaves.items():
            _write_arrays(writing / key, values)
        collective.barrier("arrays written")
        if collective.process_index() == 0:
            self._complete(step, leaves, note)
        collective.barrier("save ends")

    def _complete(self, step: int, leaves: dict[str, Leaves], note: str) -> None:
        writing = self._temporary_path(step)
        index = {
            key: {n: _array_info(v) for n, v in values.items()} for key, values in leaves.items()
        }
        (writing / TREE).write_text(json.dumps(index))
        (writing / EXTRA).write_text(note)
        _write_manifest(writing)
        self._publish(step)
        self._prune(step)

    def _publish(self, step: int) -> None:
        """Rename the written folder to its step; move an existing one of that step aside first."""
        target, aside = self.path(step), self.folder / f"{_REPLACED}{step:09d}"
        if target.exists():
            target.rename(aside)
        self._temporary_path(step).rename(target)
        _fsync(self.folder)
        shutil.rmtree(aside, ignore_errors=True)

    def _prune(self, newest: int) -> None:
        steps = self.steps()
        kept = [s for s in steps if s <= newest][-self.keep :]
        for step in set(steps) - set(kept):
            # Renamed first: a partly removed folder must not look like a damaged checkpoint.
            self.path(step).rename(self._temporary_path(step))
            shutil.rmtree(self._temporary_path(step), ignore_errors=True)

    def _clean(self) -> None:
        """Clean up after killed processes: remove partial checkpoints, move back one set aside."""
        for path in list(self.folder.iterdir()):
            if path.name.startswith(_TEMPORARY):
                shutil.rmtree(path)
            elif path.name.startswith(_REPLACED):
                target = self.folder / path.name.removeprefix(_REPLACED)
                if target.exists():
                    shutil.rmtree(path)
                else:
                    path.rename(target)

    def _temporary_path(self, step: int) -> Path:
        return self.folder / f"{_TEMPORARY}{step:09d}"

    def _explain_error(self, step: int, keys: list[str], error: BaseException) -> BaseException:
        """The `UserError` for a full or failing disk; other errors, which are bugs, unchanged."""
        good = (s for s in reversed(self.steps()) if _find_damage(self.path(s), keys) is None)
        last = next(good, None)
        rest = "there is no good one" if last is None else f"the last good one is step {last}"
        if _is_full(error):
            return UserError(
                f"disk full while saving checkpoint {self.path(step)}; {rest}; "
                "free some space and resume"
            )
        if isinstance(error, OSError):
            return UserError(f"cannot save checkpoint {self.path(step)}: {error}; {rest}")
        return error


@contextmanager
def wrap_extra_errors(folder: Path) -> Iterator[None]:
    """Convert errors from malformed `extra` of a checkpoint into a `UserError` of one line."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        message = shorten(f"{type(error).__name__}: {error}")
        raise UserError(
            f"{folder / EXTRA}: not as famjax wrote it ({message}); {_RESTORE_HINT}"
        ) from error


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def _to_host(tree: Any, safe: bool) -> Any:
    """NumPy copies of all leaves; views of those on the CPU if not `safe`.

    On the CPU `device_get` returns views of the buffers, which would change, or block donation,
    while they are written.
    """

    def copy(leaf: Any, host: Any) -> np.ndarray:
        on_cpu = isinstance(leaf, jax.Array) and any(d.platform == "cpu" for d in leaf.devices())
        return np.array(host) if on_cpu and safe else np.asarray(host)

    return jax.tree.map(copy, tree, jax.device_get(tree))


def _share_to_host(tree: Any, _: bool) -> Any:
    """Global arrays in pinned host memory, where each process has the shards of its devices."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding.with_memory_kind("pinned_host"), tree)
    copies = jax.device_put(tree, shardings)
    return jax.block_until_ready(copies)


def _flatten(tree: Any) -> Leaves:
    """Leaves by path, "layers/0/w"; the empty path if the tree is one leaf."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}
    if len(leaves) != len(flat):
        raise ValueError("two leaves of the tree have the same path")
    return leaves


def _check_names(leaves: dict[str, Leaves]) -> None:
    for key, values in leaves.items():
        if not key.isidentifier():
            raise ValueError(f"top-level key {key!r} cannot name a folder")
        # Orbax joins paths with dots, so that a/b and a.b would share one array.
        if len({name.replace("/", ".") for name in values}) != len(values):
            raise ValueError(f"two leaves of {key!r} differ in dots and slashes only")


def _array_info(leaf: Any) -> tuple[list[int], str]:
    return list(leaf.shape), str(leaf.dtype)


def _describe_array(info: tuple[Any, ...] | None) -> str:
    return "absent" if info is None else f"{info[1]}{info[0]}"


def _nest(leaves: Leaves) -> Tree:
    """A tree of dicts without empty leaves, readable by plain Orbax without our classes."""
    tree: Tree = {}
    for name, leaf in leaves.items():
        if leaf.size:
            *folders, last = name.split("/")
            node = tree
            for folder in folders:
                node = node.setdefault(folder, {})
            node[last or "value"] = leaf
    return tree


def _unnest(tree: Tree, name: str) -> Any:
    for part in name.split("/"):
        tree = tree[part or "value"]
    return tree


def _write_arrays(folder: Path, leaves: Leaves) -> None:
    tree = _nest(leaves)
    if tree:
        # Orbax copies what it writes: limit that to the largest array, not all of them
        gigabytes = 2 + max(leaf.nbytes for leaf in leaves.values()) // 10**9
        with _suppress_tracebacks(), _make_checkpointer(save_concurrent_gb=gigabytes) as orbax:
            orbax.save(folder, ocp.args.PyTreeSave(tree))


def _make_checkpointer(**limits: int) -> ocp.Checkpointer:
    """An Orbax checkpointer whose processes synchronise through the coordination service.

    Its default, a barrier on the devices, would interleave with the collectives of training.
    """
    if collective.process_count() == 1:
        return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**limits))
    options = ocp.options.MultiprocessingOptions(
        active_processes=set(range(collective.process_count()))
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options, **limits)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


@contextmanager
def _suppress_tracebacks() -> Iterator[None]:
    """Suppress the tracebacks that Orbax logs for exceptions it also raises."""

    def wanted(record: logging.LogRecord) -> bool:
        return "_SignalingThread" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


def _restore_arrays(folder: Path, template: Any) -> Any:
    """The tree under `folder`, with the shapes, dtypes and shardings of `template`."""
    leaves = _flatten(template)
    nested = _nest(leaves)
    if nested:
        args = ocp.args.PyTreeRestore(item=nested, restore_args=jax.tree.map(_restore_args, nested))
        try:
            with _suppress_tracebacks(), _make_checkpointer() as orbax:
                nested = orbax.restore(folder, args=args)
        except (
            Exception
        ) as error:  # TensorStore's exception types, if files with valid checksums are malformed
            if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
                raise
            message = shorten(" ".join(f"{type(error).__name__}: {error}".split()), 200)
            raise UserError(f"{folder}: damaged ({message}); {_RESTORE_HINT}") from error
    values = [
        _unnest(nested, name) if leaf.size else _empty_array(leaf) for name, leaf in leaves.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(template), values)


def _empty_array(leaf: Any) -> jax.Array:
    zeros = np.zeros(leaf.shape, leaf.dtype)
    return jax.make_array_from_callback(leaf.shape, _sharding(leaf), lambda part: zeros[part])


def _restore_args(leaf: Any) -> ocp.ArrayRestoreArgs:
    return ocp.ArrayRestoreArgs(sharding=_sharding(leaf), global_shape=leaf.shape, dtype=leaf.dtype)


def _sharding(leaf: Any) -> jax.sharding.Sharding:
    sharding = getattr(leaf, "sharding", None)
    return sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _list_files(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix()


def _write_manifest(folder: Path) -> None:
    """Write the manifest, and fsync every file and folder before the rename."""
    files = {name: _file_info(folder / name, sync=True) for name in _list_files(folder)}
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=1))
    _fsync(folder / MANIFEST)
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            _fsync(path)


def _file_info(path: Path, sync: bool = False) -> dict[str, Any]:
    regular_file_size(path)
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size": file.tell(), "sha256": digest}


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _load_json(path: Path) -> Any:
    return parse_json(read_whole(path, _RESTORE_HINT).decode("utf-8"))


def _find_damage(folder: Path, keys: list[str]) -> str | None:
    """The first problem in the files that these top-level keys need; None if there is none."""
    try:
        files = dict(_load_json(folder / MANIFEST)["files"])
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
    for name, info in files.items():
        if not is_inside(name):
            return f"{MANIFEST} names {name!r}, which is not in its folder"
        if name.split("/")[0] in (TREE, EXTRA, *keys):
            wrong = _compare_file(folder / name, info)
            if wrong:
                return f"{name} {wrong}"
    return None


def _compare_file(path: Path, info: dict[str, Any]) -> str | None:
    try:
        size = path.stat().st_size
        if not isinstance(info, dict) or size != info.get("size"):
            listed = info.get("size") if isinstance(info, dict) else info
            return f"has {size} bytes instead of {listed}"
        return None if _file_info(path) == info else "has other contents than were written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except UserError:
        return "is no regular file"


def _is_full(error: BaseException) -> bool:
    """Whether disk or quota is exhausted, which TensorStore reports as text of a ValueError."""
    texts = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT)]
    chain: BaseException | None = error
    while chain is not None:
        if any(text in str(chain) for text in texts):
            return True
        chain = chain.__cause__ or chain.__context__
    return False
