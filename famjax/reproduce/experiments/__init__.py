"""The experiments of the three papers, and famjax's own.

A new one is a file here, and a line in `_FILES`. Files whose names begin with an underscore have
what several experiments share.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

from famjax.reproduce.experiment import Experiment

# each has an `Experiment`, or a tuple of several, at its top level
_FILES = (
    "fam_figure_3",
    "fam_figure_4",
    "fam_figure_8",
    "fam_figure_10",
    "fam_table_3",
    "fam_table_4",
    "fam_figure_6",
    "fam_figure_7",
    "fam_table_7",
    "fam_table_8",
    "fam_table_9",
    "fam_losses",
    "fam_recipe",
    "ft_table_1",
    "ft_table_3",
    "ft_table_6",
    "ft_figure_5",
    "ft_figure_8",
    "ft_figure_9",
    "ft_figure_4_translation",
    "ft_figure_7_translation",
    "ft_v1_table_2",
    "ft_v1_table_6",
    "ft_v1_figure_7",
    "t2r_table_1",
    "t2r_table_2",
    "t2r_figure_4",
    "t2r_figure_5",
    "memory_timescales",
    "memory_lengths",
    "memory_steps",
    "memory_lanes",
    "memory_keys",
    "memory_features",
    "memory_smeared",
    "memory_writes",
)


def _defined_in(module: ModuleType) -> Iterator[Experiment]:
    for value in vars(module).values():
        together = value if isinstance(value, tuple) else (value,)
        yield from (each for each in together if isinstance(each, Experiment))


EXPERIMENTS: dict[str, Experiment] = {
    experiment.id: experiment
    for name in _FILES
    for experiment in _defined_in(importlib.import_module(f"{__name__}.{name}"))
}
