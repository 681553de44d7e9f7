"""Results of trainings, stored beside the page that was made of them.

With them a page can be judged and drawn again, and trainings that it lacks can be added, without
the folders of its trainings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from famjax.core.errors import UserError
from famjax.core.json_files import read_json, write_json
from famjax.reproduce.cell import RESULT, Cell
from famjax.reproduce.experiment import Experiment
from famjax.reproduce.runner import read_result

# what tells a result from the others of an experiment
_KEYS = ("variant", "seed")
_RESTORE = "restore it from version control, or leave out --stored"


def store_results(file: Path, results: Mapping[str, Mapping[int, dict[str, Any]]]) -> None:
    """Write results by variant and seed, without the folders that they came from."""
    rows = [
        {"variant": variant, "seed": seed, **{k: v for k, v in row.items() if k != "training"}}
        for variant, by_seed in results.items()
        for seed, row in by_seed.items()
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, rows)


def restore_results(file: Path, experiment: Experiment, cells: Sequence[Cell]) -> int:
    """Give cells without a result the one in a file, if it was made with their settings.

    Returns:
      how many cells got one.

    Raises:
      UserError: the file is damaged.
    """
    if not file.exists():
        return 0
    rows = read_json(file, _RESTORE)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{file}: damaged; {_RESTORE}")
    by_cell = {tuple(row.get(key) for key in _KEYS): row for row in rows}
    restored = 0
    for cell in cells:
        row = by_cell.get((cell.variant, cell.seed))
        is_needed = cell.variant and read_result(cell, experiment) is None
        if row is None or not is_needed or row.get("settings") != cell.settings(experiment):
            continue
        folder = cell.folder(experiment)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RESULT, {k: v for k, v in row.items() if k not in _KEYS})
        restored += 1
    return restored
