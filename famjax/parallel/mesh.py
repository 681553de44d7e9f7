"""Mesh selection (`mesh=auto`), and checks that a mesh divides a config's dimensions.

Among all factorizations of the devices into data, fsdp, tensor and sequence, `choose_mesh` takes
the one that shards the batch rows most, since rows communicate only weights and gradients; fsdp is
no larger than the weights need to fit. The remaining devices shard heads and the feed-forward as
far as they divide, and then the tokens of a call.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from famjax.config.derived import mixer_pattern
from famjax.config.resolved import ResolvedConfig
from famjax.config.schema import AXES, Config, MeshConfig
from famjax.core.errors import UserError, divisors

# share of a device's memory for weights and state; activations have the rest
SHARE = 0.5
# bytes assumed for a device that does not report its memory
DEVICE_BYTES = 16 * 2**30


@dataclass(frozen=True)
class MeshDemand:
    """A config's requirements of its mesh.

    Attributes:
      weights: bytes of parameters, gradients and optimizer state together.
      state: bytes of the carried state.
      rows: batch rows per micro-batch.
      tensor: sizes that the tensor axis must divide.
      blocks: blocks of a call, which the sequence axis must divide.
      limit: bytes of a device that weights and state may take.
    """

    weights: int = 0
    state: int = 0
    rows: int = 1
    tensor: tuple[int, ...] = ()
    blocks: int = 1
    limit: int = int(SHARE * DEVICE_BYTES)

    def bytes_on(self, mesh: MeshConfig) -> float:
        """Return the bytes that a device of the mesh holds, without activations."""
        return self.weights / (mesh.fsdp * mesh.tensor) + self.state / (mesh.data * mesh.fsdp)


def choose_mesh(config: MeshConfig, devices: int, demand: MeshDemand) -> MeshConfig:
    """Return the mesh with a size for every axis that is -1; explicit sizes are kept.

    If no mesh fits into memory, parameters are sharded the most; if rows do not divide, devices
    duplicate work.

    Raises:
      UserError: the explicit sizes do not divide the number of devices.
    """
    candidates = list(_candidates(config, devices))
    if not candidates:
        sizes = " x ".join(f"{name}={getattr(config, name)}" for name in AXES)
        raise UserError(
            f"mesh: {sizes} does not fit {devices} devices; let the sizes divide that number and "
            "set an axis to -1 for the remaining devices"
        )

    def cost(mesh: MeshConfig) -> tuple[float, ...]:
        divides = all(n % mesh.tensor == 0 for n in demand.tensor)
        divides = divides and demand.blocks % mesh.sequence == 0
        duplicates = demand.rows % (mesh.data * mesh.fsdp) != 0
        excess = max(0.0, demand.bytes_on(mesh) - demand.limit)
        return (not divides, excess, duplicates, -mesh.data * mesh.fsdp, mesh.fsdp, -mesh.tensor)

    return min(candidates, key=cost)


def _candidates(config: MeshConfig, devices: int) -> Iterator[MeshConfig]:
    """Yield every mesh of so many devices with the explicit sizes."""
    explicit = {name: size for name, size in vars(config).items() if size != -1}
    if len(explicit) == len(AXES):
        if math.prod(explicit.values()) == devices:
            yield config
        return
    for mesh in meshes(devices):
        if vars(mesh) | explicit == vars(mesh):
            yield mesh


def meshes(devices: int) -> Iterator[MeshConfig]:
    """Yield every mesh of so many devices."""
    factors = [n for n in range(1, devices + 1) if devices % n == 0]
    for sizes in itertools.product(factors, repeat=len(AXES)):
        if math.prod(sizes) == devices:
            yield MeshConfig(*sizes)


def is_auto(config: MeshConfig) -> bool:
    """Return whether the explicit sizes leave a choice."""
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


# divisibility -----------------------------------------------------------------------------------


def call_blocks(config: ResolvedConfig) -> int:
    """Return the blocks per call of a training step, of the shortest call if BPTT warms up."""
    windows = set(mixer_pattern(config.model)) - {"full", "linear"}
    block_len = config.model.block_len if windows else 1
    return config.train.bptt_start // config.train.bptt_segments // block_len


def tensor_sizes(config: ResolvedConfig) -> dict[str, int]:
    """Return the sizes that the tensor axis must divide, by config key."""
    m = config.model
    if m.stack == "lstm":
        return {"model.width": m.width}
    return {"model.heads": m.heads, "model.mlp_width": m.mlp_width}


def check_divides(config: ResolvedConfig) -> None:
    """Raise a `UserError` if an axis divides nothing, so that devices would duplicate work."""
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


def check_rows(config: Config, devices: int) -> None:
    """Raise a `UserError` if rows do not divide over axes with explicit sizes.

    For axes of size -1 `duplicated_work` warns instead.

    Args:
      config: its mesh as the user wrote it.
      devices: number of devices of the mesh.
    """
    mesh, accumulate = config.mesh, config.train.accumulate
    explicit = {name: getattr(mesh, name) for name in ("data", "fsdp")}
    parts = math.prod(size for size in explicit.values() if size > 0)
    rows = config.data.batch // accumulate
    if rows % parts and devices % parts == 0:  # else the mesh is wrong
        sizes = " x ".join(f"mesh.{name}={size}" for name, size in explicit.items() if size > 1)
        raise UserError(
            f"data.batch={config.data.batch}: {rows} rows at a time do not divide by {sizes}; take "
            f"a multiple of {parts * accumulate}, or a larger mesh.tensor or mesh.sequence"
        )


def duplicated_work(config: ResolvedConfig) -> Iterator[str]:
    """Yield warnings about work that devices duplicate."""
    mesh, accumulate = config.mesh, config.train.accumulate
    rows, devices = config.data.batch // accumulate, mesh.data * mesh.fsdp
    if rows % devices:
        yield (
            f"data.batch={config.data.batch}: {rows} rows at a time do not divide over {devices} "
            f"devices, which duplicate work; take a multiple of {devices * accumulate}"
        )
    heads = config.model.kv_heads
    if heads % mesh.tensor and config.model.stack != "lstm":
        yield (
            f"model.kv_heads={heads} do not divide over mesh.tensor={mesh.tensor}: every device "
            "computes and stores the keys and values of all heads"
        )
