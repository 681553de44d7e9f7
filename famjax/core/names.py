"""Checks of file names that are read from untrusted files, which must not choose what is opened."""

from __future__ import annotations

from typing import Any


def is_inside(name: Any) -> bool:
    """Return whether a relative path stays inside its folder, judged by its text only.

    A symbolic link in the folder may still lead outside: Hugging Face's cache consists of them.
    """
    return (
        isinstance(name, str)
        and not any(char in name for char in "\\\0")
        and all(part not in ("", ".", "..") for part in name.split("/"))
    )


def is_file_name(name: Any) -> bool:
    """Return whether a name is a plain file name: in no subfolder, and not outside the folder."""
    return is_inside(name) and "/" not in name
