"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path

from famjax.core.errors import UserError


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
