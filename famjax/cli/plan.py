"""`famjax plan CONFIG [section.key=value ...] --topology v5e:4x8 [--search] [--shardings]`."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from typing import Any

from famjax.cli.layout import command, help_width, listed, usage, wrap
from famjax.core import runtime
from famjax.core.config import Config
from famjax.core.errors import UserError, nearest
from famjax.core.experiment import available, load_config
from famjax.core.memory import DeviceMemory, check_training_fits
from famjax.plan.chips import CHIPS, Topology, example, topology

_FLAGS = ("--topology", "--search", "--compiles", "--shardings", "--json", "--help")
_OPTIONS = {
    "--topology": "chips to plan for; TPUs need libtpu, and no TPU: pip install -e '.[tpu]'",
    "--search": "try the batch, half and twice of it, every mesh, model.remat and "
    "train.accumulate by formula, compile the config as it is and the best --compiles of them "
    "(default 4), and print those that fit",
    "--shardings": "how each parameter is divided, without compiling; for TPUs libtpu is asked for "
    "their layout",
    "--json": "for machines",
}


@dataclass(frozen=True)
class Arguments:
    """What stands behind `famjax plan`: the config with its overrides, and flags."""

    config: str
    overrides: list[str]
    topology: str
    search: bool
    compiles: int
    shardings: bool
    json: bool


def run(argv: list[str]) -> int:
    """Plan, and return 1 if the job does not fit."""
    if "--help" in argv or "-h" in argv:
        print(_help())
        return 0
    a = read_arguments(argv)
    on = topology(a.topology)
    config = load_config(a.config, a.overrides)
    runtime.setup()
    from famjax.plan import plan as plans

    plans.refuse_missing(on)
    config = plans.with_size(config)
    # what is a little too large is planned: that is the question
    check_training_fits(
        config, DeviceMemory(int(1000 * on.count * on.chip.memory), f"a thousand {on.name} have")
    )
    if a.shardings:
        return _print_shardings(plans.ask(config, on, compile=False), on, a.json)
    if a.search:
        return _search(config, on, a)
    print(f"compiling {config.name} for {on.name}; minutes for a large model", file=sys.stderr)
    done = plans.plan(config, on)
    if a.json:
        print(json.dumps(done.to_dict(), indent=2))
    else:
        from famjax.cli.plan_output import show

        show(done)
    return 0 if done.fits else 1


def _search(config: Config, on: Topology, a: Arguments) -> int:
    from famjax.plan.search import named, search

    found = search(config, on, a.compiles, report=lambda line: print(line, file=sys.stderr))
    if a.json:
        plans = [p.to_dict() | {"overrides": named(config, p.config)} for p in found.best]
        print(json.dumps({"estimated": found.estimated, "plans": plans}, indent=2))
    else:
        from famjax.cli.plan_output import show_search

        show_search(config, found)
    return 0 if found.best else 1


def _print_shardings(seen: dict[str, Any], on: Topology, as_json: bool) -> int:
    if as_json:
        print(json.dumps(seen, indent=2))
    else:
        from famjax.cli.plan_output import show_shardings

        show_shardings(seen, on)
    return 0 if all(row["rule"] for row in seen["shardings"]) else 1


def read_arguments(argv: list[str]) -> Arguments:
    """Take our own flags out of the arguments; the rest is a config and its overrides."""
    given: dict[str, str] = {}
    rest, tokens = [], iter(argv)
    for token in tokens:
        flag, equals, value = token.partition("=")
        if flag in ("--topology", "--compiles"):
            given[flag] = value if equals else next(tokens, "")
        elif token in _FLAGS:
            given[token] = "yes"
        elif flag in _FLAGS:
            raise UserError(f"{flag} takes no value; write {flag} alone, or leave it out")
        elif flag.startswith("--") and "." not in flag:
            raise UserError(f"unknown option {flag}{nearest(flag, _FLAGS)}; see famjax plan --help")
        else:
            rest.append(token)
    if not rest or "=" in rest[0]:
        raise UserError(
            "plan needs a config first: famjax plan fam_1b --topology v5e:4x8 (known: "
            f"{', '.join(available())})"
        )
    if not given.get("--topology"):
        raise UserError(
            "plan needs a topology: --topology with one of "
            f"{', '.join(f'{c}:{example(CHIPS[c])}' for c in CHIPS)}"
        )
    if "--compiles" in given and "--search" not in given:
        raise UserError("--compiles goes with --search; give both, or leave it out")
    compiles = given.get("--compiles", "4")
    if not re.fullmatch(r"[1-9][0-9]{0,8}", compiles):
        raise UserError(f"--compiles {compiles}: must be a whole number of at least 1")
    return Arguments(
        rest[0],
        rest[1:],
        given["--topology"],
        "--search" in given,
        int(compiles),
        "--shardings" in given,
        "--json" in given,
    )


def _help() -> str:
    width = help_width()
    shapes = {name: ", ".join(chip.shapes) or "any number" for name, chip in CHIPS.items()}
    lines = [
        *usage(
            "usage: famjax plan CONFIG [section.key=value ...] --topology CHIP:SHAPE "
            "[--search [--compiles N]] [--shardings] [--json]",
            width,
        ),
        "",
        *wrap(
            "Says what a job needs and how long a step takes at least, before it runs: the "
            "training step is compiled for the topology, and nothing is allocated. Exits with 1 "
            "if it does not fit.",
            width,
        ),
        "",
        *listed(_OPTIONS, width),
        "",
        "shapes",
        *listed(shapes, width),
        "",
        *command("example: famjax plan fam_1b --topology v5e:4x8", width),
    ]
    return "\n".join(lines)
