"""Optional dependencies: which are missing, and the command that installs them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib import metadata

_SEQIO = "-e '.[seqio]'"
# module -> argument of pip install; the extras are those of a checkout of famjax
_PACKAGES = {
    "tensorflow": _SEQIO,
    "seqio": _SEQIO,
    "tensorflow_datasets": _SEQIO,
    "jax_cuda13_plugin": "-e '.[cuda]'",
    "libtpu": "-e '.[tpu]'",
    "torch": "torch",
    "transformers": "transformers",
    "peft": "peft",
    "lm_eval": "-e '.[eval]'",
    "rouge_score": "-e '.[eval]'",
    "sacrebleu": "-e '.[eval]'",
    "pyarrow": "-e '.[parquet]'",
    "feedback_transformer_pytorch": "feedback-transformer-pytorch",
    "performer_pytorch": "performer-pytorch",
}


# modules that serve as well
_ALTERNATIVES = {"jax_cuda13_plugin": ("jax_cuda12_plugin",)}
# the oldest major version of a module that works
_OLDEST = {"transformers": 5}


def missing_modules(modules: Sequence[str]) -> list[str]:
    """Return the modules that are not installed, or in too old a version."""
    return [name for name in modules if not _is_installed(name) or _old_version(name)]


def install_command(modules: Sequence[str]) -> str:
    """Return the command that installs the modules."""
    update = ["-U"] if any(map(_old_version, modules)) else []
    packages = dict.fromkeys(_PACKAGES[name] for name in modules)
    return " ".join(["pip install", *update, *packages])


def missing_message(modules: Sequence[str]) -> str:
    """Return "torch and peft not installed; pip install torch peft" for missing modules."""
    parts = [f"{name} {version} is too old" for name in modules if (version := _old_version(name))]
    if absent := [name for name in modules if not _old_version(name)]:
        *first, last = absent
        names = f"{', '.join(first)} and {last}" if first else last
        parts.append(f"{names} not installed")
    return f"{', '.join(parts)}; {install_command(modules)}"


def _is_installed(name: str) -> bool:
    names = (name, *_ALTERNATIVES.get(name, ()))
    return any(importlib.util.find_spec(each) is not None for each in names)


def _old_version(name: str) -> str:
    """Return the version of an installed module if it is too old, else ""."""
    if name not in _OLDEST or not _is_installed(name):
        return ""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:  # a checkout on the path
        return ""
    return version if int(version.split(".")[0]) < _OLDEST[name] else ""
