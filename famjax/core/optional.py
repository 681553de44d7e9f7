"""Optional dependencies: which are missing, and the command that installs them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

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


def missing_modules(modules: Sequence[str]) -> list[str]:
    """Return the modules that are not installed."""
    return [name for name in modules if importlib.util.find_spec(name) is None]


def install_command(modules: Sequence[str]) -> str:
    """Return the command that installs the modules."""
    return " ".join(["pip install", *dict.fromkeys(_PACKAGES[name] for name in modules)])


def missing_message(modules: Sequence[str]) -> str:
    """Return "torch and peft not installed; pip install torch peft" for missing modules."""
    *first, last = modules
    names = f"{', '.join(first)} and {last}" if first else last
    return f"{names} not installed; {install_command(modules)}"
