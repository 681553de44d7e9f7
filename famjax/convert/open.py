"""Opens a model for use: a famjax run, or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jax.sharding import Mesh

from famjax.convert.folder import open_hugging_face, run_config
from famjax.core.errors import UserError
from famjax.core.json_files import read_json
from famjax.core.paths import expanded
from famjax.tokenizers.load import load_tokenizer
from famjax.train.run import Run, open_run
from famjax.train.run_folder import CONFIG


def open_model(
    folder: str | Path,
    step: int | None = None,
    report: Callable[[str], None] | None = None,
    mesh: Mesh | None = None,
) -> Run:
    """Return the model in a folder; for runs see `famjax.train.run.open_run`.

    A Hugging Face folder is converted as by `famjax convert FOLDER DEST`, at step 0, with the
    folder's tokenizer. Nothing is written, or compared with Hugging Face's code.

    Args:
      mesh: devices to shard the parameters over (`famjax.convert.inference_mesh`); None uses the
        first device only.

    Raises:
      UserError: there is no usable model.
    """
    folder = expanded(folder)
    if not is_hugging_face(folder):
        return open_run(folder, step, report, mesh)
    teacher = open_hugging_face(folder, mesh=mesh)
    if report and teacher.ignored_keys:
        report(teacher.ignored_keys)
    config = run_config(teacher, teacher.model, folder)
    tokenizer = load_tokenizer(teacher.tokenizer)
    return Run(config, tokenizer, teacher.student(config.model), step=0)


def open_language_model(folder: str | Path) -> Run:
    """Return the model in a folder, which must have no encoder.

    Raises:
      UserError: there is no usable model, or it has an encoder.
    """
    run = open_model(folder)
    if layers := run.config.model.encoder.layers:
        raise UserError(
            f"{folder}: has an encoder (model.encoder.layers={layers}), but this needs a "
            "decoder-only model; give a run without an encoder"
        )
    return run


def is_hugging_face(folder: Path) -> bool:
    """Return whether config.json is a Hugging Face model's; False if it is damaged."""
    try:
        content = read_json(folder / CONFIG, "")
    except (OSError, UserError):
        return False
    return isinstance(content, dict) and "model_type" in content
