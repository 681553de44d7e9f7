"""`famjax bench mesh`: tables and plot."""

from __future__ import annotations

import json
from pathlib import Path

from famjax.bench import mesh as bench
from famjax.cli.bench_output import BenchSizes, format_median, to_dict
from famjax.cli.figures import new_figure, save_figure
from famjax.cli.plot import plot_file
from famjax.cli.tables import Output, Table
from famjax.config.schema import AXES, ModelConfig
from famjax.core.units import byte_size


def run(
    model: ModelConfig, sizes: BenchSizes, as_json: bool, console: Output, note: Output
) -> None:
    """Measure, print the tables or one JSON object, and plot."""
    plot = plot_file(sizes.plot) if sizes.plot else None
    setting = (model, sizes.batch, sizes.length, sizes.repetitions)
    timings = list(bench.measure_scaling(*setting, note.print))
    for table in (_step_table(timings, model, sizes), _collectives_table(timings)):
        console.print(table)
    if as_json:
        print(json.dumps([to_dict(row) for row in timings]))
    if plot:
        _draw(timings, plot)
        note.print(f"wrote {plot}")


def _step_table(timings: list[bench.MeshTiming], model: ModelConfig, sizes: BenchSizes) -> Table:
    table = Table(
        f"Training step of {model.mixer} sharded over devices, {model.layers} layers, width "
        f"{model.width}, {sizes.batch} x {sizes.length} tokens",
        ("mesh", "step s", "tokens/s", "/ one device", "step / one's", "temporary"),
        words=(0,),
    )
    for row in timings:
        table.add_row(
            _name(row),
            f"{row.time.first:.3f}",
            f"{row.tokens_per_second:,.0f}",
            f"{1 / row.time.ratio:.2f}",
            format_median(row.time),
            byte_size(row.temporary_bytes),
        )
    return table


def _collectives_table(timings: list[bench.MeshTiming]) -> Table | str:
    kinds = _kinds(timings)
    if not kinds:
        return "no collectives in these steps"
    table = Table(
        "bytes sent per device and step / largest collective", ("mesh", *kinds), words=(0,)
    )
    for row in timings[1:]:
        table.add_row(_name(row), *(_format_sent(row, kind) for kind in kinds))
    return table


def _name(row: bench.MeshTiming) -> str:
    return f"{row.axis}={row.devices}" if row.axis else "one device"


def _kinds(timings: list[bench.MeshTiming]) -> list[str]:
    return sorted({kind for row in timings for kind in row.sent})


def _format_sent(row: bench.MeshTiming, kind: str) -> str:
    if kind not in row.sent:
        return ""
    return f"{byte_size(row.sent[kind])} / {byte_size(row.largest[kind])}"


def _draw(timings: list[bench.MeshTiming], path: Path) -> None:
    figure, (left, right) = new_figure(1, 2, (11, 4))
    one, *divided = timings
    for axis in AXES:
        rows = [one, *(row for row in divided if row.axis == axis)]
        shares = [1 / row.time.ratio for row in rows]
        left.plot([row.devices for row in rows], shares, "o-", label=axis)
    left.set_xscale("log", base=2)
    left.set(xlabel="devices", ylabel="tokens/s / one device's", ylim=(0, None))
    left.legend()
    names, below = [f"{row.axis} {row.devices}" for row in divided], [0.0] * len(divided)
    for kind in _kinds(timings):
        sent = [row.sent.get(kind, 0) / 1e6 for row in divided]
        right.bar(names, sent, bottom=below, label=kind)
        below = [a + b for a, b in zip(below, sent, strict=True)]
    right.tick_params("x", rotation=60)
    right.set(ylabel="MB sent per device and step")
    right.legend(fontsize="small")
    save_figure(figure, path)
