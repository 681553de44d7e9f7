"""Experiments: load configs by name or path, apply overrides, read and write JSON, compare.

A key is the full path of a field, such as "data.passkey.digits". Every mistake is a one-line
`UserError`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from famjax.config.keys import (
    check_types,
    has_type,
    key_types,
    key_values,
    replace_values,
    type_error_message,
    unknown_key_message,
)
from famjax.config.older import rename_arch_keys
from famjax.config.schema import AXES, ArchConfig, Config, ModelConfig
from famjax.core.errors import UserError, did_you_mean, did_you_mean_path
from famjax.core.json_files import parse_json, read_json, read_whole, shorten
from famjax.core.paths import expanded
from famjax.experiment.hints import find_hint

# The package of experiments, which is installed beside famjax. It is located by path, since
# "configs" on the import path may belong to another project.
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# settings of FAM's gated update
_GATES = ("fam_min_timescale", "fam_max_timescale", "fam_gate_threshold")

# what to do with a Hugging Face folder; without --to it has full attention, and no memory
_CONVERT = "convert it: famjax convert {} DEST --to delta model.block_len=512"
# Keys that say how a model is computed or trained. With `init` they are those of the new run's
# config, all other keys of the model are those of the folder.
TRAINING_KEYS = (
    "model.dropout.",
    "model.feedback.sweeps",
    "model.feedback.tolerance",
    "model.scan_layers",
    "model.remat",
    "model.dtype",
    "model.lora.",
)


def load_config(name_or_path: str, overrides: Sequence[str] = ()) -> Config:
    """Return a validated config.

    Args:
      name_or_path: a name in `configs/`, the path of a Python file with a function `config()`, or
        the path of a run's `config.json`. A name that begins with an underscore is a base that
        experiments derive from (`famjax.replace_values`).
      overrides: "section.key=value", "--section.key=value", or "--section.key", "value".
        "init=FOLDER" takes shape and tokenizer from that folder before the other overrides are
        applied. Mixers that the folder's model lacks get the settings of `famjax convert`, except
        for keys that are given.

    Raises:
      UserError: an unknown config or key, a value of the wrong type, or a size that cannot work.
    """
    started = _apply_init(read_config(name_or_path), overrides)
    config = override(started, overrides)
    if config.init:
        # the run may be opened from any working directory
        config = replace(config, init=str(expanded(config.init).absolute()))
    # imported late, since they import JAX: the error for a mistyped key need not wait for that
    from famjax.experiment.checks import validate
    from famjax.experiment.unused_keys import check_unused_keys

    given = [key for key, _ in _parse_overrides(overrides)]
    if config.init:
        config = _apply_convert_settings(config, started.model, given)
    config = _without_unused_parts(config, given)
    validate(config)
    check_unused_keys(config, given)
    return config


def _apply_init(config: Config, overrides: Sequence[str]) -> Config:
    """Return the config with the model and the tokenizer of the folder `init`, if `init` is given.

    `TRAINING_KEYS` are kept from `config`. In a run's own config.json model and tokenizer are
    already those of the folder.
    """
    inits = [value for key, value in _parse_overrides(overrides) if key == "init"]
    init = inits[-1] if inits else config.init
    if not init or (not inits and config.model.vocab_size):
        return config
    folder = expanded(init).absolute()
    if not folder.exists():
        raise UserError(
            f"init={init}: there is no such folder{did_you_mean_path(str(expanded(init)))}"
        )
    if not (folder / "config.json").is_file():
        raise UserError(
            f"init={init}: has no config.json; give the folder of a run or of a converted model"
        )
    init_config = _load_json(folder / "config.json")
    _check_task_words(init, init_config, override(config, overrides))
    own = {key: value for key, value in key_values(config).items() if key.startswith(TRAINING_KEYS)}
    model = replace_values(replace(config, model=init_config.model), own).model
    names = ("tokenizer", "tokenizer.model", "words.txt")
    # beside a run whose tokens are bytes there may be files of the user's
    files = [] if init_config.data.tokenizer == "bytes" else [folder / name for name in names]
    copy = next((str(file) for file in files if file.exists()), None)
    if copy is None and init_config.data.tokenizer not in ("bytes", "task"):
        # the path in the folder's config.json may be from another machine, so it is not opened
        raise UserError(
            f"init={init}: its copy of the tokenizer {init_config.data.tokenizer} is missing; "
            f"restore {', '.join(names[:-1])} or {names[-1]}, whichever it had"
        )
    tokenizer = init_config.data.tokenizer if copy is None else copy
    data = replace(config.data, tokenizer=tokenizer)
    return replace(config, init=init, model=model, data=data)


def _apply_convert_settings(config: Config, old: ModelConfig, given: Sequence[str]) -> Config:
    """Return the config with `MixerSpec.convert_settings` of mixers that the model `old` lacks.

    Args:
      given: keys that are not changed.
    """
    # imported late, as in `load_config`
    from famjax.mixers import convert_settings

    settings = convert_settings(old, config.model).items()
    changes = {f"model.{field}": value for field, value in settings}
    return replace_values(config, {k: v for k, v in changes.items() if k not in given})


def _without_unused_parts(config: Config, given: Sequence[str]) -> Config:
    """Return the config without the parts and settings of other mixers and stacks.

    The config file may set them for its own mixer and stack, and the given ones be others. A model
    that is converted later would otherwise get parts that it was not trained with.

    Args:
      given: keys that are not changed.
    """
    # imported late, as in `load_config`
    from famjax.mixers import mixer_specs

    model, default = config.model, ModelConfig()
    specs = mixer_specs(model)
    unused: dict[str, Any] = {}
    if not any(spec.smears_keys for spec in specs):
        unused["model.smeared_keys"] = False
    if model.stack != "residual":
        unused["model.short_conv"] = 0
    if not any(spec.has_write_gates(model) for spec in specs):
        unused["train.write_loss"] = 0.0
    has_fam = any("model.fam_update" in spec.keys for spec in specs)
    if not (has_fam and model.fam_update == "gated"):
        for name in _GATES:
            unused[f"model.{name}"] = getattr(default, name)
    return replace_values(config, {k: v for k, v in unused.items() if k not in given})


def _check_task_words(init: str, init_config: Config, config: Config) -> None:
    """Raise a `UserError` if `init` has the vocabulary of another toy task."""
    if init_config.data.tokenizer == "task" and init_config.data.task != config.data.task:
        raise UserError(
            f"init={init}: its vocabulary is that of data.task={init_config.data.task}, not of "
            f"data.task={config.data.task}; start from a model of the same task"
        )


def available_configs() -> dict[str, Path]:
    """Return the experiments of `configs/`, sorted by name."""
    return {p.stem: p for p in sorted(CONFIGS.glob("*.py")) if not p.stem.startswith("_")}


def _bases() -> set[str]:
    """Return the names of the files in `configs/` from which experiments derive."""
    return {p.stem for p in CONFIGS.glob("_[!_]*.py")}


def difference(a: Config, b: Config) -> list[str]:
    """Return a line "model.layers: 4 -> 6" for each key whose value differs."""
    old, new = key_values(a), key_values(b)
    return [f"{key}: {old[key]!r} -> {new[key]!r}" for key in old if old[key] != new[key]]


# Reading


def read_config(name_or_path: str) -> Config:
    """Return a config as it is written, without checking its sizes.

    Raises:
      UserError: there is no such config, or it is damaged.
    """
    path = Path(name_or_path)
    if name_or_path in available_configs() or name_or_path in _bases():
        return _load_python(CONFIGS / f"{name_or_path}.py")
    if path.is_dir():
        raise UserError(_describe_folder(path))
    if path.suffix not in (".py", ".json") and not path.is_file():
        known = available_configs()
        raise UserError(
            f"unknown config {name_or_path!r}{did_you_mean(name_or_path, known)} "
            f"(known: {', '.join(known)}; or the path of a .py or config.json file)"
        )
    try:
        return _load_json(path) if path.suffix == ".json" else _load_python(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; give a file that exists") from error


def _describe_folder(folder: Path) -> str:
    """Return the error message for a folder in place of a config."""
    path = folder / "config.json"
    try:
        there = read_json(path, "")
    except (OSError, UserError):
        return f"{folder} is a folder; give a name in configs/, or a .py or config.json file"
    if isinstance(there, dict) and "model_type" in there:
        return f"{folder} is a Hugging Face model, not a config; {_CONVERT.format(folder)}"
    again = "" if is_untrained(path) else f"; to train as it was: famjax train {path}"
    return f"{folder} is a run, not a config; {_start_from(folder)}{again}"


def _start_from(folder: Path) -> str:
    return f"to start from its weights: famjax train finetune init={folder}"


def is_untrained(path: Path) -> bool:
    """Return whether a config.json is that of a converted model, a run at step 0."""
    steps = [entry.name for entry in (path.parent / "checkpoints").glob("*")]
    return path.name == "config.json" and steps == ["000000000"]


def check_starts_from_weights(name_or_path: str, config: Config) -> None:
    """Raise a `UserError` if training would ignore the weights beside the config that is given."""
    path = Path(name_or_path)
    if not config.init and is_untrained(path):
        raise UserError(
            f"{path}: is of a converted model, whose weights would not be used; "
            f"{_start_from(path.parent)}; to train from random weights, copy the file elsewhere"
        )


def _load_json(path: Path) -> Config:
    content = read_whole(path, "give a run's config.json")
    try:
        return from_json(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file; give a run's config.json") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _load_python(path: Path) -> Config:
    source = read_whole(path, "give a file with a function config()")
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    try:
        # Not imported, since cached bytecode would be stale if the file changes within a second.
        exec(compile(source, str(path), "exec"), module.__dict__)
        make = module.__dict__.get("config")
        config = make() if callable(make) else None
    except UserError as error:
        if str(path) in str(error):
            raise
        raise UserError(f"{path}{_line_number(error, path)}: {error}") from error
    except ModuleNotFoundError as error:
        # until 0.1.0 the schema was in this module
        hint = "; import famjax.config.schema" if error.name == "famjax.core.config" else ""
        raise UserError(f"{path}{_line_number(error, path)}: {error}{hint}") from error
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path}{_line_number(error, path)}: {message}") from error
    if not isinstance(config, Config):
        raise UserError(f"{path}: must define a function config() that returns a famjax Config")
    problem = next(check_types(config), None)
    if problem:
        raise UserError(f"{path}: {problem}")
    return config


def _line_number(error: Exception, path: Path) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f":{frames[-1].lineno}" if frames else ""


# Overrides


def override(config: Config, overrides: Sequence[str]) -> Config:
    """Return `config` with "section.key=value" overrides applied, without checking sizes."""
    for key, value in _parse_overrides(overrides):
        config = _set(config, key, value)
    return config


def _parse_overrides(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    kinds, rest = key_types(), list(overrides)
    while rest:
        token = rest.pop(0)
        name, equals, value = token.partition("=")
        flag = name.startswith("--")
        if not (equals or flag):
            how = find_hint(token) or "; write section.key=value"
            raise UserError(f"{token!r} is not an override{how}")
        key = name.removeprefix("--").replace("-", "_")
        if key == "mesh":
            value = value if equals else _take_value(key, str, rest)
            if value != "auto":
                raise UserError(
                    f"mesh={value}: must be auto, or give the sizes, such as mesh.data=8"
                )
            yield from ((f"mesh.{axis}", "-1") for axis in AXES)
            continue
        if key not in kinds:
            is_section = any(known.startswith(f"{key}.") for known in kinds)
            argument = value or (rest[0] if flag and rest and not rest[0].startswith("-") else "")
            if (flag or not is_section) and (how := find_hint(key, argument)):
                raise UserError(f"unknown {f'option {name}' if flag else f'key {key!r}'}{how}")
            raise UserError(unknown_key_message(key, kinds))
        if not equals:
            value = _take_value(key, kinds[key], rest)
        yield key, value


def _take_value(key: str, kind: Any, rest: list[str]) -> str:
    """Take the value that follows "--section.key"; a bare flag means true."""
    has_value = bool(rest) and not rest[0].startswith("--")
    if kind is bool and not (has_value and rest[0].lower() in ("true", "false")):
        return "true"
    if not has_value:
        raise UserError(f"{key} needs a value; write {key}=value")
    return rest.pop(0)


def _set(config: Config, key: str, value: str) -> Config:
    return replace_values(config, {key: _parse_value(key, value, key_types()[key])})


def _parse_value(key: str, value: str, kind: Any) -> Any:
    import tyro  # not needed to read configs

    text = value.capitalize() if kind is bool else value  # tyro reads True and False
    # A class of one field, since building the parser of the whole schema for every key takes 50
    # times as long.
    field = dataclasses.make_dataclass("Field", [("value", kind)])
    try:
        # tyro prints a box around some errors even with console_outputs=False.
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return tyro.cli(
                field,
                args=[f"--value={text}"],
                config=(tyro.conf.FlagConversionOff,),
                console_outputs=False,
            ).value
    except SystemExit:
        raise UserError(type_error_message(key, value, kind)) from None


# JSON


def to_json(config: Config) -> str:
    """Return the config as JSON, one key per line, from which `from_json` restores it."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str, report: Callable[[str], None] | None = None) -> Config:
    """Return the config that `to_json` wrote.

    If a key is missing, it was added to the schema after the config was saved. So that runs of
    older versions still load, it takes its default, and `report` (default: print to standard error)
    is called with a note.

    Raises:
      UserError: the text is not JSON, or has an unknown key or a value of the wrong type.
    """
    try:
        tree = parse_json(text, unique=True)
    except ValueError as error:
        raise UserError(f"not a config: {error}; give a config.json as famjax wrote it") from error
    if isinstance(tree, dict) and "architectures" in tree:
        raise UserError(f"is a Hugging Face model's config.json; {_CONVERT.format('HF_FOLDER')}")
    missing: list[str] = []
    config = _build(Config, tree, "", missing)
    if missing:
        now = key_values(config)
        taken = ", ".join(f"{key}={now[key]}" if key in now else f"{key}.*" for key in missing)
        note = f"a saved config has no {taken}: using the defaults"
        (report or _print_note)(note)
    return config


def _print_note(line: str) -> None:
    print(f"famjax: {line}", file=sys.stderr)


def _build(cls: type, tree: Any, prefix: str, missing: list[str]) -> Any:
    hints = get_type_hints(cls)
    if not isinstance(tree, dict):
        raise UserError(f"{prefix[:-1] or 'config'}={shorten(tree)}: must be a table of keys")
    if cls is ArchConfig:
        tree = rename_arch_keys(tree)
    for name in tree:
        if name not in hints:
            raise UserError(unknown_key_message(prefix + name, key_types()))
    parts: dict[str, Any] = {}
    for name, kind in hints.items():
        key = prefix + name
        if name not in tree:
            missing.append(key)
        elif dataclasses.is_dataclass(kind):
            parts[name] = _build(kind, tree[name], f"{key}.", missing)  # type: ignore[arg-type]
        elif not has_type(tree[name], kind):
            raise UserError(type_error_message(key, tree[name], kind))
        else:
            parts[name] = float(tree[name]) if kind is float else tree[name]
    return cls(**parts)
