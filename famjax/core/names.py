"""Names of files that come out of files: whoever wrote those may not choose what is opened."""

from __future__ import annotations

from typing import Any


def is_inside(name: Any) -> bool:
    """Tell whether a relative path leads into its folder, by its text alone.

    A symbolic link there may lead elsewhere: Hugging Face's cache is made of them.
    """
    return (
        isinstance(name, str)
        and not any(char in name for char in "\\\0")
        and all(part not in ("", ".", "..") for part in name.split("/"))
    )


def is_file_name(name: Any) -> bool:
    """Tell whether it is the name of a file in a folder, and not in one below or elsewhere."""
    return is_inside(name) and "/" not in name
