"""`famjax export`: writes a run in another format, reads it back and compares it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path

from famjax.convert.families.famjax import FEEDBACK
from famjax.convert.folder import new_folder
from famjax.convert.open import open_model
from famjax.core.errors import UserError, did_you_mean
from famjax.core.paths import expanded
from famjax.export.source import ExportSource
from famjax.mixers import mixer_specs
from famjax.mixers.mixer import FORMATS


def export(
    run: str | Path,
    dest: str | Path,
    format: str = "hf",
    dtype: str = "float32",
    report: Callable[[str], None] = lambda line: None,
) -> list[str]:
    """Write a run to the folder `dest` in one of `FORMATS`.

    The folder appears only after it has been written and read back, and its logits compared.

    Args:
      run: folder of the run, whose newest valid checkpoint is exported, or of a Hugging Face model.
      dest: folder to write, which must not exist.
      format: one of `FORMATS`.
      dtype: dtype of the tensors in the format hf, float32 or bfloat16.
      report: called with a line before steps that may take a minute.

    Returns:
      Lines about what was compared, and the differences.

    Raises:
      UserError: a wrong argument, or the logits differ from the run's.
    """
    _check_options(format, dtype)
    dest = expanded(dest)
    check_destination(dest)
    source = ExportSource(open_model(run), expanded(run), dtype)
    _check_supported(source, format)
    report(f"writing {dest}, then reading it back to compare its logits")
    module = format
    if format == "stablehlo" and source.model.encoder.layers:
        module = "stablehlo_pairs"
    write = importlib.import_module(f"famjax.export.{module}").write
    with new_folder(dest) as folder:
        return write(source, folder)


def _check_options(format: str, dtype: str) -> None:
    """Raise a `UserError` for an unknown format, or a dtype that it does not have."""
    if format not in FORMATS:
        raise UserError(
            f"--format {format}: unknown{did_you_mean(format, FORMATS)} "
            f"(known: {', '.join(FORMATS)})"
        )
    if dtype != "float32" and format != "hf":
        raise UserError(f"--dtype {dtype} is for --format hf; {format} keeps float32")


def _check_supported(source: ExportSource, format: str) -> None:
    """Raise a `UserError` if the format does not support the model."""
    if format in ("hf", "peft") and source.model.adaptive.cutoffs:
        raise UserError(
            f"--format {format}: does not support adaptive embedding and softmax; take "
            "--format stablehlo or orbax"
        )
    if format == "peft" and source.model.encoder.layers:
        raise UserError(
            "--format peft: does not support an encoder, model.encoder.layers="
            f"{source.model.encoder.layers}; take --format hf, which merges the adapters"
        )
    stack = source.model.stack
    if format in ("hf", "peft") and stack != "residual":
        in_pytorch = stack in FEEDBACK
        if format == "peft" or not in_pytorch:
            others = "hf, stablehlo or orbax" if in_pytorch else "stablehlo or orbax"
            raise UserError(
                f"--format {format}: does not support model.stack={stack}; take --format {others}"
            )
    for name in ("short_conv", "ngram_memory"):
        if format == "peft" and (value := getattr(source.model, name)):
            raise UserError(
                f"--format peft: does not support model.{name}={value}; take --format hf, which "
                "merges the adapters"
            )
    for spec in mixer_specs(source.model):
        if format not in spec.formats:
            raise UserError(
                f"--format {format}: does not support {spec.title}; take --format "
                f"{' or '.join(spec.formats)}"
            )
        if format in ("hf", "peft") and (setting := spec.unexportable_setting(source.model)):
            raise UserError(
                f"--format {format}: does not support {setting}; take --format stablehlo or orbax"
            )


def check_destination(dest: Path) -> None:
    """Raise a `UserError` if the folder cannot be created."""
    if dest.exists() or dest.is_symlink():
        raise UserError(f"{dest} exists already; give another folder, or remove it")
    if not dest.absolute().parent.is_dir():
        raise UserError(f"{dest}: there is no folder {dest.parent}; create it first")
    if not os.access(dest.absolute().parent, os.W_OK):
        raise UserError(f"{dest}: the folder {dest.parent} is not writable; check its permissions")
