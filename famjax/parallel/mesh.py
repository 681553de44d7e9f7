"""Mesh selection (`mesh=auto`).

Among all factorizations of the devices into data, fsdp, tensor and sequence, `choose_mesh` takes
the one that shards the batch rows most, since sharding rows communicates only weights and
gradients; fsdp is no larger than is needed for the weights to fit. The remaining devices shard
heads and the feed-forward as far as these are divisible, and then the tokens of a call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from famjax.config.schema import AXES, MeshConfig
from famjax.core.errors import UserError

# share of a device's memory for weights and state; the rest is for activations
WEIGHTS_SHARE = 0.5
# bytes assumed for a device that does not report its memory
DEVICE_BYTES = 16 * 2**30


@dataclass(frozen=True)
class MeshDemand:
    """What a config requires of its mesh.

    Attributes:
      weights: bytes of parameters, gradients and optimizer state together.
      state: bytes of the carried state.
      rows: number of batch rows per micro-batch.
      tensor: sizes that the tensor axis must divide.
      blocks: number of blocks of a call, which the sequence axis must divide.
      limit: bytes that weights and state may take on a device.
    """

    weights: int = 0
    state: int = 0
    rows: int = 1
    tensor: tuple[int, ...] = ()
    blocks: int = 1
    limit: int = int(WEIGHTS_SHARE * DEVICE_BYTES)

    def bytes_on(self, mesh: MeshConfig) -> float:
        """Return the bytes that a device of the mesh holds, without activations."""
        return self.weights / (mesh.fsdp * mesh.tensor) + self.state / (mesh.data * mesh.fsdp)


def choose_mesh(config: MeshConfig, devices: int, demand: MeshDemand) -> MeshConfig:
    """Return the mesh with a size chosen for every axis that is -1; explicit sizes are kept.

    If no mesh fits into memory, the mesh shards parameters as much as possible. If no mesh divides
    the rows, devices duplicate work.

    Raises:
      UserError: the explicit sizes do not divide the number of devices.
    """
    candidates = list(_candidates(config, devices))
    if not candidates:
        sizes = " x ".join(f"{name}={getattr(config, name)}" for name in AXES)
        raise UserError(
            f"mesh: {sizes} does not fit {devices} devices; choose sizes whose product divides "
            "that number, and set one axis to -1 for the remaining devices"
        )

    def cost(mesh: MeshConfig) -> tuple[float, ...]:
        divides = all(n % mesh.tensor == 0 for n in demand.tensor)
        divides = divides and demand.blocks % mesh.sequence == 0
        duplicates = demand.rows % (mesh.data * mesh.fsdp) != 0
        excess = max(0.0, demand.bytes_on(mesh) - demand.limit)
        return (not divides, excess, duplicates, -mesh.data * mesh.fsdp, mesh.fsdp, -mesh.tensor)

    return min(candidates, key=cost)


def _candidates(config: MeshConfig, devices: int) -> Iterator[MeshConfig]:
    """Yield every mesh of that many devices that has the explicit sizes."""
    explicit = {name: size for name, size in vars(config).items() if size != -1}
    if len(explicit) == len(AXES):
        if math.prod(explicit.values()) == devices:
            yield config
        return
    for mesh in meshes(devices):
        if vars(mesh) | explicit == vars(mesh):
            yield mesh


def meshes(devices: int) -> Iterator[MeshConfig]:
    """Yield every mesh of that many devices."""
    factors = [n for n in range(1, devices + 1) if devices % n == 0]
    for sizes in itertools.product(factors, repeat=len(AXES)):
        if math.prod(sizes) == devices:
            yield MeshConfig(*sizes)


def is_auto(config: MeshConfig) -> bool:
    """Return whether the explicit sizes leave more than one mesh to choose from."""
    return sum(getattr(config, name) == -1 for name in AXES) > 1


def describe(mesh: MeshConfig, demand: MeshDemand) -> str:
    """Return one line about an automatically chosen mesh."""
    sizes = " x ".join(f"{name}={getattr(mesh, name)}" for name in AXES)
    line = f"mesh=auto: {sizes}; {_gib(demand.bytes_on(mesh))} of weights and state per device"
    if demand.bytes_on(mesh) <= demand.limit:
        return line
    return f"{line}, more than their {_gib(demand.limit)}: use more devices to shard them"


def _gib(count: float) -> str:
    return f"{count / 2**30:.3g} GiB"
