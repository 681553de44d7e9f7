"""`famjax train --help [WORD]`: help on a group of keys, a key, a config, all, or an overview."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from famjax.cli.config_help import config_lines, docstring, is_config
from famjax.cli.layout import command, format_entries, help_width, usage, wrap
from famjax.config.keys import key_types, key_values
from famjax.config.schema import Config
from famjax.core.errors import UserError, did_you_mean
from famjax.experiment.load import available_configs

FLAGS = ("--help", "-h")
# name of the group of keys that are in no section
_TOP = "run"
# families of configs, by the first matching pattern
_FAMILIES = (
    ("start here", r"^(text_|passkey|finetune)"),
    ("TransformerFAM, paper sizes", r"^fam_"),
    ("T2R: linear attention", r"^t2r_"),
    ("Feedback Transformer, for two cores", r"_feedback$"),
    ("... paper sizes", r"_paper$"),
    ("others", r""),
)


def wants_help(argv: Sequence[str]) -> bool:
    return any(token.partition("=")[0] in FLAGS for token in argv)


def help_text(argv: Sequence[str]) -> str:
    """Return the help of the group, key or config after the flag, or the overview.

    Args:
      argv: the arguments, including one of `FLAGS`.

    Raises:
      UserError: there is no such group, key or config.
    """
    at = next(i for i, token in enumerate(argv) if token.partition("=")[0] in FLAGS)
    _, equals, group = argv[at].partition("=")
    group = group if equals else next(iter(argv[at + 1 :]), "")
    # `famjax train CONFIG --help --run there`
    return "\n".join(_help_lines("" if group.startswith("-") else group, help_width()))


def _help_lines(group: str, width: int) -> list[str]:
    if is_config(group):
        return config_lines(group, width)
    sections = {name: _section_lines(name, cls, width) for name, cls in _sections().items()}
    if not group:
        return _overview_lines(width)
    if group == "configs":
        return _config_lines(width)
    if group == "all":
        parts = [_overview_lines(width), _config_lines(width), *sections.values()]
        return [line for part in parts for line in (*part, "")][:-1]
    if group in sections:
        return sections[group]
    if (key := group.partition("=")[0]) in key_types():
        return _key_lines(key, width)
    known = ("configs", *sections, "all")
    near = did_you_mean(group, (*known, *key_types(), *available_configs()))
    raise UserError(
        f"--help {group}: no such group{near} (known: {', '.join(known)}; or a key, or a config)"
    )


def _overview_lines(width: int) -> list[str]:
    lines = [
        *usage("usage: famjax train CONFIG [section.key=value ...] [--run DIR]", width),
        "",
        *wrap(
            "Trains a model. Everything is written to the run folder, by default runs/NAME; the "
            "same command continues a stopped run.",
            width,
        ),
        "",
        *wrap(
            "Multi-process training is detected on TPU VMs, GKE, Slurm and Open MPI, or give "
            "--coordinator HOST:PORT --process-id I --process-count N to each process.",
            width,
        ),
        "",
        *command("example: famjax train text_fam data.files='books/*.txt' name=books", width),
        "",
        *wrap(
            "CONFIG is one of these names, the path of a Python file with a function config(), or "
            "the path of a run's config.json:",
            width,
        ),
    ]
    for family, names in _families().items():
        lines += wrap(f"{family}: {', '.join(names)}", width, "    ", "  ")
    lines += ["", *wrap("famjax train --help CONFIG shows what one of them is and sets.", width)]
    lines += ["", *wrap("Groups of keys; famjax train --help GROUP shows one:", width)]
    groups = {name: _first_sentence(cls) for name, cls in _sections().items()}
    lines += format_entries(
        {**groups, "configs": "what each config is", "all": "everything"}, width
    )
    return lines


def _families() -> dict[str, list[str]]:
    """Return the names of the configs by family."""
    families: dict[str, list[str]] = {family: [] for family, _ in _FAMILIES}
    for name in available_configs():
        family = next(family for family, pattern in _FAMILIES if re.search(pattern, name))
        families[family].append(name)
    return {family: names for family, names in families.items() if names}


def _config_lines(width: int) -> list[str]:
    return [
        "configs:",
        *format_entries({name: _title(path) for name, path in available_configs().items()}, width),
    ]


def _title(path: Path) -> str:
    """Return the first sentence of a config's docstring."""
    return re.split(r"(?<=\.)\s|\n\n", docstring(path))[0]


def _sections(cls: type = Config, name: str = "") -> dict[str, type]:
    """Return the sections of the schema in order, by names such as "model.feedback".

    The top level has the name `_TOP`.
    """
    sections = {name or _TOP: cls}
    for field, kind in get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            sections |= _sections(kind, f"{name}.{field}" if name else field)  # type: ignore[arg-type]
    return sections


def _section_lines(name: str, cls: type, width: int) -> list[str]:
    prefix = "" if name == _TOP else f"{name}."
    own = {f"{prefix}{field.name}" for field in dataclasses.fields(cls)} & key_types().keys()
    heading = f"{name}: {inspect.getdoc(cls)}"
    below = [other for other in _sections() if prefix and other.startswith(prefix)]
    lines = wrap(" ".join(heading.split()), width)
    lines += ["", *wrap("Keys, with their defaults before the config sets them:", width)]
    lines += format_entries(
        {k: v for k, v in _describe_keys().items() if k.partition("=")[0] in own}, width
    )
    if below:
        lines += ["", *wrap(f"More, each with --help: {', '.join(below)}", width)]
    return lines


def _key_lines(key: str, width: int) -> list[str]:
    return format_entries(
        {k: v for k, v in _describe_keys().items() if k.partition("=")[0] == key}, width
    )


def _describe_keys() -> dict[str, str]:
    """Return the description of each "key=default"."""
    defaults, comments = key_values(Config()), _comments(Config)
    descriptions = {}
    for key, kind in key_types().items():
        text = comments.get(key, "")
        if get_origin(kind) is Literal:
            text = f"{' | '.join(get_args(kind))}{'; ' if text else ''}{text}"
        default = str(defaults[key])
        descriptions[f"{key}={default.lower() if kind is bool else default}"] = text
    return descriptions


@functools.cache
def _source_lines(cls: Any) -> list[str]:
    """Return the stripped lines of a class; looking for them takes most of the time of a help."""
    return [line.strip() for line in inspect.getsource(cls).splitlines()]


def _comments(cls: Any, prefix: str = "") -> dict[str, str]:
    """Return the comment above each field of the schema, by key."""
    comments: dict[str, str] = {}
    pending: list[str] = []
    for line in _source_lines(cls):
        if line.startswith("#"):
            pending.append(line.lstrip("# "))
            continue
        if pending:
            comments[prefix + line.partition(":")[0]] = " ".join(pending)
        pending = []
    for name, kind in get_type_hints(cls).items():
        if inspect.isclass(kind) and hasattr(kind, "__dataclass_fields__"):
            comments |= _comments(kind, f"{prefix}{name}.")
    return comments


def _first_sentence(cls: type) -> str:
    """Return a docstring's first sentence, without citations."""
    first = " ".join((inspect.getdoc(cls) or "").split()).partition(". ")[0]
    return re.sub(r" \([^()]*\)|: docs/.*", "", first).split(";")[0].rstrip(".")
