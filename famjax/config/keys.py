"""Config keys: the dotted paths of fields, such as "data.passkey.digits", with types and values."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from famjax.config.schema import Config
from famjax.core.errors import UserError, did_you_mean
from famjax.core.json_files import shorten


def key_types() -> dict[str, Any]:
    """Return every key of the schema with its type, in the order of the schema."""
    return dict(_keys())


@functools.cache
def _keys(cls: type = Config, prefix: str = "") -> dict[str, Any]:
    types: dict[str, Any] = {}
    for name, kind in get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            types |= _keys(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            types[prefix + name] = kind
    return types


def key_values(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return every key of a config with its value."""
    result: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            result |= key_values(value, f"{prefix}{field.name}.")
        else:
            result[prefix + field.name] = value
    return result


def replace_values(config: Config, new: Mapping[str, Any]) -> Config:
    """Return a config with new values for some keys, like `dataclasses.replace` with full paths.

        replace_values(load_config("text_fam"), {"name": "deep", "model.layers": 8})

    Raises:
      UserError: a key is unknown, or a value has the wrong type.
    """
    kinds = key_types()
    for key, value in new.items():
        if key not in kinds:
            raise UserError(unknown_key_message(key, kinds))
        if not has_type(value, kinds[key]):
            raise UserError(type_error_message(key, repr(value), kinds[key]))
        config = replace_value(config, key, float(value) if kinds[key] is float else value)
    return config


def replace_value(config: Any, key: str, value: Any) -> Any:
    """Return a config, or a section of one, with a new value for a key, which is not checked."""
    name, _, rest = key.partition(".")
    if rest:
        value = replace_value(getattr(config, name), rest, value)
    return dataclasses.replace(config, **{name: value})


def has_type(value: Any, kind: Any) -> bool:
    """Return whether a value has a field's type."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is float:
        # an int can exceed the largest float
        return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)
    return type(value) is kind


def type_error_message(key: str, value: Any, kind: Any) -> str:
    """Return the error message for a value that does not have its field's type."""
    value = shorten(value)
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return f"{key}={value}: must be one of {', '.join(choices)}{did_you_mean(value, choices)}"
    kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    return f"{key}={value}: must be {kinds[kind]}"


def unknown_key_message(key: str, known: Collection[str]) -> str:
    """Return the error message for a key that is not in the schema."""
    inside = [k for k in known if k.startswith(f"{key}.")]
    if inside:
        return f"{key!r} is a section, not a key; name one of its keys, such as {inside[0]!r}"
    ends = [k for k in known if k.endswith(f".{key}")]
    hint = f"; did you mean {ends[0]!r}?" if ends else did_you_mean(key, known)
    return f"unknown key {key!r}{hint}"


def check_types(config: Config) -> Iterator[str]:
    """Yield an error line for each value that does not have its key's type."""
    current = key_values(config)
    for key, kind in key_types().items():
        if key not in current:
            yield f"{key} is missing: its section is of another class"
        elif not has_type(current[key], kind):
            yield type_error_message(key, repr(current[key]), kind)
