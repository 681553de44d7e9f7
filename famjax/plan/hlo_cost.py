"""Cost analysis of compiled HLO: FLOPs, memory traffic and network traffic.

`Compiled.cost_analysis()` counts the body of a loop once, whatever its trip count. Here a body
counts as often as it runs. All numbers are for one device and one run of the program.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from famjax.plan.hlo import Computation, HloArray, HloModule, Instruction
from famjax.plan.trip_count import trip_count

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# opcodes that cause no memory traffic
_FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
        *("partition-id", "replica-id", "opt-barrier", "add-dependency", "domain"),
    )
)
# custom calls that only mark something or allocate a buffer
_MARKS = ("AllocateBuffer", "AsyncCollectiveStart", "AsyncCollectiveDone", "Sharding")


@dataclass
class Collective:
    """Collectives of one kind over groups of one size.

    Attributes:
      count: number of executions.
      bytes: total bytes that a device sends with the best ring algorithm.
      largest: bytes that a device sends in the largest execution.
    """

    kind: str
    group: int
    count: float = 0.0
    bytes: float = 0.0
    largest: float = 0.0


@dataclass
class HloCost:
    """Costs of one run of a program on one device.

    Attributes:
      flops: FLOPs of dots and convolutions, two per multiply-add, including rematerialization.
      bytes: bytes read from and written to main memory.
      seconds: sum over instructions of the larger of compute and memory time.
      collectives: collectives by kind and group size.
      phases: number of executions of each asynchronous collective, by channel.
      kernels: number of executions of custom calls with unknown FLOPs.
      unknown_loops: number of loops with an unknown trip count, whose bodies count once.
    """

    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    collectives: dict[tuple[str, int], Collective] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    kernels: float = 0.0
    unknown_loops: int = 0

    def network_bytes(self) -> float:
        return sum(c.bytes for c in self.collectives.values())


def count_cost(module: HloModule, peak: float = math.inf, bandwidth: float = math.inf) -> HloCost:
    """Count the costs on one device.

    Args:
      peak: FLOP/s of the device.
      bandwidth: bytes/s of its main memory.
    """
    total_cost = HloCost()
    _walk(module, module.computations[module.entry], 1.0, total_cost, peak, bandwidth)
    return total_cost


def _walk(
    module: HloModule,
    computation: Computation,
    times: float,
    total_cost: HloCost,
    peak: float,
    bandwidth: float,
) -> None:
    for i in computation.instructions.values():
        if i.opcode == "while":
            trips = trip_count(module, computation, i)
            total_cost.unknown_loops += trips is None
            body = module.computations[i.called_computations("body")[0]]
            iterations = times * (1 if trips is None else trips)
            _walk(module, body, iterations, total_cost, peak, bandwidth)
            continue
        if i.opcode == "conditional":
            names = i.called_computations(
                "branch_computations", "true_computation", "false_computation"
            )
            _walk_costliest(module, names, times, total_cost, peak, bandwidth)
            continue
        if i.opcode in ("call", "async-start"):
            for name in i.called_computations("to_apply", "calls"):
                _walk(module, module.computations[name], times, total_cost, peak, bandwidth)
            continue
        for inner, c in _find_collectives(module, computation, i):
            channel = re.search(r"channel_id=(\d+)", c.attributes)
            phase = channel[1] if channel and i.opcode == "fusion" else None
            _add_collective(inner, c, times, phase, total_cost)
        flops = _count_flops(module, computation, i)
        moved = _count_bytes(module, computation, i)
        total_cost.flops += times * flops
        total_cost.bytes += times * moved
        total_cost.seconds += times * max(flops / peak, moved / bandwidth)
        total_cost.kernels += times * (i.opcode == "custom-call" and moved > 0)


def _walk_costliest(
    module: HloModule,
    names: list[str],
    times: float,
    total_cost: HloCost,
    peak: float,
    bandwidth: float,
) -> None:
    """Count only the slowest branch of a conditional."""
    branches = []
    for name in names:
        branch = HloCost()
        _walk(module, module.computations[name], times, branch, peak, bandwidth)
        branches.append(branch)
    costliest = max(branches, key=lambda c: (c.seconds, c.flops, c.bytes))
    for f in ("flops", "bytes", "seconds", "kernels", "unknown_loops"):
        setattr(total_cost, f, getattr(total_cost, f) + getattr(costliest, f))
    for c in costliest.collectives.values():
        total = total_cost.collectives.setdefault((c.kind, c.group), Collective(c.kind, c.group))
        total.count, total.bytes = total.count + c.count, total.bytes + c.bytes
        total.largest = max(total.largest, c.largest)


def _find_collectives(
    module: HloModule, computation: Computation, i: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    """Yield the instruction if it is a collective, or the collectives within a fusion."""
    if i.opcode.removesuffix("-start") in COLLECTIVES:
        yield computation, i
    elif i.opcode == "fusion":
        for name in i.called_computations("calls"):
            inner = module.computations[name]
            for within in inner.instructions.values():
                yield from _find_collectives(module, inner, within)


def _add_collective(
    computation: Computation, i: Instruction, times: float, phase: str | None, total_cost: HloCost
) -> None:
    """Count a collective.

    Args:
      phase: the channel of an asynchronous collective. Such a collective appears in all fusions and
        loops that overlap with it, and runs as often as the one with the fewest executions.
    """
    kind, n = i.opcode.removesuffix("-start"), group_size(i.attributes)
    if n <= 1:
        return
    operands = [computation.instructions[o] for o in i.operands if o in computation.instructions]
    size = sum(array.bytes for instruction in operands for array in instruction.arrays)
    # bytes that each device sends for operands of `size` bytes, by the optimal ring algorithm
    share = {
        "all-gather": n - 1,
        "all-reduce": 2 * (n - 1) / n,
        "reduce-scatter": (n - 1) / n,
        "all-to-all": (n - 1) / n,
        "ragged-all-to-all": (n - 1) / n,
    }.get(kind, 1)
    more = times
    if phase is not None:
        before = total_cost.phases.get(phase)
        total_cost.phases[phase] = times if before is None else min(before, times)
        more = total_cost.phases[phase] - (before or 0)
    total = total_cost.collectives.setdefault((kind, n), Collective(kind, n))
    total.count += more
    total.bytes += more * size * share
    total.largest = max(total.largest, size * share)


def group_size(attributes: str) -> int:
    """Return the number of devices in one group of a collective."""
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", attributes)
    if pairs:
        moves = [p for p in re.findall(r"(\d+),(\d+)", pairs[1]) if p[0] != p[1]]
        return len({n for p in moves for n in p}) or 1
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(listed[1].split(","))
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
        return int(iota[2])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    return 1


def _count_flops(module: HloModule, computation: Computation, i: Instruction) -> float:
    if i.opcode == "dot":
        return _dot_flops(computation, i)
    if i.opcode == "convolution":
        return _convolution_flops(computation, i)
    if i.opcode == "fusion":
        inner = [module.computations[name] for name in i.called_computations("calls")]
        return sum(
            _count_flops(module, c, instruction)
            for c in inner
            for instruction in c.instructions.values()
        )
    if i.opcode == "custom-call" and "matmul" in i.attributes:
        # a oneDNN product, which contracts the last axis of its first operand
        return 2 * math.prod(i.arrays[0].dims) * _operand(computation, i, 0).dims[-1]
    return 0.0


def _operand(computation: Computation, i: Instruction, n: int) -> HloArray:
    return computation.instructions[i.operands[n]].arrays[0]


def _dot_flops(computation: Computation, i: Instruction) -> float:
    summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", i.attributes)
    dims = _operand(computation, i, 0).dims
    axes = [int(n) for n in summed[1].split(",") if n] if summed else []
    return 2.0 * math.prod(i.arrays[0].dims) * math.prod(dims[a] for a in axes)


def _convolution_flops(computation: Computation, i: Instruction) -> float:
    """Return the FLOPs of a convolution: two per pair of an input element and a weight.

    Padding and the holes of dilation do not count. XLA for TPU expresses every dot as a
    convolution, with batches as strided and padded windows.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes)
    if not labels:
        return 0.0
    inputs, weights, made = labels.groups()
    x, kernel, out = (
        _operand(computation, i, 0).dims,
        _operand(computation, i, 1).dims,
        i.arrays[0].dims,
    )
    pairs = 2.0 * out[made.index("b")] * out[made.index("f")] * kernel[weights.index("i")]
    for axis in (c for c in made if c.isdigit()):
        window = _window(i.attributes, int(axis), len(made) - 2)
        pairs *= _count_overlaps(
            x[inputs.index(axis)], out[made.index(axis)], kernel[weights.index(axis)], **window
        )
    return pairs


def _window(attributes: str, axis: int, axes: int) -> dict[str, int]:
    """Return stride, padding and dilations of a convolution's window along one axis."""
    text = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(re.findall(r"(\w+)=(\S+)", text[1])) if text else {}

    def parse_field(name: str, default: str) -> str:
        return fields.get(name, "x".join([default] * axes)).split("x")[axis]

    return {
        "stride": int(parse_field("stride", "1")),
        "pad": int(parse_field("pad", "0_0").split("_")[0]),
        "dilate": int(parse_field("lhs_dilate", "1")),
        "dilate_kernel": int(parse_field("rhs_dilate", "1")),
    }


def _count_overlaps(
    size: int, out: int, kernel: int, stride: int, pad: int, dilate: int, dilate_kernel: int
) -> int:
    """Return how many pairs of output and window position are at an input element."""
    last = (size - 1) * dilate
    if stride == dilate == dilate_kernel == 1 and pad == 0 and out + kernel - 1 <= size:
        return out * kernel
    return sum(
        0 <= (at := o * stride + k * dilate_kernel - pad) <= last and at % dilate == 0
        for o in range(out)
        for k in range(kernel)
    )


def _count_bytes(module: HloModule, computation: Computation, i: Instruction) -> float:
    """Return the bytes that an instruction reads from and writes to main memory."""
    if i.opcode in _FREE or i.opcode.endswith("-done") or i.opcode.endswith("-update"):
        return 0.0
    if i.opcode == "custom-call" and any(f'"{mark}"' in i.attributes for mark in _MARKS):
        return 0.0
    operands = [computation.instructions[o] for o in i.operands if o in computation.instructions]
    if i.opcode in ("copy-start", "slice-start"):
        # the result contains both source and destination
        to = i.arrays[0].main_bytes if i.opcode == "copy-start" else i.arrays[-2].main_bytes
        source = operands[0].arrays[0]
        return to + (min(source.bytes, max(a.bytes for a in i.arrays[-2:])) if source[2] else 0)
    written = sum(a.main_bytes for a in i.arrays)
    if i.opcode in ("dynamic-slice", "slice", "gather"):
        return written + (min(i.arrays[0].bytes, operands[0].arrays[0].main_bytes))
    if i.opcode == "dynamic-update-slice":
        return 2 * operands[1].arrays[0].main_bytes
    if i.opcode == "fusion":
        return _fusion_bytes(module.computations[i.called_computations("calls")[0]], operands, i)
    return written + sum(a.main_bytes for instruction in operands for a in instruction.arrays)


def _fusion_bytes(inner: Computation, operands: list[Instruction], i: Instruction) -> float:
    """Return the main-memory bytes of a fusion.

    Of an operand that is sliced only the slices count, and of one that is updated in place only the
    update.
    """
    total = 0.0
    updated = _in_place_updates(inner)
    for parameter, instruction in zip(inner.parameters(), operands, strict=True):
        main = sum(a.main_bytes for a in instruction.arrays)
        users = [u for u in inner.instructions.values() if parameter.name in u.operands]
        while len(users) == 1 and users[0].opcode == "bitcast":
            name = users[0].name
            users = [u for u in inner.instructions.values() if name in u.operands]
        if users and all(u.opcode in ("dynamic-slice", "slice", "gather") for u in users):
            main = min(main, sum(u.arrays[0].bytes for u in users))
        elif parameter.name in updated:
            main = 0.0
        total += main
    written = sum(a.main_bytes for a in i.arrays)
    for update, whole in updated.values():
        written -= min(written, whole - update)
    return total + written


def _in_place_updates(inner: Computation) -> dict[str, tuple[float, float]]:
    """Return the parameters that a fusion updates in place: bytes of the update, total bytes."""
    updates: dict[str, tuple[float, float]] = {}
    roots = [inner.root]
    if inner.root.opcode == "tuple":
        roots = [inner.instructions[o] for o in inner.root.operands]
    for root in roots:
        while root.opcode == "bitcast":
            root = inner.instructions[root.operands[0]]
        if root.opcode != "dynamic-update-slice":
            continue
        base = inner.instructions[root.operands[0]]
        while base.opcode == "bitcast":
            base = inner.instructions[base.operands[0]]
        if base.opcode == "parameter":
            update = inner.instructions[root.operands[1]].arrays[0].bytes
            updates[base.name] = (update, root.arrays[0].bytes)
    return updates


def widened_bytes(module: HloModule) -> float:
    """Return the bytes of the float32 copies that a program makes of bfloat16 arguments.

    XLA for CPU computes products of bfloat16 in float32, and converts whole arguments before the
    loops that read their layers. Accelerators multiply bfloat16 as it is.
    """
    entry = module.computations[module.entry]
    narrow = {i.name: i.arrays[0].dims for i in entry.parameters() if i.arrays[0].dtype == "bf16"}
    copies = [
        i.arrays[0]
        for i in entry.instructions.values()
        if i.opcode in ("convert", "fusion") and len(i.operands) == len(i.arrays) == 1
        if i.arrays[0].dtype == "f32" and i.arrays[0].dims == narrow.get(i.operands[0])
    ]
    return sum(copy.bytes for copy in copies)


def collective_rows(total_cost: HloCost) -> list[dict[str, float | str]]:
    """Return a row for each kind and group size of collectives, by descending bytes."""
    rows = sorted(total_cost.collectives.values(), key=lambda c: -c.bytes)
    return [dataclasses.asdict(c) for c in rows]
