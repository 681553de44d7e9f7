"""What verbs set before JAX is used: huge pages, cores, the compile cache, quiet C++ logs."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

_STARTED = "FAMJAX_STARTED"
_HUGE = "glibc.malloc.hugetlb=1"
# one heap that never shrinks; the thread cache would take the rim of a freed array for small things
# and leave a hole that the same array no longer fits
_KEEP = (
    ":".join(
        f"glibc.malloc.{name}"
        for name in ("mmap_threshold=1099511627776", "trim_threshold=1099511627776", "arena_max=1")
    )
    + ":glibc.malloc.tcache_count=0"
)


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
    return Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK)


def use_huge_pages(*, keep: bool = False) -> None:
    """Start this program again with huge pages for its memory, where glibc can.

    XLA on CPU takes a step's temporary arrays from the system and gives them back at every step.
    In pages of 4 KiB that is hundreds of thousands of page faults, a quarter of a step's time.
    glibc reads its tunables only when a program starts. What the user has set of them stands.

    Args:
      keep: give no memory back at all: up to twice of what a step needs is held, and steps can be
        compared whose time does not depend on how the system hands out pages.
    """
    if not sys.platform.startswith("linux") or not sys.executable or not sys.orig_argv[1:]:
        return
    if "GLIBC_TUNABLES" in os.environ or _STARTED in os.environ:
        return
    # the second name for who starts Python by a wrapper that clears the first
    tunables = f"{_HUGE}:{_KEEP}" if keep else _HUGE
    os.environ |= {"GLIBC_TUNABLES": tunables, _STARTED: "1"}
    with contextlib.suppress(OSError):  # slower, but no reason to stop
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def keeps_memory() -> bool:
    """Return whether memory is kept as `use_huge_pages` does it; True where there is no glibc."""
    return not sys.platform.startswith("linux") or _KEEP in os.environ.get("GLIBC_TUNABLES", "")


def share_cores(rows: int) -> None:
    """Let the cores of a CPU machine be devices, as many as divide the rows of a batch.

    A loop over tokens has products too small for threads to share; rows can be shared, and a mesh
    shares them.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    fake_devices(max(n for n in range(1, cores + 1) if rows % n == 0))


def fake_devices(count: int) -> None:
    """Let a CPU machine be so many devices.

    It has no effect once JAX has looked for devices, where XLA_FLAGS has a number of its own, and
    on accelerators.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    import jax

    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)


def setup() -> None:
    """Keep compiled programs between processes and silence XLA's and TensorFlow's C++ chatter.

    Whatever the user has set in the environment stands.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import jax

    folder = cache_folder()
    if not is_writable(folder):
        print(
            f"famjax: {folder} cannot be written: compiled programs are not kept, and every start "
            "compiles anew; set JAX_COMPILATION_CACHE_DIR to a folder that can be written",
            file=sys.stderr,
        )
        # which JAX has from the environment: it would warn at every compilation
        jax.config.update("jax_compilation_cache_dir", None)
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
