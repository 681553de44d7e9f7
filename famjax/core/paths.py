"""Paths as users write them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from famjax.core.errors import UserError

# the scheme of a URL at the start of a path, of a part of a list, or of the files of a task
_URL = re.compile(r"(?:^|[=,:])([a-z][a-z0-9+.-]*://[^,]*)", re.IGNORECASE)


def url_message(paths: str) -> str:
    """Return the error message for a URL among paths, which commas separate; "" without one."""
    url = _URL.search(paths)
    return (
        f"{url[1]}: only local paths; copy it or mount the bucket (docs/launch.md)" if url else ""
    )


def expanded(path: str | os.PathLike[str]) -> Path:
    """Return the path with `~` and `~user` replaced by home folders.

    Raises:
      UserError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = os.fspath(path).split("/")[0]
        raise UserError(
            f"{path}: there is no home folder {user}; write the whole path, or ./{path} for a "
            f"folder named {user}"
        ) from None
