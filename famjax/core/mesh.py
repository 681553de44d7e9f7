"""Which mesh suits a config: `mesh=auto`, and what a mesh cannot divide.

Of all ways to lay the devices along data, fsdp, tensor and sequence it is the one that divides the
rows of a batch as far as they go, since rows need no exchange but that of weights and gradients; by
fsdp no more than it takes for the weights to fit. What is left divides heads and the feed-forward
as far as they go, and then the tokens of a call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from famjax.core.checks import divisors, mixer_pattern
from famjax.core.config import AXES, Config, MeshConfig
from famjax.core.errors import UserError

# of a device's memory, what weights and state may take; activations have the rest
SHARE = 0.5
# bytes of a device that does not tell
DEVICE_BYTES = 16 * 2**30


@dataclass(frozen=True)
class Demand:
    """What a config asks of its mesh.

    Attributes:
      weights: bytes of parameters, gradients and the optimizer's state, all of them together.
      state: bytes of the memory that is carried.
      rows: read at a time, of a batch.
      tensor: what the tensor axis has to divide, each of them.
      blocks: of a call, which the sequence axis has to divide.
      limit: bytes that weights and state may take of a device.
    """

    weights: int = 0
    state: int = 0
    rows: int = 1
    tensor: tuple[int, ...] = ()
    blocks: int = 1
    limit: int = int(SHARE * DEVICE_BYTES)

    def bytes_on(self, mesh: MeshConfig) -> float:
        """Return what a device of the mesh holds, all but what the maths makes on the way."""
        return self.weights / (mesh.fsdp * mesh.tensor) + self.state / (mesh.data * mesh.fsdp)


def choose(config: MeshConfig, devices: int, demand: Demand) -> MeshConfig:
    """Return the mesh with every axis that is -1 given its size.

    The sizes that are given stand. Where nothing fits, parameters are divided the most; where rows
    do not divide, devices repeat each other's work.

    Raises:
      UserError: the sizes given do not divide the number of devices.
    """
    fitting = list(_given(config, devices))
    if not fitting:
        asked = " x ".join(f"{name}={getattr(config, name)}" for name in AXES)
        raise UserError(
            f"mesh: {asked} does not fit {devices} devices; let the sizes divide that number and "
            "set an axis to -1 for what they leave"
        )

    def worth(mesh: MeshConfig) -> tuple[float, ...]:
        divides = all(n % mesh.tensor == 0 for n in demand.tensor)
        divides = divides and demand.blocks % mesh.sequence == 0
        idle = demand.rows % (mesh.data * mesh.fsdp) != 0
        beyond = max(0.0, demand.bytes_on(mesh) - demand.limit)
        return (not divides, beyond, idle, -mesh.data * mesh.fsdp, mesh.fsdp, -mesh.tensor)

    return min(fitting, key=worth)


def _given(config: MeshConfig, devices: int) -> Iterator[MeshConfig]:
    """Yield every mesh of so many devices with the sizes that are given."""
    given = {name: size for name, size in vars(config).items() if size != -1}
    for mesh in meshes(devices):
        if vars(mesh) | given == vars(mesh):
            yield mesh


def meshes(devices: int) -> Iterator[MeshConfig]:
    """Yield every mesh of so many devices."""
    whole = [n for n in range(1, devices + 1) if devices % n == 0]
    for sizes in itertools.product(whole, repeat=len(AXES)):
        if math.prod(sizes) == devices:
            yield MeshConfig(*sizes)


def is_chosen(config: MeshConfig) -> bool:
    """Tell whether the sizes are not all decided by what is given."""
    return sum(getattr(config, name) == -1 for name in AXES) > 1


def describe(mesh: MeshConfig, demand: Demand) -> str:
    """Return one line about a mesh that was chosen."""
    sizes = " x ".join(f"{name}={getattr(mesh, name)}" for name in AXES)
    line = f"mesh=auto: {sizes}; {_gib(demand.bytes_on(mesh))} of weights and state a device"
    if demand.bytes_on(mesh) <= demand.limit:
        return line
    return f"{line}, beyond the {_gib(demand.limit)} they should take: more devices divide them"


def _gib(count: float) -> str:
    return f"{count / 2**30:.3g} GiB"


# what a mesh cannot divide ------------------------------------------------------------------------


def call_blocks(config: Config) -> int:
    """Return how many blocks a call of a training step has, the shortest if rows grow."""
    windows = set(mixer_pattern(config.model)) - {"full", "linear"}
    length = config.train.bptt_start or config.data.length
    block_len = config.model.block_len if windows else 1
    return length // config.train.bptt_segments // block_len


def tensor_sizes(config: Config) -> dict[str, int]:
    """Return what the tensor axis has to divide, by key."""
    m = config.model
    if m.stack == "lstm":
        return {"model.width": m.width}
    return {"model.heads": m.heads, "model.mlp_width": m.mlp_width or 4 * m.width}


def refuse_undivided(config: Config) -> None:
    """Raise a `UserError` where an axis divides nothing, so that devices would do the same twice.

    Args:
      config: with the size of every axis of its mesh.
    """
    mesh = config.mesh
    for key, size in tensor_sizes(config).items():
        if size % mesh.tensor:
            raise UserError(
                f"mesh.tensor={mesh.tensor} does not divide {key}={size}; take one of "
                f"{divisors(size)}"
            )
    blocks = call_blocks(config)
    if blocks % mesh.sequence:
        raise UserError(
            f"mesh.sequence={mesh.sequence} does not divide the {blocks} blocks of a call; take "
            f"one of {divisors(blocks)}"
        )


def refuse_rows(config: Config, devices: int) -> None:
    """Raise a `UserError` where rows do not divide over axes whose sizes were given by hand.

    What -1 leaves to the number of devices is told by `repeated` instead.

    Args:
      config: its mesh as the user wrote it.
      devices: of the mesh.
    """
    mesh, accumulate = config.mesh, config.train.accumulate
    given = {name: getattr(mesh, name) for name in ("data", "fsdp")}
    parts = math.prod(size for size in given.values() if size > 0)
    rows = config.data.batch // accumulate
    if rows % parts and devices % parts == 0:  # else what is wrong is the mesh
        asked = " x ".join(f"mesh.{name}={size}" for name, size in given.items() if size > 1)
        raise UserError(
            f"data.batch={config.data.batch}: {rows} rows at a time do not divide by {asked}; take "
            f"a multiple of {parts * accumulate}, or a larger mesh.tensor or mesh.sequence"
        )


def repeated(config: Config) -> Iterator[str]:
    """Yield what to say of work that devices repeat, of a mesh with the size of every axis."""
    mesh, accumulate = config.mesh, config.train.accumulate
    rows, devices = config.data.batch // accumulate, mesh.data * mesh.fsdp
    if rows % devices:
        yield (
            f"data.batch={config.data.batch}: {rows} rows at a time do not divide over {devices} "
            f"devices, which repeat each other's work; take a multiple of {devices * accumulate}"
        )
    heads = config.model.kv_heads
    if heads % mesh.tensor and config.model.stack != "lstm":
        yield (
            f"model.kv_heads={heads} do not divide over mesh.tensor={mesh.tensor}: every device "
            "makes and keeps the keys and values of all"
        )
