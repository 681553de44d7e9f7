"""Checkpoints of a training run: written in the background, and verified before they are used.

A checkpoint is a folder named by its step:

    000000200/params/ ...     one Orbax (OCDBT) folder for each top-level key of the tree
    000000200/tree.json       path, shape and dtype of every leaf
    000000200/extra.json      JSON that the caller adds (data cursor, config)
    000000200/manifest.json   size and sha256 of every other file

It is written under a temporary name and renamed when all of it is on disk, so a process killed at
any moment leaves the old checkpoints or the new one, never a partial one. The manifest detects
later damage; then the next older checkpoint is used.

Since each top-level key has its own Orbax folder, a reader that needs only the parameters verifies
and reads nothing else. Empty leaves (the keys of zero memory segments) are not written, since Orbax
rejects them; their shape is sufficient.

With several processes, each writes its shards of the arrays into the same folder, as usual with
Orbax, and process 0 writes all other files. To restore, process 0 verifies and chooses a
checkpoint, of which each process then reads its shards. All processes must save and restore
together. Only process 0 lists the folder, since a network file system may show an outdated listing
to the others.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from famjax.core.errors import UserError
from famjax.core.json_files import shorten
from famjax.processes import collective
from famjax.train.checkpoint_arrays import (
    Leaves,
    Tree,
    array_info,
    check_names,
    copy_to_host,
    describe_array,
    flatten,
    restore_arrays,
    write_arrays,
)
from famjax.train.manifest import (
    EXTRA,
    RESTORE_HINT,
    TREE,
    find_damage,
    fsync,
    load_json,
    write_manifest,
)

_TEMPORARY, _REPLACED = "tmp-", "old-"


class Checkpoints:
    """The checkpoints of one run, `folder` being RUN/checkpoints.

    Args:
      folder: created on the first save if it is missing.
      keep: number of the newest checkpoints to keep after a save. 0 opens the folder read-only,
        which is safe while another process trains.
      every: number of steps between regular checkpoints. Others, which a stop or `eval.best` saves,
        do not displace regular ones; the newest checkpoint is always kept.

    A folder may have only one writer at a time: it removes partial checkpoints of killed processes.
    Call `wait` before the process ends, also after an exception.
    """

    def __init__(self, folder: Path, keep: int = 0, every: int = 1) -> None:
        self.folder = Path(folder).absolute()
        self.keep, self._every = keep, every
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
        """Step of the newest checkpoint, not verified; None if there is no checkpoint."""
        return max(self.steps(), default=None)

    def path(self, step: int) -> Path:
        return self.folder / f"{step:09d}"

    def extra(self, step: int) -> dict[str, Any]:
        """The `extra` of a step's checkpoint, not verified; {} if it cannot be read."""
        try:
            extra = load_json(self.path(step) / EXTRA)
        except (OSError, ValueError, UserError):
            return {}
        return extra if isinstance(extra, dict) else {}

    def save(self, step: int, tree: Tree, extra: dict[str, Any], copy: bool = True) -> None:
        """Copy `tree` (with several processes, this process's shards) to the host, then write it in
        the background.

        On return the arrays may be donated and `extra` changed. An earlier save is awaited first,
        so host memory never holds more than one copy of the tree.

        Once written, a checkpoint replaces an existing one of the same step, and those of later
        steps are removed: they were damaged, and the run has restarted from an earlier one.

        Args:
          step: optimizer steps done, >= 0.
          tree: dict of pytrees of jax.Array; typed PRNG keys as `jax.random.key_data`.
          extra: JSON-serializable values to save with the tree.
          copy: False does not copy arrays that are already on the host; they must then not change
            before `wait` returns.

        Raises:
          UserError: the earlier save failed (see `wait`); nothing is saved now.
        """
        if not self.keep:
            raise ValueError("opened for reading only: keep=0")
        self.wait()
        leaves = {key: flatten(copy_to_host(value, copy)) for key, value in tree.items()}
        check_names(leaves)
        note = json.dumps(extra)
        self._thread = threading.Thread(
            target=self._save_in_background, args=(step, leaves, note), name=f"save-{step}"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the pending save is on disk.

        Raises:
          UserError: the save failed for lack of space or permission. Earlier checkpoints are
            unaffected.
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
            shapes depend on the step, a function that maps the step to the template.
          step: restore this checkpoint only, instead of the newest valid one.
          report: called with one line for each damaged checkpoint that is skipped; None writes to
            standard error.

        Returns:
          The checkpoint's step, the tree, and the `extra` that was given to `save`.

        Raises:
          UserError: there is no valid checkpoint, or it does not match the template.
        """
        template_at = template if callable(template) else lambda _: template
        step, template = self._newest_valid(template_at, step, report or _to_stderr)
        self._check_fit(step, {key: flatten(value) for key, value in template.items()})
        tree = {
            key: restore_arrays(self.path(step) / key, value) for key, value in template.items()
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
                "damage", functools.partial(find_damage, self.path(candidate), sorted(template))
            )
            if damage is None:
                return candidate, template
            report(f"checkpoint {self.path(candidate)} is damaged: {damage}; it is not used")
        tried = steps if step is None else [step]
        raise UserError(f"no valid checkpoint in {self.folder}: {tried} damaged; {RESTORE_HINT}")

    def _load_table(self, step: int, name: str) -> dict[str, Any]:
        """Return the JSON object in a file of a verified checkpoint."""
        path = self.path(step) / name
        try:
            table = load_json(path)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: damaged ({error}); {RESTORE_HINT}") from None
        if not isinstance(table, dict):
            raise UserError(f"{path}: damaged (not a table of keys); {RESTORE_HINT}")
        return table

    def _check_fit(self, step: int, wanted: dict[str, Leaves]) -> None:
        saved = self._load_table(step, TREE)
        for key, leaves in wanted.items():
            try:
                saved_info = {name: tuple(info) for name, info in saved.get(key, {}).items()}
            except (AttributeError, TypeError):
                path = self.path(step) / TREE
                raise UserError(
                    f"{path}: damaged (not a table of arrays); {RESTORE_HINT}"
                ) from None
            wanted_info = {name: array_info(leaf) for name, leaf in leaves.items()}
            for name in [*wanted_info, *saved_info]:
                if saved_info.get(name) != wanted_info.get(name):
                    full = f"{key}/{name}" if name else key
                    raise UserError(
                        f"checkpoint {self.path(step)} does not fit: {full} is "
                        f"{describe_array(saved_info.get(name))} in it and "
                        f"{describe_array(wanted_info.get(name))} here; "
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
            write_arrays(writing / key, values)
        collective.barrier("arrays written")
        if collective.process_index() == 0:
            self._complete(step, leaves, note)
        collective.barrier("save ends")

    def _complete(self, step: int, leaves: dict[str, Leaves], note: str) -> None:
        writing = self._temporary_path(step)
        index = {
            key: {n: array_info(v) for n, v in values.items()} for key, values in leaves.items()
        }
        (writing / TREE).write_text(json.dumps(index))
        (writing / EXTRA).write_text(note)
        write_manifest(writing)
        self._publish(step)
        self._prune(step)

    def _publish(self, step: int) -> None:
        """Rename the written folder to its step; an existing folder of that step is moved first."""
        target, aside = self.path(step), self.folder / f"{_REPLACED}{step:09d}"
        if target.exists():
            target.rename(aside)
        self._temporary_path(step).rename(target)
        fsync(self.folder)
        shutil.rmtree(aside, ignore_errors=True)

    def _prune(self, newest: int) -> None:
        steps = self.steps()
        valid = [s for s in steps if s <= newest]
        # regular ones last, so that they are the last to be removed
        by_worth = sorted(valid, key=lambda s: (s % self._every == 0, s))
        for step in set(steps) - {*by_worth[-self.keep :], newest}:
            # Renamed first: a partly removed folder must not look like a damaged checkpoint.
            self.path(step).rename(self._temporary_path(step))
            shutil.rmtree(self._temporary_path(step), ignore_errors=True)

    def _clean(self) -> None:
        """Clean up after killed processes: remove partial checkpoints, move back a replaced one."""
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
        """Return a `UserError` for a full or failing disk, and other errors (bugs) unchanged."""
        valid = (s for s in reversed(self.steps()) if find_damage(self.path(s), keys) is None)
        last = next(valid, None)
        rest = "there is no valid one" if last is None else f"the last valid one is step {last}"
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
    """Convert errors from a checkpoint's malformed `extra` into a one-line `UserError`."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        message = shorten(f"{type(error).__name__}: {error}")
        raise UserError(
            f"{folder / EXTRA}: not as famjax wrote it ({message}); {RESTORE_HINT}"
        ) from error


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def _is_full(error: BaseException) -> bool:
    """Return whether disk or quota is exhausted: TensorStore says so in a ValueError's text."""
    texts = [os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT)]
    chain: BaseException | None = error
    while chain is not None:
        if any(text in str(chain) for text in texts):
            return True
        chain = chain.__cause__ or chain.__context__
    return False
