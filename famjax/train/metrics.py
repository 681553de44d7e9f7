"""Metrics of a run: metrics.jsonl for programs, TensorBoard for people.

metrics.jsonl has one strict JSON object on each line, `{"step": 20, "loss": 1.5}`. Non-finite
numbers, which JSON lacks, are the strings "nan", "inf" and "-inf"; `read_metrics` returns them as
floats. If the row of each step is written before that step's checkpoint, a run that is killed and
resumed writes the same file as one that was not, except for fields that measure time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from famjax.core.atomic import write_file
from famjax.core.errors import UserError
from famjax.core.json_files import parse_json, regular_file_size
from famjax.train.tensorboard import TensorBoard

METRICS = "metrics.jsonl"
_TENSORBOARD = "tensorboard"
# a longer line counts as damaged
_MAX_ROW_BYTES = 1 << 20

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class MetricsWriter:
    """Appends rows to RUN/metrics.jsonl and RUN/tensorboard.

    Args:
      run_dir: RUN; created if missing.
      resume_step: step of the checkpoint from which the run resumes. Rows of later steps and an
        incomplete last line are dropped. None starts over: all rows are dropped.

    Raises:
      UserError: the existing file is damaged before its last line, or cannot be written.
    """

    def __init__(self, run_dir: Path, resume_step: int | None) -> None:
        self._path = run_dir / METRICS
        last = -1 if resume_step is None else resume_step
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            _drop_rows_after(self._path, last)
            # Unbuffered: a row is one write, so that a kill can truncate only the last row.
            self._file = self._path.open("ab", buffering=0)
            self._board = TensorBoard(run_dir / _TENSORBOARD, purge_step=last + 1)
        except OSError as error:
            raise _write_error(self._path, error) from error

    def write(self, step: int, fields: Mapping[str, Any]) -> None:
        """Append one row.

        Args:
          step: step of the row, written as its first field.
          fields: numbers (Python, NumPy or JAX scalars) and strings. TensorBoard gets the finite
            numbers.

        Raises:
          UserError: the disk is full or fails; metrics.jsonl ends with a whole row.
        """
        row = {"step": int(step)} | {name: _to_python(value) for name, value in fields.items()}
        line = json.dumps({name: _to_json_value(value) for name, value in row.items()}) + "\n"
        self._append(line.encode())
        scalars = {
            name: value
            for name, value in row.items()
            if name != "step" and isinstance(value, int | float) and math.isfinite(value)
        }
        with self._board_errors():
            self._board.write(step, scalars)

    def close(self) -> None:
        self._file.close()
        with self._board_errors():
            self._board.close()

    @contextlib.contextmanager
    def _board_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise _write_error(self._path.with_name(_TENSORBOARD), error) from error

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except UserError:
            # an earlier error is the cause
            if kind is None:
                raise

    def _append(self, line: bytes) -> None:
        before = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                raise OSError("no space for a whole row")
        except OSError as error:
            # A partial row would damage the file when the next one follows it.
            os.truncate(self._path, before)
            raise _write_error(self._path, error) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics.jsonl, oldest first, without an incomplete last line.

    Raises:
      UserError: there is no such file, or a line before the last is damaged.
    """
    return [row for row, _ in _read_rows(path)]


def _read_rows(path: Path) -> list[tuple[dict[str, Any], bytes]]:
    """Return each row with its unparsed line."""
    try:
        regular_file_size(path)
        with path.open("rb") as stream:
            return _parse_rows(path, iter(lambda: stream.readline(_MAX_ROW_BYTES), b""))
    except FileNotFoundError:
        raise UserError(f"no metrics at {path}; train the run first") from None


def _parse_rows(path: Path, lines: Iterator[bytes]) -> list[tuple[dict[str, Any], bytes]]:
    rows = []
    damaged = 0
    for number, line in enumerate(lines, start=1):
        if damaged:
            raise UserError(
                f"{path}: line {damaged} is damaged; remove that line, its row is lost, "
                "or restore the file from a copy"
            )
        row = _parse_row(line)
        if row is None:
            damaged = number
        else:
            rows.append((row, line.rstrip(b"\r\n")))
    return rows


def _parse_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    return {name: _from_json_value(value) for name, value in row.items()}


def _drop_rows_after(path: Path, last: int) -> None:
    """Drop the rows after step `last`, atomically."""
    if not path.exists():
        return
    lines = [line + b"\n" for row, line in _read_rows(path) if row["step"] <= last]
    write_file(path, b"".join(lines))


def _write_error(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write {path}: {error.strerror or error}; free some space or check its "
        "permissions, and resume"
    )


def _to_python(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _to_json_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _from_json_value(value: Any) -> Any:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value
