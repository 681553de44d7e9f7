"""The keys of the schema: each field's full path, "data.passkey.digits", its type and its value."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Literal, get_args, get_origin, get_type_hints

from famjax.core.config import Config
from famjax.core.errors import nearest
from famjax.core.json_files import shorten


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


def fits(value: Any, kind: Any) -> bool:
    """Return whether a value is of a field's type."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is float:
        # a whole number may be beyond all floats
        return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)
    return type(value) is kind


def wrong(key: str, value: Any, kind: Any) -> str:
    """Return what to say of a value that is not of its field's type."""
    value = shorten(value)
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return f"{key}={value}: must be one of {', '.join(choices)}{nearest(value, choices)}"
    kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    return f"{key}={value}: must be {kinds[kind]}"
