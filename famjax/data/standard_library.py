"""The long modules of Python's standard library, as training and held-out texts.

This code is on every machine.
"""

from __future__ import annotations

import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from famjax.core.atomic import fill_folder

# minimum size of a module in bytes; one module in this many is held out
_MODULE_BYTES, _HELD_OUT = 30_000, 16


@dataclass(frozen=True)
class Texts:
    """Texts of one kind.

    Attributes:
      name: name of the texts' folder, and their name in tables.
      training, held_out: files, in the form of `data.files`.
    """

    name: str
    training: str
    held_out: str


def standard_library(folder: Path) -> Texts:
    """Return the long modules of Python's standard library, after copying them once to `folder`."""
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = Texts("code", str(folder / "training"), str(folder / "held_out"))
    if not folder.exists():
        modules = sorted(
            path.relative_to(library)
            for path in library.rglob("*.py")
            if not {"site-packages", "dist-packages"} & set(path.parts)
            and path.stat().st_size >= _MODULE_BYTES
        )
        with fill_folder(folder, shared=True) as partial:
            for number, module in enumerate(modules):
                target = partial / ("training" if (number + 1) % _HELD_OUT else "held_out")
                target.mkdir(exist_ok=True)
                shutil.copyfile(library / module, target / ".".join(module.parts))
    return texts
