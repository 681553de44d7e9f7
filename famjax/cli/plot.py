"""Check of the output file of `--plot`."""

from __future__ import annotations

from pathlib import Path

from famjax.core.errors import UserError
from famjax.core.paths import expanded


def plot_file(name: str) -> Path:
    """Return the file of `--plot`, checked before anything is measured.

    Raises:
      UserError: the file cannot be written.
    """
    path = expanded(name)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {name}: must end in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise UserError(f"--plot {name}: there is no folder {path.parent}")
    return path
