"""Open a model to use it: a famjax run, or a Hugging Face folder, exported by famjax or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jax.sharding import Mesh

from famjax.convert.folder import open_hugging_face, run_config
from famjax.core.errors import UserError
from famjax.core.json_files import read_json
from famjax.data.tokenizers import load_tokenizer
from famjax.train.run import CONFIG, Run, open_run


def open_model(
    folder: str | Path,
    step: int | None = None,
    report: Callable[[str], None] | None = None,
    mesh: Mesh | None = None,
) -> Run:
    """Return the model in a folder: of a run see `famjax.train.run.open_run`.

    A Hugging Face folder is what `famjax convert FOLDER DEST` would make of it, at step 0, on the
    first device, its tokenizer that of the folder. Nothing is written, nor compared with Hugging
    Face's code.

    Raises:
      UserError: nothing usable is there.
    """
    folder = Path(folder).expanduser()
    if not is_hugging_face(folder):
        return open_run(folder, step, report, mesh)
    teacher = open_hugging_face(folder)
    if report and teacher.ignored_keys:
        report(teacher.ignored_keys)
    config = run_config(teacher, teacher.model, folder)
    tokenizer = load_tokenizer(teacher.tokenizer)
    return Run(config, tokenizer, teacher.student(config.model), step=0)


def is_hugging_face(folder: Path) -> bool:
    """Return whether config.json is of a Hugging Face model; False if it is damaged."""
    try:
        content = read_json(folder / CONFIG, "")
    except (OSError, UserError):
        return False
    return isinstance(content, dict) and "model_type" in content
