"""Checks that a mesh divides a config's dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterator

from famjax.config.resolved import ResolvedConfig, ResolvedModelConfig
from famjax.config.schema import Config
from famjax.core.errors import UserError, format_divisors
from famjax.mixers import mixer_specs


def call_blocks(config: ResolvedConfig) -> int:
    """Return the number of blocks per call in a training step, of the shortest if BPTT warms up."""
    blockwise = any(spec.is_blockwise for spec in mixer_specs(config.model))
    block_len = config.model.block_len if blockwise else 1
    return config.train.bptt_start // config.train.bptt_segments // block_len


def tensor_sizes(m: ResolvedModelConfig) -> dict[str, int]:
    """Return the sizes that the mesh's tensor axis must divide, by config key."""
    if m.stack == "lstm":
        return {"model.width": m.width}
    return {"model.heads": m.heads, "model.mlp_width": m.mlp_width}


def check_divides(config: ResolvedConfig) -> None:
    """Raise a `UserError` if an axis divides nothing, since devices would duplicate work."""
    mesh = config.mesh
    for key, size in tensor_sizes(config.model).items():
        if size % mesh.tensor:
            raise UserError(
                f"mesh.tensor={mesh.tensor} does not divide {key}={size}; take one of "
                f"{format_divisors(size)}"
            )
    blocks = call_blocks(config)
    if blocks % mesh.sequence:
        raise UserError(
            f"mesh.sequence={mesh.sequence} does not divide the {blocks} blocks of a call; take "
            f"one of {format_divisors(blocks)}"
        )


def check_rows(config: Config, devices: int) -> None:
    """Raise a `UserError` if the rows cannot be divided over axes with explicit sizes.

    For axes of size -1 `duplicated_work` warns instead.

    Args:
      config: config with the mesh as the user wrote it.
      devices: number of devices in the mesh.
    """
    mesh, accumulate = config.mesh, config.train.accumulate
    explicit = {name: getattr(mesh, name) for name in ("data", "fsdp")}
    parts = math.prod(size for size in explicit.values() if size > 0)
    rows = config.data.batch // accumulate
    if rows % parts and devices % parts == 0:  # otherwise the mesh is wrong
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
