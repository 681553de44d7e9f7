"""`export`: a run in a format of others, read again and compared before it is there."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path

from famjax.convert.folder import atomic_folder
from famjax.convert.open import open_model
from famjax.core.checks import mixer_pattern
from famjax.core.errors import UserError, nearest
from famjax.export.source import ExportSource

# each is a module here: write(source, folder) -> lines that say how it was compared
FORMATS = ("hf", "peft", "orbax", "stablehlo")


def export(
    run: str | Path,
    dest: str | Path,
    format: str = "hf",
    dtype: str = "float32",
    report: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Write a run to the folder `dest` in one of `FORMATS`.

    Nothing is there until all of it was written, read again, and its logits compared.

    Args:
      run: its folder; the newest good checkpoint is taken. Or that of a Hugging Face model.
      dest: must not exist.
      dtype: float32 or bfloat16, of the tensors of hf.
      report: takes a line before what may last a minute.

    Returns:
      Lines that say what was compared, and how far apart it was.

    Raises:
      UserError: a mistake in these, or the logits are not those of the run.
    """
    if format not in FORMATS:
        raise UserError(
            f"--format {format}: unknown{nearest(format, FORMATS)} (known: {', '.join(FORMATS)})"
        )
    if dtype != "float32" and format != "hf":
        raise UserError(f"--dtype {dtype} is for --format hf; {format} keeps float32")
    dest = Path(dest).expanduser()
    check_destination(dest)
    source = ExportSource(open_model(run), Path(run), dtype)
    if format in ("hf", "peft") and source.model.adaptive.cutoffs:
        raise UserError(
            f"--format {format}: has no words for an adaptive embedding and softmax; take "
            "--format stablehlo or orbax"
        )
    if format in ("hf", "peft") and source.model.stack != "residual":
        raise UserError(
            f"--format {format}: has no words for model.stack={source.model.stack}; take --format "
            "stablehlo or orbax"
        )
    if format in ("hf", "peft") and "linear" in mixer_pattern(source.model):
        raise UserError(
            f"--format {format}: has no words for linear attention; take --format stablehlo or "
            "orbax"
        )
    report(f"writing {dest}, then reading it again to compare its logits")
    write = importlib.import_module(f"famjax.export.{format}").write
    with atomic_folder(dest) as folder:
        return write(source, folder)


def check_destination(dest: Path) -> None:
    """Raise a `UserError` if no folder can be made there."""
    if dest.exists() or dest.is_symlink():
        raise UserError(f"{dest} is there already; give another folder, or remove it")
    if not dest.absolute().parent.is_dir():
        raise UserError(f"{dest}: there is no folder {dest.parent}; make it first")
    if not os.access(dest.absolute().parent, os.W_OK):
        raise UserError(f"{dest}: the folder {dest.parent} cannot be written; check its rights")
