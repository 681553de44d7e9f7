"""`famjax export RUN DEST --format hf|peft|orbax|stablehlo`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from famjax.cli.arguments import RunArgument
from famjax.cli.main import parse
from famjax.core.paths import expanded
from famjax.processes import runtime


@dataclass(frozen=True)
class Arguments:
    """Export a run. The export is read back and compared before it appears at its destination."""

    run: RunArgument
    """Folder of the run, or of a Hugging Face model."""
    dest: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DEST")]
    """Folder to write, which must not exist."""
    format: str = "hf"
    """Format: hf (for transformers), peft (adapters only),
    orbax (parameters only) or stablehlo (for any XLA compiler)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the tensors, in the format hf only."""


def run(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, "famjax export")
    from famjax.export.export import check_destination, export

    check_destination(expanded(arguments.dest))
    runtime.setup()
    a = arguments
    notes = export(
        a.run, a.dest, a.format, a.dtype, report=lambda line: print(line, file=sys.stderr)
    )
    print("\n".join([*notes, f"wrote {arguments.dest}"]))
    return 0
