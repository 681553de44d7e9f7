"""Process setup before JAX is used: huge pages, CPU devices, compilation cache, quiet C++ logs."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
from pathlib import Path

from famjax.core.optional import install_command, missing_modules

_STARTED = "FAMJAX_STARTED"
_HUGE = "glibc.malloc.hugetlb=1"
# one heap that never shrinks; the thread cache would reuse the edge of a freed array for small
# allocations, and the same array would no longer fit
_KEEP = (
    ":".join(
        f"glibc.malloc.{name}"
        for name in ("mmap_threshold=1099511627776", "trim_threshold=1099511627776", "arena_max=1")
    )
    + ":glibc.malloc.tcache_count=0"
)


# where the system has a file for each device
DEVICES = Path("/dev")
# platform in JAX_PLATFORMS -> module that JAX needs for it
_PLUGINS = {"cuda": "jax_cuda13_plugin", "gpu": "jax_cuda13_plugin", "tpu": "libtpu"}


def cache_folder() -> str:
    """Return the folder of the compilation cache: the one set for JAX, or else famjax's own."""
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if folder:
        return folder
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(base) / "famjax" / "jax")


def is_writable(folder: str) -> bool:
    """Return whether the folder exists or can be created, and is writable; True for a bucket."""
    if "://" in folder:
        return True
    with contextlib.suppress(OSError):
        Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK)


def start_program(*, keep: bool = False) -> None:
    """Set up a process that runs famjax alone, before anything else (see `use_huge_pages`)."""
    use_huge_pages(keep=keep)
    # collect garbage less often: a traced program is a million objects that stay alive, and
    # searching them again and again takes an eighth of the time until the first step
    gc.set_threshold(200_000, 20, 100)


def use_huge_pages(*, keep: bool = False) -> None:
    """Re-execute this program with huge pages, if glibc supports them.

    XLA on CPU allocates a step's temporary arrays from the system and frees them at every step.
    With pages of 4 KiB this causes hundreds of thousands of page faults, which take a quarter of a
    step's time. The program is re-executed because glibc reads its tunables only at program start.
    Tunables set by the user take precedence.

    Args:
      keep: never return memory to the system. The process then holds up to twice the memory that a
        step needs, but step times do not depend on page allocation and can be compared.
    """
    if not sys.platform.startswith("linux") or not sys.executable or not sys.orig_argv[1:]:
        return
    if "GLIBC_TUNABLES" in os.environ or _STARTED in os.environ:
        return
    # _STARTED is set too, since some wrappers of Python clear GLIBC_TUNABLES
    tunables = f"{_HUGE}:{_KEEP}" if keep else _HUGE
    os.environ |= {"GLIBC_TUNABLES": tunables, _STARTED: "1"}
    with contextlib.suppress(OSError):  # slower, but no reason to stop
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def keeps_memory() -> bool:
    """Return whether memory is kept as with `use_huge_pages(keep=True)`; True if not on Linux."""
    return not sys.platform.startswith("linux") or _KEEP in os.environ.get("GLIBC_TUNABLES", "")


def has_accelerator() -> bool:
    """Return whether this machine seems to have a GPU or TPU, and JAX may use it.

    It looks for device files: asking JAX would take the accelerator from other processes.
    """
    files = ("nvidia[0-9]*", "accel[0-9]*", "vfio/[0-9]*", "kfd", "dxg")
    return os.environ.get("JAX_PLATFORMS") != "cpu" and any(
        next(DEVICES.glob(file), None) is not None for file in files
    )


def share_gpu() -> None:
    """Let this process and those that it starts share a GPU: none of them reserves its memory.

    By default a process reserves three quarters of it. The user's setting takes precedence.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def share_cores(rows: int) -> None:
    """Make cores of a CPU machine JAX devices: the largest number that divides the rows of a batch.

    The matrix products in a scan over tokens or blocks are too small for multithreading, so the
    cores are used by a mesh over rows instead.
    """
    set_cpu_devices(max(n for n in range(1, count_cores() + 1) if rows % n == 0))


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def set_cpu_devices(count: int) -> None:
    """Set the number of JAX devices of a CPU machine.

    This has no effect on accelerators, if XLA_FLAGS sets a number, or after JAX's backends are
    initialized.
    """
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    import jax

    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)


def setup() -> None:
    """Enable the persistent compilation cache and silence XLA's and TensorFlow's C++ logs.

    Environment variables set by the user take precedence.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import jax

    folder = cache_folder()
    if not is_writable(folder):
        print(
            f"famjax: {folder} is not writable: compiled programs are not cached, and every start "
            "recompiles; set JAX_COMPILATION_CACHE_DIR to a writable folder",
            file=sys.stderr,
        )
        # JAX has taken the folder from the environment, and would warn at every compilation
        jax.config.update("jax_compilation_cache_dir", None)
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def describe_missing_device(error: BaseException) -> str:
    """Return one line about an error of JAX that finds no device to use; "" for other errors."""
    frame = error.__traceback__
    while frame and frame.tb_next:
        frame = frame.tb_next
    is_of_jax = frame and Path(frame.tb_frame.f_code.co_filename).name == "xla_bridge.py"
    message = " ".join(str(error).split())
    if not (is_of_jax or "nable to initialize backend" in message):
        return ""
    wanted = os.environ.get("JAX_PLATFORMS", "")
    # without JAX's own advice
    message = re.sub(
        r"^Unable to initialize backend '\w+': | \((set JAX_PLAT|you may need).*", "", message
    )
    modules = [_PLUGINS[name] for name in wanted.split(",") if name in _PLUGINS]
    install = [install_command(missing)] if (missing := missing_modules(modules)) else []
    advice = ", ".join([*install, "see famjax doctor"])
    message = message[:300].rstrip(".") or "JAX finds none"
    if not wanted:
        return f"no device can be used ({message}); {advice}, or set JAX_PLATFORMS=cpu"
    return (
        f"JAX_PLATFORMS={wanted}: cannot be used here ({message}); {advice}, or unset JAX_PLATFORMS"
    )
