"""Accelerator chips, and the shapes of the slices in which they are available.

All figures are the vendors' and per chip: dense bfloat16 FLOP/s; memory and its bandwidth; bytes/s
to the neighbors over all links, in one direction. The memory of TPUs is what XLA can use, taken
from libtpu's out-of-memory errors; that of GPUs is the share that JAX takes by default.

Sources: cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e (read as 8 bits a byte, 10^9);
nvidia.com/en-us/data-center/a100 (SXM), /h100 (SXM), /h200, /l4 and /l40s: FLOP/s without sparsity,
NVLink's rate halved for one direction; NVIDIA's whitepaper of the Ada architecture (bfloat16 summed
in float32); NVIDIA's DGX H100 and H200, whose 8 GPUs have 400 Gb/s of InfiniBand each;
docs.jax.dev, "GPU memory allocation". "cpu" is a rough model of one server core, for trial runs
with fake devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from famjax.core.errors import UserError

GIB = 2**30
# maximum number of chips; plans for chips other than TPUs use as many fake devices
_MAX_CHIPS = 4096
# share of a GPU's memory that JAX takes, unless XLA_PYTHON_CLIENT_MEM_FRACTION is set; the highest
# sensible value of that
GPU_SHARE, MAX_GPU_SHARE = 0.75, 0.95
# bytes/s in one direction of PCIe 4.0 with 16 lanes
_PCIE = 32e9
# GPUs of a machine, such as a DGX H100, and the bytes/s of each to the others if there are several
# machines; older ones have slower networks
_GPUS_PER_HOST, _BETWEEN_HOSTS = 8, 50e9


@dataclass(frozen=True)
class Chip:
    """Rates and memory of one chip.

    Attributes:
      flops: dense bfloat16 FLOP/s.
      memory: bytes available to a program.
      bandwidth: bytes/s to and from main memory.
      network: bytes/s sent to neighbors.
      shapes: shapes of the available slices; () means that any number of chips is available.
    """

    name: str
    flops: float
    memory: float
    bandwidth: float
    network: float
    shapes: tuple[str, ...] = ()


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
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
        Chip("a100-40gb", 312e12, GPU_SHARE * 40e9, 1555e9, 300e9),
        Chip("a100", 312e12, GPU_SHARE * 80e9, 2039e9, 300e9),
        Chip("h100", 989e12, GPU_SHARE * 80e9, 3350e9, 450e9),
        Chip("h200", 989e12, GPU_SHARE * 141e9, 4800e9, 450e9),
        Chip("l4", 121e12, GPU_SHARE * 24e9, 300e9, _PCIE),
        Chip("l40s", 362e12, GPU_SHARE * 48e9, 864e9, _PCIE),
        Chip("rtx4090", 165e12, GPU_SHARE * 24e9, 1008e9, _PCIE),
        Chip("cpu", 1e11, 4 * GIB, 2e10, 1e10),
    )
}


@dataclass(frozen=True)
class Topology:
    """A number of chips of one kind.

    Attributes:
      name: name such as "v5e:4x8" or "h200:8".
      chip: the kind of chip.
      count: number of chips.
    """

    name: str
    chip: Chip
    count: int

    @property
    def is_tpu(self) -> bool:
        return bool(self.chip.shapes)

    @property
    def is_gpu(self) -> bool:
        return not self.is_tpu and self.chip.name != "cpu"

    @property
    def network(self) -> float:
        """Bytes/s that a chip sends to the others; that of the slowest network among them."""
        if self.is_gpu and self.count > _GPUS_PER_HOST:
            return min(_BETWEEN_HOSTS, self.chip.network)
        return self.chip.network

    @property
    def compiles_for_itself(self) -> bool:
        """Whether plans compile for these chips; those of GPUs compile for this machine's CPU."""
        return self.is_tpu or self.chip.name == "cpu"


def parse_topology(name: str) -> Topology:
    """Parse a topology such as "v5e:4x8" or "h200:8".

    Raises:
      UserError: the chip or the slice shape is unknown; the message names the nearest ones.
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
        raise UserError(f"--topology {name}: at most {_MAX_CHIPS:,} chips are supported")
    if not chip.shapes and (not count or len(sizes) > 1):
        raise UserError(f"--topology {name}: give a number of chips, such as {kind}:8")
    return Topology(name, chip, count)


def example_shape(chip: Chip) -> str:
    """Return an example of a slice shape, of 32 TPU chips."""
    return next((shape for shape in chip.shapes if _chip_count(shape) == 32), "8")


def _chip_count(shape: str) -> int:
    return math.prod(map(int, shape.split("x")))
