"""The overhead of sharding: a training step on 2, 4, 8, ... devices along each axis of the mesh.

The batch size is constant (strong scaling). Fake devices share the cores of one machine, so the
floor is the time of one device, and the slowdown is the overhead. With real devices the floor is
the time of one device divided by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from famjax.bench.steps import prepare_step
from famjax.bench.timing import PairedTimes, compare_times, time_interleaved
from famjax.config.schema import AXES, MeshConfig, ModelConfig
from famjax.core.errors import UserError
from famjax.parallel import sharding
from famjax.plan import hlo, hlo_cost


class MeshTiming(NamedTuple):
    """A training step on a mesh with one axis.

    Attributes:
      axis: one of `famjax.config.schema.AXES`; "" for one device.
      devices: number of devices along the axis.
      time: times of the step, and of one device's step.
      tokens_per_second: throughput at the minimum time.
      sent: bytes that a device sends in a step, for each kind of collective.
      largest: bytes of the largest collective of each kind.
      temporary_bytes: temporary bytes of a device.
    """

    axis: str
    devices: int
    time: PairedTimes
    tokens_per_second: float
    sent: dict[str, float]
    largest: dict[str, float]
    temporary_bytes: int


class _Step(NamedTuple):
    run: Callable[[], Any]
    collectives: list[dict[str, Any]]
    temporary_bytes: int


def measure_scaling(
    model: ModelConfig, batch: int, length: int, repetitions: int, report: Callable[[str], None]
) -> Iterator[MeshTiming]:
    """Measure each axis on 2, 4, 8, ... devices and on one, interleaved.

    Raises:
      UserError: there is only one device, or an axis does not divide its dimension.
    """
    steps = {}
    for axis, count in bench_meshes(jax.device_count()):
        report(f"compiling for {axis or 'one device'}{f'={count}' if axis else ''}")
        steps[axis, count] = _step(model, batch, length, axis, count)
    report(f"measuring {len(steps)} programs, {repetitions} repetitions")
    times = time_interleaved({name: step.run for name, step in steps.items()}, repetitions)
    for (axis, count), step in steps.items():
        seconds = times[axis, count]
        yield MeshTiming(
            axis,
            count,
            compare_times(seconds, times["", 1]),
            batch * length / min(seconds),
            _by_kind(step.collectives, "bytes", sum),
            _by_kind(step.collectives, "largest", max),
            step.temporary_bytes,
        )


def bench_meshes(devices: int) -> list[tuple[str, int]]:
    """Return pairs of an axis and a number of devices along it; the first pair is one device.

    Raises:
      UserError: there is only one device.
    """
    if devices == 1:
        raise UserError(
            "bench mesh needs several devices, there is one; on a CPU set XLA_FLAGS="
            "--xla_force_host_platform_device_count=8"
        )
    counts = [2**k for k in range(1, devices.bit_length()) if 2**k <= devices]
    return [("", 1), *((axis, count) for axis in AXES for count in counts)]


def _step(model: ModelConfig, batch: int, length: int, axis: str, count: int) -> _Step:
    sizes = MeshConfig(**{name: count if name == axis else 1 for name in AXES})
    mesh = sharding.make_mesh(sizes, jax.devices()[:count])
    program, state, rows = prepare_step(model, batch, length, mesh)
    compiled = program.step.lower(state, rows).compile()  # type: ignore[attr-defined]
    # rates of 1, since they do not affect the bytes that are sent
    counted = hlo_cost.count_cost(hlo.parse(compiled.as_text()), 1.0, 1.0)

    def run() -> Any:
        nonlocal state
        state = compiled(state, rows)
        return state

    return _Step(
        run, hlo_cost.collective_rows(counted), compiled.memory_analysis().temp_size_in_bytes
    )


def _by_kind(
    rows: list[dict[str, Any]], key: str, join: Callable[[list[float]], float]
) -> dict[str, float]:
    kinds = sorted({row["kind"] for row in rows})
    return {kind: join([row[key] for row in rows if row["kind"] == kind]) for kind in kinds}
