"""A process of `famjax reproduce`, which runs one training and its measurement.

    python -m famjax.cli.reproduce_cell CELL CORES PARENT

CELL is a JSON object with the fields of `famjax.reproduce.cell.Cell`. CORES is a list such as
"0,1", or "" for all cores. PARENT is the number of the process that starts this one.
"""

from __future__ import annotations

import os
import sys

from famjax.cli.main import run_guarded
from famjax.core.json_files import parse_json
from famjax.processes import runtime
from famjax.processes.parent import end_with_parent


def main() -> int:
    spec, cores, parent = sys.argv[1:]
    end_with_parent(int(parent))
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
    runtime.start_program()
    sys.exit(run_guarded(main))
