"""The experiments of the three papers, and famjax's own.

A new one is a file here, with an `Experiment`, or a tuple of several, at its top level. Files and
values whose names begin with an underscore are parts of experiments.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType

from famjax.reproduce.experiment import Experiment


def _modules() -> list[str]:
    """Return the names of the files, with figure 3 before figure 10."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    public = (name for name in names if not name.startswith("_"))
    return sorted(public, key=lambda name: re.sub(r"\d+", lambda digits: digits[0].zfill(2), name))


def _defined_in(module: ModuleType) -> Iterator[Experiment]:
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        together = value if isinstance(value, tuple) else (value,)
        yield from (each for each in together if isinstance(each, Experiment))


EXPERIMENTS: dict[str, Experiment] = {
    experiment.id: experiment
    for name in _modules()
    for experiment in _defined_in(importlib.import_module(f"{__name__}.{name}"))
}
