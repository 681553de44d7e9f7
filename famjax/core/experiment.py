"""Experiments: configs by name or path, overrides, JSON, differences, and the check of every size.

A key is the full path of a field, "data.passkey.digits"; a config is a flat table of keys for
everything here but its construction. Every mistake is one `UserError` line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from famjax.core.config import Config, ModelConfig
from famjax.core.errors import UserError, nearest

# Mixers a pattern may name.
MIXERS = ("full", "swa", "bswa", "bswa_sg", "fam")

# The package of experiments, installed beside famjax; found by its place, since "configs" on
# the import path may be another project's.
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def load_config(name_or_path: str, overrides: Sequence[str] = ()) -> Config:
    """Return a validated config.

    Args:
      name_or_path: a name in `configs/`, the path of a Python file with a function `config()`, or
        the path of a run's `config.json`.
      overrides: "section.key=value", "--section.key=value", or "--section.key", "value".

    Raises:
      UserError: an unknown config or key, a value of the wrong type, or a size that cannot work.
    """
    config = override(_read(name_or_path), overrides)
    validate(config)
    return config


def available() -> dict[str, Path]:
    """Return the experiments of `configs/`, sorted by name."""
    return {p.stem: p for p in sorted(CONFIGS.glob("*.py")) if not p.stem.startswith("_")}


def keys(cls: type = Config, prefix: str = "") -> dict[str, Any]:
    """Return every key of the schema with its type, in the order of the schema."""
    found: dict[str, Any] = {}
    for name, kind in get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            found |= keys(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            found[prefix + name] = kind
    return found


def values(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return every key of a config with its value."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found |= values(value, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = value
    return found


def difference(a: Config, b: Config) -> list[str]:
    """Return a line "model.layers: 4 -> 6" for each key whose value differs."""
    old, new = values(a), values(b)
    return [f"{key}: {old[key]!r} -> {new[key]!r}" for key in old if old[key] != new[key]]


# Reading


def _read(name_or_path: str) -> Config:
    path = Path(name_or_path)
    if name_or_path in available():
        return _from_python(available()[name_or_path])
    if path.is_dir():
        raise UserError(f"{path} is a folder; give {path / 'config.json'} or a name in configs/")
    if path.suffix not in (".py", ".json") and not path.is_file():
        known = available()
        raise UserError(
            f"unknown config {name_or_path!r}{nearest(name_or_path, known)} "
            f"(known: {', '.join(known)}; or the path of a .py or config.json file)"
        )
    try:
        return _from_json_file(path) if path.suffix == ".json" else _from_python(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}; give a file that exists") from error


def _from_json_file(path: Path) -> Config:
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a text file; give a run's config.json") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _from_python(path: Path) -> Config:
    source = path.read_bytes()
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    try:
        # Not imported: an import would cache bytecode, stale when a file changes within a second.
        exec(compile(source, str(path), "exec"), module.__dict__)
        make = module.__dict__.get("config")
        config = make() if callable(make) else None
    except UserError:
        raise
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path}{_line(error, path)}: {said}") from error
    if not isinstance(config, Config):
        raise UserError(f"{path}: must define a function config() that returns a famjax Config")
    problem = next(_bad_types(config), None)
    if problem:
        raise UserError(f"{path}: {problem}")
    return config


def _line(error: Exception, path: Path) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f":{frames[-1].lineno}" if frames else ""


# Overrides


def override(config: Config, overrides: Sequence[str]) -> Config:
    """Return `config` with "section.key=value" overrides applied; checks no sizes."""
    for key, value in _pairs(overrides):
        config = _set(config, key, value)
    return config


def _pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    kinds, rest = keys(), list(overrides)
    while rest:
        token = rest.pop(0)
        name, equals, value = token.partition("=")
        flag = name.startswith("--")
        if not (equals or flag):
            raise UserError(f"{token!r} is not an override; write section.key=value")
        key = name.removeprefix("--").replace("-", "_")
        if key not in kinds:
            raise UserError(_unknown(key, kinds))
        if not equals:
            value = _following(key, kinds[key], rest)
        yield key, value


def _following(key: str, kind: Any, rest: list[str]) -> str:
    """Take the value that stands after "--section.key"; a bare flag means true."""
    given = bool(rest) and not rest[0].startswith("--")
    if kind is bool and not (given and rest[0].lower() in ("true", "false")):
        return "true"
    if not given:
        raise UserError(f"{key} needs a value; write {key}=value")
    return rest.pop(0)


def _set(config: Config, key: str, value: str) -> Config:
    import tyro  # not needed to read configs

    kind = keys()[key]
    text = value.capitalize() if kind is bool else value  # tyro reads True and False
    try:
        # tyro draws a box around some errors even when told to be silent.
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return tyro.cli(
                Config,
                default=config,
                args=[f"--{key}={text}"],
                config=(tyro.conf.FlagConversionOff,),
                console_outputs=False,
            )
    except SystemExit:
        raise UserError(_wrong(key, value, kind)) from None


def _unknown(key: str, known: dict[str, Any]) -> str:
    inside = [k for k in known if k.startswith(f"{key}.")]
    if inside:
        return f"{key!r} is a section, not a key; name one of its keys, such as {inside[0]!r}"
    ends = [k for k in known if k.endswith(f".{key}")]
    hint = f"; did you mean {ends[0]!r}?" if ends else nearest(key, known)
    return f"unknown key {key!r}{hint}"


def _wrong(key: str, value: Any, kind: Any) -> str:
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return f"{key}={value}: must be one of {', '.join(choices)}{nearest(str(value), choices)}"
    kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return f"{key}={value}: must be {kinds[kind]}"


# JSON


def to_json(config: Config) -> str:
    """Return the config as JSON, one key a line; `from_json` gives the same config back."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str, report: Callable[[str], None] | None = None) -> Config:
    """Return the config that `to_json` wrote.

    A key that is not there is younger than the text: it takes its default, which `report` (default:
    standard error) is told, so that runs of an older famjax can still be read.

    Raises:
      UserError: not JSON, an unknown key, or a value of the wrong type.
    """
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise UserError(f"not a config: {error}; give a config.json as famjax wrote it") from error
    missing: list[str] = []
    config = _build(Config, tree, "", missing)
    if missing:
        now = values(config)
        taken = ", ".join(f"{key}={now[key]}" if key in now else f"{key}.*" for key in missing)
        note = f"a saved config has no {taken}: the defaults are taken"
        (report or _to_stderr)(note)
    return config


def _to_stderr(line: str) -> None:
    print(f"famjax: {line}", file=sys.stderr)


def _build(cls: type, tree: Any, prefix: str, missing: list[str]) -> Any:
    hints = get_type_hints(cls)
    if not isinstance(tree, dict):
        raise UserError(f"{prefix[:-1] or 'config'}={tree!r}: must be a table of keys")
    for name in tree:
        if name not in hints:
            raise UserError(_unknown(prefix + name, keys()))
    parts: dict[str, Any] = {}
    for name, kind in hints.items():
        key = prefix + name
        if name not in tree:
            missing.append(key)
        elif dataclasses.is_dataclass(kind):
            parts[name] = _build(kind, tree[name], f"{key}.", missing)  # type: ignore[arg-type]
        elif not _fits(tree[name], kind):
            raise UserError(_wrong(key, tree[name], kind))
        else:
            parts[name] = float(tree[name]) if kind is float else tree[name]
    return cls(**parts)


def _fits(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind


# Checks. Each yields lines naming key, value and the mend; the first one is raised, and the later
# checks rely on the earlier ones.

_LOWEST: dict[str, float] = {
    "seed": 0,
    "model.vocab_size": 0,
    "model.layers": 1,
    "model.width": 1,
    "model.heads": 1,
    "model.kv_heads": 0,
    "model.head_dim": 0,
    "model.mlp_width": 0,
    "model.block_len": 1,
    "model.memory_segments": 0,
    "model.window": 1,
    "model.capacity": 1,
    "model.fam_len": 1,
    "model.fam_previous": 1,
    "model.arch.query_scale": 0,
    "model.arch.embed_scale": 0,
    "model.arch.rope_length": 1,
    "data.batch": 1,
    "data.length": 1,
    "data.holdout": 0,
    "data.repeat_len": 0,
    "data.repeat_weight": 0,
    "data.passkey.digits": 1,
    "data.passkey.min_length": 1,
    "data.passkey.max_length": 1,
    "data.passkey.start_length": 1,
    "data.passkey.multiple": 1,
    "data.passkey.ask_every": 0,
    "data.passkey.other_weight": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.weight_decay": 0,
    "optimizer.clip_norm": 0,
    "train.steps": 1,
    "train.accumulate": 1,
    "train.bptt_segments": 1,
    "train.rsp_ramp": 0,
    "train.log_every": 1,
    "train.checkpoint_every": 1,
    "train.keep": 1,
}
_POSITIVE = (
    "model.rope_base",
    "model.arch.norm_eps",
    "model.arch.rope_factor",
    "model.arch.rope_low",
    "model.arch.rope_high",
    "optimizer.learning_rate",
)
_FRACTIONS = (
    "data.passkey.threshold",
    "optimizer.decay_fraction",
    "optimizer.final_fraction",
    "train.rsp",
)
_DECAYS = ("optimizer.beta1", "optimizer.beta2")
_AXES = ("mesh.data", "mesh.fsdp", "mesh.tensor")


def validate(config: Config) -> None:
    """Raise a `UserError` for the first value of the config that cannot work."""
    checks = (_bad_types, _bad_ranges, _bad_model, _bad_mixers, _bad_data, _bad_train, _bad_mesh)
    for check in checks:
        problem = next(check(config), None)
        if problem:
            raise UserError(problem)


def _bad_types(config: Config) -> Iterator[str]:
    given = values(config)
    for key, kind in keys().items():
        if key not in given:
            yield f"{key} is missing: its section is of another class"
        elif not _fits(given[key], kind):
            yield _wrong(key, repr(given[key]), kind)


def _bad_ranges(config: Config) -> Iterator[str]:
    given = values(config)
    for key, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{key}={value}: must be a finite number"
    for key, lowest in _LOWEST.items():
        if given[key] < lowest:
            yield f"{key}={given[key]}: must be at least {lowest}"
    for key in _POSITIVE:
        if given[key] <= 0:
            yield f"{key}={given[key]}: must be greater than 0"
    for key in _FRACTIONS:
        if not 0 <= given[key] <= 1:
            yield f"{key}={given[key]}: must be from 0 to 1"
    for key in _DECAYS:
        if not 0 <= given[key] < 1:
            yield f"{key}={given[key]}: must be at least 0 and less than 1"
    if config.seed >= 2**32:
        yield f"seed={config.seed}: must be less than {2**32}"
    if not config.name or config.name in (".", "..") or set(config.name) & set("/\\\0"):
        yield f"name={config.name!r}: names the run's folder; give a name without slashes"


def _bad_model(config: Config) -> Iterator[str]:
    m = config.model
    if not m.head_dim and m.width % m.heads:
        yield (
            f"model.width={m.width} is not a multiple of model.heads={m.heads}; "
            f"take {_multiples(m.width, m.heads)}, or set model.head_dim"
        )
    head_dim, key = m.head_dim or m.width // m.heads, "model.head_dim"
    if head_dim % 2:
        source = "" if m.head_dim else " (model.width / model.heads)"
        yield f"{key}={head_dim}{source} is odd; rotary positions turn pairs, take an even number"
    rotated = head_dim * m.arch.rotary_fraction
    if not 0 < rotated <= head_dim or rotated % 2:
        yield (
            f"model.arch.rotary_fraction={m.arch.rotary_fraction}: must leave an even number of "
            f"the {head_dim} elements of a head, at least 2"
        )
    if m.arch.rope_low >= m.arch.rope_high:
        yield (
            f"model.arch.rope_low={m.arch.rope_low} is not below "
            f"model.arch.rope_high={m.arch.rope_high}; Llama 3 has 1 and 4"
        )
    if m.kv_heads and m.heads % m.kv_heads:
        yield (
            f"model.kv_heads={m.kv_heads} does not divide model.heads={m.heads}; "
            f"take one of {_divisors(m.heads)}"
        )


def _bad_mixers(config: Config) -> Iterator[str]:
    m = config.model
    pattern = mixer_pattern(m)
    for name in pattern:
        if name not in MIXERS:
            yield (
                f"model.mixer={m.mixer!r}: unknown mixer {name!r}{nearest(name, MIXERS)} "
                f"(known: {', '.join(MIXERS)})"
            )
    if m.layers % len(pattern):
        yield (
            f"model.layers={m.layers} is not a multiple of the {len(pattern)} mixers of "
            f"model.mixer={m.mixer!r}; take {_multiples(m.layers, len(pattern))}"
        )
    if "swa" in pattern and m.window > m.block_len:
        yield (
            f"model.window={m.window} is longer than model.block_len={m.block_len}; "
            f"take a window of at most {m.block_len}, or longer blocks"
        )
    if "full" in pattern and config.data.length > m.capacity:
        yield (
            f"data.length={config.data.length} is longer than model.capacity={m.capacity}, all "
            f"that full attention holds; set model.capacity={config.data.length}"
        )


def _bad_data(config: Config) -> Iterator[str]:
    d, p = config.data, config.data.passkey
    sources = [f"data.{k}={v!r}" for k in ("files", "seqio", "tfds") if (v := getattr(d, k))]
    if len(sources) > 1:
        yield f"{' and '.join(sources)}: documents come from one source; keep one of them"
    if not d.tokenizer:
        yield (
            "data.tokenizer='': give 'bytes', the path of a SentencePiece model or of a "
            "tokenizer.json, or a folder with either"
        )
    if d.holdout == 1:
        yield "data.holdout=1 keeps every document from training; take 0 or at least 2"
    if d.layout == "lanes" and d.repeat_len:
        yield (
            f"data.repeat_len={d.repeat_len} is for packed rows; "
            "set data.layout=packed or data.repeat_len=0"
        )
    if 2 * d.repeat_len >= d.length:
        yield (
            f"data.repeat_len={d.repeat_len} must be less than half of data.length={d.length}; "
            "take longer rows or repeat less"
        )
    if p.min_length > p.max_length:
        yield (
            f"data.passkey.min_length={p.min_length} is more than "
            f"data.passkey.max_length={p.max_length}; exchange them"
        )
    lengths = ("min_length", "start_length", "max_length")
    sizes = [getattr(p, name) for name in lengths]
    if sizes != sorted(sizes):
        given = ", ".join(f"{n}={s}" for n, s in zip(lengths, sizes, strict=True))
        yield f"data.passkey: {given} must not fall in this order"
    if p.ask_every:
        yield from _bad_asking(config)


def _bad_asking(config: Config) -> Iterator[str]:
    """Yield what keeps a document from beginning with the FAM before the last one's question."""
    m, d, p = config.model, config.data, config.data.passkey
    asked = f"data.passkey.ask_every={p.ask_every}"
    off = "or set data.passkey.ask_every=0"
    for name, size in (("ask_every", p.ask_every), ("multiple", p.multiple)):
        if size % m.block_len:
            yield (
                f"data.passkey.{name}={size} is not a multiple of model.block_len={m.block_len}, "
                f"so the memory would see the answers; take {_multiples(size, m.block_len)} {off}"
            )
    if d.layout == "packed":
        yield f"{asked} needs memory that packed rows do not carry; set data.layout=lanes {off}"
    if "fam" not in m.mixer.split(","):
        yield f"{asked} needs a FAM, which model.mixer={m.mixer} has not; add one {off}"
    if m.memory_segments or m.fam_previous > 1:
        yield (
            f"{asked} carries one FAM and nothing else; set model.memory_segments=0 and "
            f"model.fam_previous=1 {off}"
        )


def _bad_train(config: Config) -> Iterator[str]:
    m, d, t = config.model, config.data, config.train
    if d.length % m.block_len:
        yield (
            f"data.length={d.length} is not a multiple of model.block_len={m.block_len}; "
            f"take {_multiples(d.length, m.block_len)}"
        )
    if d.length % (t.bptt_segments * m.block_len):
        yield (
            f"train.bptt_segments={t.bptt_segments} does not divide the {d.length // m.block_len} "
            f"blocks of data.length={d.length}; take one of {_divisors(d.length // m.block_len)}"
        )
    if d.batch % t.accumulate:
        yield (
            f"train.accumulate={t.accumulate} does not divide data.batch={d.batch}; "
            f"take one of {_divisors(d.batch)}"
        )
    if t.rsp and d.layout == "lanes":
        yield (
            f"train.rsp={t.rsp} is for packed rows, lanes always carry their memory; "
            "set data.layout=packed or train.rsp=0"
        )


def _bad_mesh(config: Config) -> Iterator[str]:
    given = {key: values(config)[key] for key in _AXES}
    for key, size in given.items():
        if size < 1 and size != -1:
            yield f"{key}={size}: must be at least 1, or -1 for what the other axes leave"
    if list(given.values()).count(-1) > 1:
        named = " and ".join(key for key, size in given.items() if size == -1)
        yield f"{named} are -1; only one axis can take what the others leave, give the other a size"


def mixer_pattern(model: ModelConfig) -> tuple[str, ...]:
    """Return the names of `model.mixer`, the pattern that is repeated up the stack."""
    return tuple(model.mixer.split(","))


def _multiples(value: int, of: int) -> str:
    below = value // of * of
    return f"{below} or {below + of}" if below else f"{of}"


def _divisors(value: int) -> str:
    small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
    return ", ".join(str(n) for n in sorted({*small, *(value // n for n in small)}))
