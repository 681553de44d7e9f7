"""`famjax train CONFIG [section.key=value ...] [--run DIR]`."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from famjax.core import processes, runtime
from famjax.core.config import Config, MeshConfig
from famjax.core.errors import UserError
from famjax.core.experiment import available, load_config
from famjax.core.keys import keys, values
from famjax.core.watch import together

FLAGS = ("--run", "--coordinator", "--process-id", "--process-count")


def run(argv: list[str]) -> int:
    """Train, or go on with the run that stands in the run folder."""
    if "--help" in argv or "-h" in argv:
        print(_help())
        return 0
    config, run_dir, where = _read(argv)
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


def check(argv: list[str]) -> int:
    """Return 0 if `run` would accept the arguments, for dry runs: nothing is computed or written.

    Raises:
      UserError: as `run` would, before it trains.
    """
    _read(argv)
    return 0


def _read(argv: list[str]) -> tuple[Config, str | None, list[str | None]]:
    """Return the config, what --run names, and the values of the flags of several processes."""
    (run_dir, *where), rest = take(argv, FLAGS)
    if run_dir == "":
        raise UserError("--run needs a folder: --run runs/NAME")
    if not rest or rest[0].startswith("--") or "=" in rest[0]:
        raise UserError(
            "train needs a config first: famjax train text_fam ... (known: "
            f"{', '.join(available())})"
        )
    return load_config(rest[0], rest[1:]), run_dir, where


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


def _help() -> str:
    configs = "\n".join(
        line
        for name, path in available().items()
        for line in textwrap.wrap(
            _title(path), 100, initial_indent=f"  {name:<26}", subsequent_indent=" " * 28
        )
    )
    return (
        "usage: famjax train CONFIG [section.key=value ...] [--run DIR]\n\n"
        "Trains a model. The run folder, runs/NAME by default, keeps everything; the same command\n"
        "goes on where a stopped run left off.\n\n"
        "Several processes train one model where TPU VMs, GKE, Slurm or Open MPI start them, or\n"
        "with --coordinator HOST:PORT --process-id I --process-count N on each.\n\n"
        "example: famjax train text_fam data.files='books/*.txt' train.steps=2000 name=books\n\n"
        "CONFIG: a name below, the path of a Python file with a function config(), or the path of\n"
        f"a run's config.json\n{configs}\n\n"
        f"keys, with their defaults before the config sets them\n{_keys()}"
    )


def _title(path: Path) -> str:
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def _keys() -> str:
    defaults, comments = values(Config()), _comments(Config)
    lines = []
    for key, kind in keys().items():
        about = comments.get(key, "")
        if get_origin(kind) is Literal:
            about = f"{' | '.join(get_args(kind))}{': ' if about else ''}{about}"
        start = f"  {f'{key}={defaults[key]}':<36}"
        lines += textwrap.wrap(about or "-", 100, initial_indent=start, subsequent_indent=" " * 38)
    return "\n".join(line.removesuffix(" -").rstrip() for line in lines)


def _comments(cls: Any, prefix: str = "") -> dict[str, str]:
    """Return the comment above each field of the schema, by key."""
    found: dict[str, str] = {}
    pending: list[str] = []
    for line in map(str.strip, inspect.getsource(cls).splitlines()):
        if line.startswith("#"):
            pending.append(line.lstrip("# "))
            continue
        if pending:
            found[prefix + line.partition(":")[0]] = " ".join(pending)
        pending = []
    for name, kind in get_type_hints(cls).items():
        if inspect.isclass(kind) and hasattr(kind, "__dataclass_fields__"):
            found |= _comments(kind, f"{prefix}{name}.")
    return found
