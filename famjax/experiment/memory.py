"""The memory of devices and machines, and checks that a model fits, before any allocation.

Only what clearly cannot fit is rejected: a lower bound on the memory needed is compared with all
available memory. A model that passes may still run out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from famjax.config.keys import key_values, replace_value
from famjax.config.schema import Config, ModelConfig
from famjax.core.errors import UserError
from famjax.core.host_memory import host_bytes
from famjax.core.units import byte_size, counted
from famjax.experiment.size import batch_bytes, training_bytes, weight_bytes
from famjax.processes import collective

_ENCODER = "model.encoder.layers"


class DeviceMemory(NamedTuple):
    """The memory of all devices that share a model.

    Attributes:
      bytes: that of all of them.
      name: their name in messages.
      has_kernels: whether they may compute attention without storing its weights.
    """

    bytes: int
    name: str
    has_kernels: bool = False


def check_training_fits(config: Config, available: DeviceMemory | None = None) -> None:
    """Raise a `UserError` if training cannot fit the devices on any mesh.

    Args:
      config: config with a vocabulary size; with size 0 the vocabulary is not counted.
      available: memory of the devices, if they are not those of this process.
    """
    available = available or device_memory()
    kinds = "parameters, gradients and optimizer state"
    _check_fits(config, training_bytes, kinds, available)
    _check_fits(
        config,
        lambda config: training_bytes(config) + batch_bytes(config, available.has_kernels),
        f"{kinds} with a step's batch, state and activations",
        available,
    )


def check_model_fits(model: ModelConfig, devices: int | None = None, only: str = "all") -> None:
    """Raise a `UserError` if a model's parameters cannot fit that many devices (default: all).

    Args:
      only: `train.only`; parameters that are not trained may have fewer bytes.
    """
    _check_fits(
        Config(model=model),
        lambda config: weight_bytes(config.model, only),
        "the model's parameters",
        device_memory(devices),
    )


def check_bytes_fit(what: str, needed: int, devices: int | None = None) -> None:
    """Raise a `UserError` if the `needed` bytes of `what` cannot fit that many devices."""
    available = device_memory(devices)
    if needed > available.bytes:
        raise UserError(
            f"{what} would take at least {byte_size(needed)}, and {available.name} "
            f"{byte_size(available.bytes)}; choose a smaller size"
        )


def _check_fits(
    config: Config, needs: Callable[[Config], int], kinds: str, available: DeviceMemory
) -> None:
    needed = needs(config)
    if needed > available.bytes:
        raise UserError(
            f"{largest_key(config, needs)}: {kinds} would take at least {byte_size(needed)}, and "
            f"{available.name} {byte_size(available.bytes)}; choose smaller sizes, or more memory"
        )


def largest_key(config: Config, needs: Callable[[Config], int]) -> str:
    """Return the "key=value" that would save the most memory if it were at its default."""
    reduced = {key: needs(other) for key, other in _iter_defaults(config)}
    key = min(reduced, key=lambda key: reduced[key])
    return f"{key}={key_values(config)[key]}"


def _iter_defaults(config: Config) -> Iterator[tuple[str, Config]]:
    """Yield each integer key, and the config with that key at its default.

    If there is an encoder, one of its layers stays, since without an encoder the model would be of
    another kind.
    """
    defaults = key_values(Config())
    for key, value in key_values(config).items():
        if type(value) is int and key.startswith(("model.", "data.")):
            default = int(value > 0) if key == _ENCODER else defaults[key]
            yield key, replace_value(config, key, default)


def device_memory(used: int | None = None) -> DeviceMemory:
    """Return the memory of the accelerators, or of the machine if the devices are CPUs.

    Args:
      used: how many of the accelerators are used; None means all.
    """
    import jax

    device = jax.local_devices()[0]
    if device.platform != "cpu":
        limit = (device.memory_stats() or {}).get("bytes_limit")
        if not limit:  # not reported: every check passes
            return DeviceMemory(2**63, f"the {device.device_kind} devices have")
        number = used or jax.device_count()
        name = f"{number} {device.device_kind} devices have together"
        if number == 1:
            others = jax.device_count() - 1
            more = f"the {counted(others, 'other')} (famjax eval and generate have --mesh auto)"
            alone = f" is used, not {more}, and" if others else ""
            name = f"1 {device.device_kind} device{alone} has"
        return DeviceMemory(number * limit, name, device.platform == "gpu")
    number = collective.process_count()
    if number > 1:
        return DeviceMemory(
            number * host_bytes(), f"the machines of {number} processes have together"
        )
    return DeviceMemory(host_bytes(), "this machine has")
