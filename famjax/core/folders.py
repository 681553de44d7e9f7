"""Folders that are never seen incomplete."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def fill_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write files to; at the end it gets the name of `folder`.

    If another process makes `folder` meanwhile, that one is kept. After an error there is none.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        partial = temporary / folder.name
        partial.mkdir()  # with the usual permissions, unlike the temporary folder
        yield partial
        try:
            partial.rename(folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
