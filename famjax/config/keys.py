"""Config keys: each field's dotted path, such as "data.passkey.digits", its type and its value."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Literal, get_args, get_origin, get_type_hints

from famjax.config.schema import Config
from famjax.core.errors import nearest
from famjax.core.json_files import shorten


def keys(cls: type = Config, prefix: str = "") -> dict[str, Any]:
    """Return every key of the schema with its type, in the order of the schema."""
    types: dict[str, Any] = {}
    for name, kind in get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind):
            types |= keys(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            types[prefix + name] = kind
    return types


def values(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return every key of a config with its value."""
    result: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            result |= values(value, f"{prefix}{field.name}.")
        else:
            result[prefix + field.name] = value
    return result


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
        return f"{key}={value}: must be one of {', '.join(choices)}{nearest(value, choices)}"
    kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return f"{key}={value}: must be {kinds[kind]}"
