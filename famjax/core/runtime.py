"""What every verb sets before JAX is used: the compile cache and quiet C++ logs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def cache_folder() -> str:
    """Return the folder of compiled programs: the user's own for JAX, or famjax's."""
    given = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if given:
        return given
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(base) / "famjax" / "jax")


def is_writable(folder: str) -> bool:
    """Tell whether the folder is there, or can be made, and takes files; a bucket's always does."""
    if "://" in folder:
        return True
    with contextlib.suppress(OSError):
        Path(folder).mkdir(parents=True, exist_ok=True)
    return os.access(folder, os.W_OK)


def setup() -> None:
    """Keep compiled programs between processes and silence XLA's and TensorFlow's C++ chatter.

    Whatever the user has set in the environment stands.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import jax

    folder = cache_folder()
    if not is_writable(folder):
        return  # JAX would warn at every compilation
    jax.config.update("jax_compilation_cache_dir", folder)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
