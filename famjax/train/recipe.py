"""Training in a folder that holds one recipe only, and the training time over all calls."""

from __future__ import annotations

from pathlib import Path

from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.core.json_files import RUN_AGAIN
from famjax.train.log import TRAIN_SECONDS
from famjax.train.loop import train
from famjax.train.metrics import read_metrics
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

    Raises:
      UserError: the folder has a run of another config, or of a version that did not count seconds.
    """
    claim_folder(folder, repr(config))
    run = train(config, folder, quiet)
    last = read_metrics(folder / "metrics.jsonl")[-1]
    if TRAIN_SECONDS not in last:
        raise UserError(f"{folder}: was trained by an older version; {RUN_AGAIN}")
    return run, last[TRAIN_SECONDS]
