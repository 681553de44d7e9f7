"""Keys of saved configs that have another name now."""

from __future__ import annotations

from typing import Any


def rename_arch_keys(arch: dict[str, Any]) -> dict[str, Any]:
    """Return the table `model.arch` of a saved config with the names that its keys have now.

    learned_positions was a bool; it is a value of positions now. Anything else stays as it is.
    """
    was = arch.get("learned_positions")
    if not isinstance(was, bool) or "positions" in arch:
        return arch
    rest = {name: value for name, value in arch.items() if name != "learned_positions"}
    return rest | {"positions": "learned" if was else "none"}
