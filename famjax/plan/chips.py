"""Chips, and the shapes in which one can have them.

All figures are the makers' own and of one chip: dense bfloat16 FLOP/s; memory and its bandwidth;
bytes/s that a chip can send to its neighbours, over all of its links in one direction. Of a TPU's
memory it is what XLA can have, as libtpu says when a program is too large.

Sources: cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e (read as 8 bits a byte, 10^9);
nvidia.com/en-us/data-center/h100 (SXM) and /h200, NVLink's rate halved for one direction. "cpu" is
no product: one core of a server, which fake devices stand for in a trial run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from famjax.core.errors import UserError

GIB = 2**30
# a plan of others than TPUs takes as many devices of this process
_MAX_CHIPS = 4096


@dataclass(frozen=True)
class Chip:
    """What one chip can do.

    Attributes:
      flops: dense bfloat16 FLOP/s.
      memory: bytes that a program can have.
      bandwidth: bytes/s from and to memory.
      network: bytes/s out of a chip to its neighbours.
      shapes: of the slices that are sold; () is any number of chips.
    """

    name: str
    flops: float
    memory: float
    bandwidth: float
    network: float
    shapes: tuple[str, ...] = ()


_FLAT = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
    *("8x8x16", "8x16x16", "16x16x16", "16x16x24"),
)

CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", 275e12, 30.5 * GIB, 1228e9, 300e9, _CUBES),
        Chip("v5e", 197e12, 15.75 * GIB, 819e9, 200e9, _FLAT),
        Chip("v5p", 459e12, 95.74 * GIB, 2765e9, 600e9, _CUBES),
        Chip("v6e", 918e12, 31.25 * GIB, 1640e9, 448e9, _FLAT),
        Chip("h100", 989e12, 80e9, 3350e9, 450e9),
        Chip("h200", 989e12, 141e9, 4800e9, 450e9),
        Chip("cpu", 1e11, 4 * GIB, 2e10, 1e10),
    )
}


@dataclass(frozen=True)
class Topology:
    """So many chips of one kind.

    Attributes:
      name: "v5e:4x8", "h200:8".
    """

    name: str
    chip: Chip
    count: int

    @property
    def is_tpu(self) -> bool:
        return bool(self.chip.shapes)


def parse_topology(name: str) -> Topology:
    """Read "v5e:4x8" or "h200:8".

    Raises:
      UserError: there is no such chip, or none in such a shape; the near ones are named.
    """
    kind, _, shape = name.partition(":")
    if kind not in CHIPS:
        raise UserError(
            f"--topology {name}: no such chip; take one of "
            f"{', '.join(f'{c}:{example_shape(CHIPS[c])}' for c in CHIPS)}"
        )
    chip = CHIPS[kind]
    sizes = shape.split("x")
    numbers = [int(n) for n in sizes if n.isascii() and n.isdigit() and len(n) < 8 and int(n) > 0]
    count = math.prod(numbers) if numbers and len(numbers) == len(sizes) else 0
    if chip.shapes and shape not in chip.shapes:
        near = sorted(chip.shapes, key=lambda s: abs(math.log(_chip_count(s) / (count or 1))))[:4]
        raise UserError(
            f"--topology {name}: no {kind} slice has this shape; the nearest are "
            f"{', '.join(f'{kind}:{s}' for s in sorted(near, key=_chip_count))}"
        )
    if not chip.shapes and count > _MAX_CHIPS:
        raise UserError(f"--topology {name}: at most {_MAX_CHIPS:,} chips are planned for")
    if not chip.shapes and (not count or len(sizes) > 1):
        raise UserError(f"--topology {name}: give a number of chips, such as {kind}:8")
    return Topology(name, chip, count)


def example_shape(chip: Chip) -> str:
    """Return a shape of a chip's slices."""
    return chip.shapes[3] if chip.shapes else "8"


def _chip_count(shape: str) -> int:
    return math.prod(map(int, shape.split("x")))
