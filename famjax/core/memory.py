"""What a machine can hold, and the refusal of what it cannot, before anything is allocated.

Only what clearly cannot fit is refused: the least that a model takes is compared with all the
memory there is. What fits by this may still run out of memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from famjax.core import processes
from famjax.core.config import Config, ModelConfig
from famjax.core.errors import UserError
from famjax.core.keys import values
from famjax.core.size import batch_bytes, training_bytes, weight_bytes
from famjax.core.units import byte_size

# where Linux says what a group of processes may take, version 2 and version 1
_CGROUPS = (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"))


class Memory(NamedTuple):
    """The memory of all devices that share a model, in bytes, and what it is called."""

    bytes: int
    name: str


def check_training_fits(config: Config, there: Memory | None = None) -> None:
    """Raise a `UserError` if training cannot fit the devices, whatever the mesh.

    Args:
      config: its vocabulary known, or 0, which counts as none.
      there: memory of other devices than those of this process.
    """
    there = there or memory()
    kinds = "parameters, gradients and optimizer state"
    _refuse(config, training_bytes, kinds, there)
    _refuse(
        config,
        lambda config: training_bytes(config) + batch_bytes(config),
        f"{kinds} with what a step reads, carries and computes",
        there,
    )


def check_model_fits(model: ModelConfig) -> None:
    """Raise a `UserError` if a model's parameters cannot fit the devices."""
    config = Config(model=model)
    _refuse(config, lambda config: weight_bytes(config.model), "the model's parameters", memory())


def check_bytes_fit(what: str, needed: int) -> None:
    """Raise a `UserError` if so many bytes cannot fit the devices; `what` takes them."""
    there = memory()
    if needed > there.bytes:
        raise UserError(
            f"{what} would take at least {byte_size(needed)}, and {there.name} "
            f"{byte_size(there.bytes)}; take a smaller size"
        )


def _refuse(config: Config, needs: Callable[[Config], int], kinds: str, there: Memory) -> None:
    needed = needs(config)
    if needed > there.bytes:
        raise UserError(
            f"{largest(config, needs)}: {kinds} would take at least {byte_size(needed)}, and "
            f"{there.name} {byte_size(there.bytes)}; take smaller sizes, or more memory"
        )


def largest(config: Config, needs: Callable[[Config], int]) -> str:
    """Return the key, with its value, that makes a config need the most beyond the defaults."""
    spared = {key: needs(other) for key, other in _with_defaults(config)}
    key = min(spared, key=lambda key: spared[key])
    return f"{key}={values(config)[key]}"


def _with_defaults(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield each key of a whole number, and the config with its default."""
    for section in ("model", "data"):
        for path in ((), *((name,) for name in _nested(getattr(config, section)))):
            part = _at(config, (section, *path))
            for field in dataclasses.fields(part):
                if type(getattr(part, field.name)) is int:
                    yield (
                        ".".join((section, *path, field.name)),
                        _replaced(config, (section, *path), field.name, field.default),
                    )


def _nested(part: object) -> list[str]:
    return [name for name, value in vars(part).items() if dataclasses.is_dataclass(value)]


def _at(config: Config, path: tuple[str, ...]) -> Any:
    part: Any = config
    for name in path:
        part = getattr(part, name)
    return part


def _replaced(config: Any, path: tuple[str, ...], name: str, value: Any) -> Any:
    if not path:
        return replace(config, **{name: value})
    inner = _replaced(getattr(config, path[0]), path[1:], name, value)
    return replace(config, **{path[0]: inner})


# what there is -----------------------------------------------------------------------------------


def memory() -> Memory:
    """Return the memory of the devices: of accelerators their own, of CPUs the machine's."""
    import jax

    device = jax.local_devices()[0]
    if device.platform != "cpu":
        own = (device.memory_stats() or {}).get("bytes_limit")
        if not own:  # an accelerator that does not tell refuses nothing
            return Memory(2**63, f"the {device.device_kind} devices have")
        number = jax.device_count()
        have = "device has" if number == 1 else "devices have together"
        return Memory(number * own, f"{number} {device.device_kind} {have}")
    number = processes.count()
    if number > 1:
        return Memory(number * host_bytes(), f"the machines of {number} processes have together")
    return Memory(host_bytes(), "this machine has")


def host_bytes() -> int:
    """Return the memory of this machine with its swap, or the part that this process may take."""
    return min([_total(), *_cgroup_limits(), *_process_limit()])


def _total() -> int:
    with contextlib.suppress(OSError, KeyError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
        return 1024 * (int(found["MemTotal"][0]) + int(found["SwapTotal"][0]))
    with contextlib.suppress(ImportError, OSError, ValueError, AttributeError):
        import os

        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2**63  # a system that does not tell refuses nothing


def _cgroup_limits() -> Iterator[int]:
    """Yield the limits of the control groups that this process is in."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, kinds, path = line.split(":", 2)
        if number != "0" and "memory" not in kinds.split(","):
            continue
        home, name = _CGROUPS[number != "0"]
        for folder in (Path(home + path), *Path(home + path).parents):
            with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                yield int((folder / name).read_text())


def _process_limit() -> Iterator[int]:
    """Yield what `ulimit -v` leaves."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            yield soft
