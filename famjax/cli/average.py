"""`famjax average RUN [--last 10] [--out FOLDER]`."""

from __future__ import annotations

from dataclasses import dataclass

from famjax.cli.arguments import RunArgument
from famjax.cli.main import parse
from famjax.core.errors import UserError
from famjax.core.paths import expanded
from famjax.processes import runtime


@dataclass(frozen=True)
class Arguments:
    """Average the parameters of a run's last checkpoints, and write a run that eval, generate and
    export open like any other. The run needs a train.keep of at least as many checkpoints. For
    adapters, A and B are averaged separately, which is not the mean of their products."""

    run: RunArgument
    """Folder of the run."""
    last: int = 10
    """Number of last checkpoints to average."""
    out: str = ""
    """Folder to write, which must not exist. Default: the folder average in the run."""


def run(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, "famjax average")
    if arguments.last < 1:
        raise UserError(f"--last {arguments.last}: must be at least 1")
    source = expanded(arguments.run)
    out = expanded(arguments.out) if arguments.out else source / "average"
    runtime.setup()
    from famjax.cli.next_commands import eval_command
    from famjax.convert.folder import new_folder
    from famjax.export.export import check_destination
    from famjax.train.average import average, save_average

    if source.is_dir():  # else it is what is missing
        check_destination(out)
    mean = average(source, arguments.last)
    with new_folder(out) as folder:
        save_average(mean, source, folder)
    steps = ", ".join(f"{step:,}" for step in mean.steps)
    print(f"wrote {out}, the mean of steps {steps}; next: {eval_command(mean.config, out)}")
    return 0
