"""The XLA flags that the installed jaxlib has: on unknown ones it aborts or does not compile."""

from __future__ import annotations

import importlib.util
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def known_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags that the installed jaxlib has; names may begin with dashes."""
    (home,) = importlib.util.find_spec("jaxlib").submodule_search_locations
    library = Path(home) / "libjax_common.so"
    if not library.exists():
        return {}
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        return {flag: value for flag, value in flags.items() if _is_string(data, flag.lstrip("-"))}


def _is_string(data: mmap.mmap, name: str) -> bool:
    # a whole string: the names of fields that XLA no longer has are parts of longer ones
    return data.find(b"\0" + name.encode() + b"\0") >= 0
