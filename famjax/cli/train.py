"""`famjax train CONFIG [section.key=value ...] [--run DIR]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from famjax.cli import train_help
from famjax.core import processes, runtime
from famjax.core.config import MeshConfig
from famjax.core.errors import UserError
from famjax.core.experiment import available, load_config
from famjax.core.watch import together

FLAGS = ("--run", "--coordinator", "--process-id", "--process-count")


def run(argv: list[str]) -> int:
    """Train, or go on with the run that stands in the run folder."""
    if train_help.asked(argv):
        print(train_help.text(argv))
        return 0
    (run_dir, *where), rest = take(argv, FLAGS)
    if run_dir == "":
        raise UserError("--run needs a folder: --run runs/NAME")
    if not rest or rest[0].startswith("--") or "=" in rest[0]:
        raise UserError(
            "train needs a config first: famjax train text_fam ... (known: "
            f"{', '.join(available())})"
        )
    config = load_config(rest[0], rest[1:])
    runtime.setup()
    place = processes.found() if where == [None] * 3 else processes.given(*where)
    alone = place is None
    if alone and config.model.stack != "residual" and config.mesh == MeshConfig():
        runtime.share_cores(config.data.batch // config.train.accumulate)
    from famjax.train.loop import train

    folder = Path(run_dir) if run_dir else Path("runs") / config.name
    with together(place):
        train(config, folder)
    if place is not None and place.index:
        return 0
    behind = f"the run: {folder}; next: famjax eval {folder}"
    # of most toy tasks the answers are no tokens that could be generated
    if config.data.tokenizer != "task":
        behind += f", famjax generate {folder} --prompt ..."
    print(behind, file=sys.stderr)
    return 0


def take(argv: list[str], names: Sequence[str]) -> tuple[list[str | None], list[str]]:
    """Take `--name VALUE` and `--name=VALUE` out of the arguments."""
    found: dict[str, str] = {}
    rest, tokens = [], iter(argv)
    for token in tokens:
        name, equals, value = token.partition("=")
        if name in names:
            found[name] = value if equals else next(tokens, "")
        else:
            rest.append(token)
    return [found.get(name) for name in names], rest
