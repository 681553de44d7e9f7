"""The memory of this machine, and how much of it this process may take."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

# cgroup memory limits of Linux, version 2 and version 1
_CGROUPS = (("sys/fs/cgroup", "memory.max"), ("sys/fs/cgroup/memory", "memory.limit_in_bytes"))


def host_bytes(root: Path = Path("/")) -> int:
    """Return the memory of this machine including swap, or the limit of this process if lower.

    Args:
      root: directory of the control groups' proc/self/cgroup and sys/fs/cgroup.
    """
    return min([_total_bytes(), *_cgroup_limits(root), *_process_limit()])


def ram_bytes() -> int | None:
    """Return the memory of this machine without swap; None if the system does not report it."""
    return _read_meminfo().get("MemTotal", _sysconf_bytes("SC_PHYS_PAGES"))


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory that this process may still take; None if the system does not report it.

    Args:
      root: see `host_bytes`.
    """
    # not SC_AVPHYS_PAGES, which leaves out the reclaimable file cache
    free = _read_meminfo().get("MemAvailable", _sysconf_bytes("SC_AVPHYS_PAGES"))
    if free is None:
        return None
    own = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        own = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    limits = (*_cgroup_limits(root), *_process_limit())
    return max(min([free, *(limit - own for limit in limits)]), 0)


def _total_bytes() -> int:
    if (ram := ram_bytes()) is None:
        return 2**63  # not reported: every check passes
    return ram + _read_meminfo().get("SwapTotal", 0)


def _read_meminfo() -> dict[str, int]:
    """Return Linux's table of memory in bytes, by name; {} on other systems."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        pairs = (line.partition(":") for line in lines)
        return {name: 1024 * int(rest.split()[0]) for name, _, rest in pairs}
    return {}


def _sysconf_bytes(pages: str) -> int | None:
    """Return a number of pages in bytes; None if the system does not report it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    return None


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Yield the memory limits of this process's control groups."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, kinds, path = line.split(":", 2)
        if number != "0" and "memory" not in kinds.split(","):
            continue
        home, name = _CGROUPS[number != "0"]
        group = root / (home + path)
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                yield int((folder / name).read_text())


def _process_limit() -> Iterator[int]:
    """Yield the limit set by `ulimit -v`, if any."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            yield soft
