"""`famjax plan CONFIG [section.key=value ...] --topology v5e:4x8 [--search] [--shardings]`."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from typing import Any

from famjax.cli.layout import command, format_entries, help_width, usage, wrap
from famjax.config.schema import Config
from famjax.core.errors import EXIT_FAILED, UserError, did_you_mean
from famjax.experiment.load import available_configs, load_config
from famjax.experiment.memory import DeviceMemory, check_training_fits
from famjax.plan.chips import CHIPS, Topology, example_shape, parse_topology
from famjax.processes import runtime

_FLAGS = ("--topology", "--search", "--compiles", "--shardings", "--json", "--help")
_OPTIONS = {
    "--topology": "chips to plan for; TPUs need libtpu but no TPU: pip install -e '.[tpu]'",
    "--search": "estimate every mesh, model.remat and train.accumulate with the config's batch "
    "size, half and twice that; compile the config as given and the best --compiles candidates "
    "(default 4), and print those that fit",
    "--shardings": "print the sharding of each parameter, without compiling; for TPUs needs libtpu",
    "--json": "print JSON",
}


@dataclass(frozen=True)
class Arguments:
    """The arguments of `famjax plan`: the config with its overrides, and flags."""

    config: str
    overrides: list[str]
    topology: str
    search: bool
    compiles: int
    shardings: bool
    json: bool


def run(argv: list[str]) -> int:
    """Plan, and return `EXIT_FAILED` if the job does not fit."""
    if "--help" in argv or "-h" in argv:
        print(_help())
        return 0
    a = parse_arguments(argv)
    if a.shardings and a.search:
        raise UserError("--shardings is of one mesh, and --search tries many; give one of them")
    topology = parse_topology(a.topology)
    config = load_config(a.config, a.overrides)
    runtime.setup()
    from famjax.plan import plan as plans

    plans.check_compiler(topology)
    config = plans.fill_vocab_size(config)
    # jobs that are somewhat too large are still planned
    check_training_fits(
        config,
        DeviceMemory(
            int(1000 * topology.count * topology.chip.memory),
            f"a thousand {topology.name} have",
            topology.is_gpu,
        ),
    )
    if a.shardings:
        return _print_shardings(plans.run_worker(config, topology, compile=False), topology, a.json)
    if a.search:
        return _run_search(config, topology, a)
    print(
        f"compiling {config.name} for {topology.name}; minutes for a large model", file=sys.stderr
    )
    done = plans.plan(config, topology)
    if a.json:
        print(json.dumps(done.to_dict(), indent=2))
    else:
        from famjax.cli.plan_output import show

        show(done)
    return 0 if done.fits else EXIT_FAILED


def _run_search(config: Config, topology: Topology, a: Arguments) -> int:
    from famjax.plan.search import format_overrides, search

    result = search(config, topology, a.compiles, report=lambda line: print(line, file=sys.stderr))
    if a.json:
        plans = [
            p.to_dict() | {"overrides": format_overrides(config, p.config)} for p in result.best
        ]
        print(json.dumps({"estimated": result.estimated, "plans": plans}, indent=2))
    else:
        from famjax.cli.plan_output import show_search

        show_search(config, result)
    return 0 if result.best else EXIT_FAILED


def _print_shardings(report: dict[str, Any], topology: Topology, as_json: bool) -> int:
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        from famjax.cli.plan_output import show_shardings

        show_shardings(report, topology)
    return 0 if all(row["rule"] for row in report["shardings"]) else EXIT_FAILED


def parse_arguments(argv: list[str]) -> Arguments:
    """Parse flags, the config and its overrides."""
    flags: dict[str, str] = {}
    rest, tokens = [], iter(argv)
    for token in tokens:
        flag, equals, value = token.partition("=")
        if flag in ("--topology", "--compiles"):
            flags[flag] = value if equals else next(tokens, "")
        elif token in _FLAGS:
            flags[token] = "yes"
        elif flag in _FLAGS:
            raise UserError(f"{flag} takes no value; write {flag} alone, or leave it out")
        elif flag.startswith("--") and "." not in flag:
            raise UserError(
                f"unknown option {flag}{did_you_mean(flag, _FLAGS)}; see famjax plan --help"
            )
        else:
            rest.append(token)
    if not rest or "=" in rest[0]:
        raise UserError(
            "plan needs a config first: famjax plan fam_1b --topology v5e:4x8 (known: "
            f"{', '.join(available_configs())})"
        )
    if not flags.get("--topology"):
        raise UserError(
            "plan needs a topology: --topology with one of "
            f"{', '.join(f'{c}:{example_shape(CHIPS[c])}' for c in CHIPS)}"
        )
    if "--compiles" in flags and "--search" not in flags:
        raise UserError("--compiles needs --search; give both, or remove it")
    compiles = flags.get("--compiles", "4")
    if not re.fullmatch(r"[1-9][0-9]{0,8}", compiles):
        raise UserError(f"--compiles {compiles}: must be a whole number of at least 1")
    return Arguments(
        rest[0],
        rest[1:],
        flags["--topology"],
        "--search" in flags,
        int(compiles),
        "--shardings" in flags,
        "--json" in flags,
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
            "Prints the memory of a job and the least time of a step before it runs: the training "
            "step is compiled for the topology, and nothing is allocated. Exits with 1 if it does "
            "not fit.",
            width,
        ),
        "",
        *format_entries(_OPTIONS, width),
        "",
        "shapes",
        *format_entries(shapes, width),
        "",
        *command("example: famjax plan fam_1b --topology v5e:4x8", width),
    ]
    return "\n".join(lines)
