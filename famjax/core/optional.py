"""Optional libraries: which of them are absent, and the command that installs them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

_SEQIO = "-e '.[seqio]'"
# by module, what pip takes; extras are those of a checkout of famjax
_PACKAGES = {
    "tensorflow": _SEQIO,
    "seqio": _SEQIO,
    "tensorflow_datasets": _SEQIO,
    "jax_cuda13_plugin": "-e '.[cuda]'",
    "libtpu": "-e '.[tpu]'",
    "torch": "torch",
    "transformers": "transformers",
    "peft": "peft",
    "feedback_transformer_pytorch": "feedback-transformer-pytorch",
    "performer_pytorch": "performer-pytorch",
}


def absent(modules: Sequence[str]) -> list[str]:
    """Return those of the modules that are not installed."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def install(modules: Sequence[str]) -> str:
    """Return the command that installs the modules."""
    return " ".join(["pip install", *dict.fromkeys(_PACKAGES[name] for name in modules)])


def not_installed(modules: Sequence[str]) -> str:
    """Return "torch and peft not installed; pip install torch peft" for modules that are absent."""
    *first, last = modules
    named = f"{', '.join(first)} and {last}" if first else last
    return f"{named} not installed; {install(modules)}"
