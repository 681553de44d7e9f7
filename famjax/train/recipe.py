"""Training in a folder that holds one recipe only, and the training time over all calls."""

from __future__ import annotations

import time
from pathlib import Path

from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.core.json_files import RUN_AGAIN, read_json, write_json
from famjax.train.checkpoint import Checkpoints
from famjax.train.loop import train
from famjax.train.run import Run


def claim_folder(folder: Path, recipe: str, name: str = "recipe.txt") -> None:
    """Reserve a folder for the results of one recipe, which is written to the file `name`.

    Raises:
      UserError: the folder has results of another recipe.
    """
    file = folder / name
    before = file.read_text() if file.exists() else None
    if before != recipe:
        if before is not None or (folder / "checkpoints").exists():
            raise UserError(f"{folder}: was made by another recipe; {RUN_AGAIN}")
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(recipe)


def train_and_time(config: Config, folder: Path, quiet: bool) -> tuple[Run, float]:
    """Train, or continue training; return the run and the training seconds over all calls.

    A call after the end of training adds no seconds.

    Raises:
      UserError: the folder has a run of another config.
    """
    claim_folder(folder, repr(config))
    path = folder / "train_seconds.json"
    checkpoints = Checkpoints(folder / "checkpoints")
    before = checkpoints.latest()
    spent = read_json(path, RUN_AGAIN) if before and path.exists() else 0.0
    begin = time.perf_counter()
    try:
        run = train(config, folder, quiet)
    finally:
        # an interrupted training has saved a checkpoint, from which it continues
        if checkpoints.latest() != before:
            spent += time.perf_counter() - begin
            write_json(path, spent)
    return run, spent
