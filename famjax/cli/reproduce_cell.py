"""A process of `famjax reproduce`, which runs one training and its measurement.

    python -m famjax.cli.reproduce_cell CELL CORES

CELL is a JSON object with the fields of `famjax.reproduce.cell.Cell`. CORES is a list such as
"0,1", or "" for all cores.
"""

from __future__ import annotations

import os
import sys

from famjax.cli.main import run_guarded
from famjax.core.json_files import parse_json
from famjax.processes import runtime


def main() -> int:
    spec, cores = sys.argv[1:]
    if cores:
        # before JAX starts its threads
        os.sched_setaffinity(0, set(map(int, cores.split(","))))
    from famjax.reproduce.cell import Cell, run_cell
    from famjax.reproduce.experiments import EXPERIMENTS

    runtime.setup()
    fields = parse_json(spec)
    cell = Cell(**{**fields, "given": tuple(fields["given"])})
    run_cell(cell, EXPERIMENTS[cell.experiment].at(cell.size, cell.test))
    return 0


if __name__ == "__main__":
    runtime.use_huge_pages()
    sys.exit(run_guarded(main))
