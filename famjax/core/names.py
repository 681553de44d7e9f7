"""Checks of file names that come from files: untrusted files must not choose what is opened."""

from __future__ import annotations

from typing import Any


def is_inside(name: Any) -> bool:
    """Return whether a relative path stays inside its folder, judged by its text only.

    A symbolic link there may still lead outside: Hugging Face's cache consists of them.
    """
    return (
        isinstance(name, str)
        and not any(char in name for char in "\\\0")
        and all(part not in ("", ".", "..") for part in name.split("/"))
    )


def is_file_name(name: Any) -> bool:
    """Return whether it is a plain file name: no subfolder, and nothing outside the folder."""
    return is_inside(name) and "/" not in name
