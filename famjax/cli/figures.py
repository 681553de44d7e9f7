"""Figures of results, drawn without a display."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from famjax.core.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(
    rows: int = 1, columns: int = 1, size: tuple[float, float] = (6, 4)
) -> tuple[Figure, Any]:
    """Return a figure and its axes, as `pyplot.subplots` does; `size` is in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns)


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure to a file, and return the file. A missing folder is created.

    Raises:
      UserError: the file cannot be written.
    """
    known = figure.canvas.get_supported_filetypes()
    if path.suffix[1:] not in known:
        raise UserError(f"{path}: no format of figures; end it with .png or .pdf")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; the figure cannot be written, give another file"
        ) from None
    return path
