"""`famjax train CONFIG [section.key=value ...] [--run DIR]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from famjax.cli import train_help
from famjax.config.schema import Config, MeshConfig
from famjax.core.errors import UserError
from famjax.core.paths import expanded
from famjax.experiment.hints import find_hint
from famjax.experiment.load import available_configs, check_starts_from_weights, load_config
from famjax.processes import collective, runtime
from famjax.processes.failure_monitor import all_or_nothing

FLAGS = ("--run", "--coordinator", "--process-id", "--process-count")


def run(argv: list[str]) -> int:
    """Train, or continue the run in the run folder."""
    if train_help.wants_help(argv):
        print(train_help.help_text(argv))
        return 0
    config, run_dir, process_flags = _parse(argv)
    runtime.setup()
    if any(flag is not None for flag in process_flags):
        process = collective.parse_flags(*process_flags)
    else:
        process = collective.detect()
    single_process = process is None
    if single_process and config.mesh == MeshConfig():
        runtime.share_cores(config.data.batch // config.train.accumulate)
    from famjax.train.loop import train_with_source

    folder = expanded(run_dir) if run_dir else Path("runs") / config.name
    with all_or_nothing(process):
        trained, source = train_with_source(config, folder)
    if process is not None and process.index:
        return 0
    from famjax.cli.next_commands import next_commands

    commands = next_commands(trained.config, source, folder)
    print(f"the run: {folder}" + (f"; next: {commands}" if commands else ""), file=sys.stderr)
    return 0


def check(argv: list[str]) -> int:
    """Return 0 if `run` would accept the arguments, as a dry run without computing or writing.

    Raises:
      UserError: as `run` would, before it trains.
    """
    _parse(argv)
    return 0


def _parse(argv: list[str]) -> tuple[Config, str | None, list[str | None]]:
    """Return the config, the value of --run, and the values of the multi-process flags."""
    (run_dir, *process_flags), rest = take_options(argv, FLAGS)
    if run_dir == "":
        raise UserError("--run needs a folder: --run runs/NAME")
    if rest and rest[0].startswith("-"):
        name, _, value = rest[0].partition("=")
        if how := find_hint(name, value or "".join(rest[1:2])):
            raise UserError(f"unknown option {name}{how}")
    if not rest or rest[0].startswith("-") or "=" in rest[0]:
        raise UserError(
            "train needs a config first: famjax train text_fam ... (known: "
            f"{', '.join(available_configs())})"
        )
    config = load_config(rest[0], rest[1:])
    check_starts_from_weights(rest[0], config)
    return config, run_dir, process_flags


def take_options(argv: list[str], names: Sequence[str]) -> tuple[list[str | None], list[str]]:
    """Split off `--name VALUE` and `--name=VALUE`; return their values and the other arguments."""
    options: dict[str, str] = {}
    rest, tokens = [], iter(argv)
    for token in tokens:
        name, equals, value = token.partition("=")
        if name in names:
            options[name] = value if equals else next(tokens, "")
        else:
            rest.append(token)
    return [options.get(name) for name in names], rest
