"""Files and folders that are never seen incomplete."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file; at any time the whole old or the whole new one exists.

    Args:
      path: an existing file is replaced.
      content: text is written as UTF-8.

    Raises:
      OSError: it cannot be written; an existing file is kept.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with new.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


@contextmanager
def fill_folder(folder: Path, shared: bool = False) -> Iterator[Path]:
    """Yield an empty folder to write files to; at the end it gets the name of `folder`.

    After an error there is none.

    Args:
      folder: its parents are made if needed.
      shared: other processes may make the same folder; the first one is kept.

    Raises:
      OSError: it cannot be made, or there is one with files already.
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
            if not shared or not folder.exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
