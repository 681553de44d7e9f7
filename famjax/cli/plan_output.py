"""Tables of `famjax plan`."""

from __future__ import annotations

from typing import Any

from famjax.cli.tables import Output, Table
from famjax.config.schema import Config
from famjax.core.units import counted
from famjax.plan.chips import GPU_SHARE, MAX_GPU_SHARE, Topology
from famjax.plan.plan import Plan
from famjax.plan.search import SearchResult, format_overrides

# units of time
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))

ARRAYS = {
    "trained": "parameters, trained",
    "frozen": "parameters, frozen",
    "optimizer": "optimizer",
    "carried": "carried to the next step",
    "state of a row": "state of one document",
}


def show(plan: Plan) -> None:
    console = Output()
    source = "compiled by libtpu" if plan.topology.is_tpu else "compiled for this machine's CPU"
    mesh = " x ".join(f"{axis}={size}" for axis, size in plan.report["mesh"].items())
    chips = counted(plan.topology.count, "chip")
    console.print(f"{plan.config.name} on {plan.topology.name}, {chips}: {mesh}")
    for table in (_arrays_table(plan), _memory_table(plan, source)):
        console.print(table)
    if len(plan.report["activations"]) > 1:
        console.print(_remat_table(plan))
    if plan.roofline is not None:
        console.print(_flops_table(plan, source))
        console.print(_collectives_table(plan, source))
        console.print(_time_table(plan))
    for line in (*_notes(plan), _verdict(plan)):
        console.print(line)


def _arrays_table(plan: Plan) -> Table:
    table = Table(
        "arrays (from shapes and the mesh)", ("", "elements", "bytes", "per chip"), words=(0,)
    )
    for name, title in ARRAYS.items():
        row = plan.report["arrays"][name]
        here = "-" if name == "state of a row" else format_bytes(row["device_bytes"])
        table.add_row(title, format_count(row["elements"]), format_bytes(row["bytes"]), here)
    return table


def _memory_table(plan: Plan, source: str) -> Table:
    table = Table(f"memory per chip ({source})", ("", "bytes"), words=(0,))
    limit = plan.report.get("limit", plan.topology.chip.memory)
    if "memory" in plan.report:
        parts = plan.report["memory"]
        table.add_row("parameters, optimizer, batch", format_bytes(parts["arguments"]))
        table.add_row("results not aliased to arguments", format_bytes(parts["results"]))
        table.add_row(f"activations, temporaries (remat={plan.config.model.remat})",
                      format_bytes(parts["temporaries"]))  # fmt: skip
        table.add_row("program", format_bytes(parts["code"]))
        if plan.report["widened"]:
            copies = format_bytes(plan.report["widened"])
            table.add_row("float32 copies of bfloat16 weights, on CPUs only", f"-{copies}")
    table.add_row("needed", format_bytes(plan.needed))
    table.add_row("available", format_bytes(limit))
    return table


def _remat_table(plan: Plan) -> Table:
    table = Table("activations per chip by model.remat (rough formula)", ("", "bytes"), words=(0,))
    for name, held in plan.report["activations"].items():
        table.add_row(f"model.remat={name}", format_bytes(held))
    return table


def _flops_table(plan: Plan, source: str) -> Table:
    table = Table("FLOPs of a step, all chips", ("", "FLOPs", "from"), words=(0, 2))
    all_chips = plan.report["flops"] * plan.report["devices"]
    table.add_row("query-key pairs inside the masks", format_count(plan.model_flops), "formula")
    table.add_row("all computed query-key pairs", format_count(plan.computed_flops), "formula")
    table.add_row("compiled program, with rematerialization", format_count(all_chips), source)
    return table


def _collectives_table(plan: Plan, source: str) -> Table | str:
    if not plan.report["collectives"]:
        chips = "there is one chip" if plan.topology.count == 1 else "chips exchange nothing"
        return f"collectives of a step: none, {chips}"
    columns = ("collective", "devices", "count", "bytes sent per chip", "largest")
    table = Table(f"collectives of a step ({source})", columns, words=(0,))
    for row in plan.report["collectives"]:
        table.add_row(
            row["kind"],
            str(row["group"]),
            f"{row['count']:.0f}",
            format_bytes(row["bytes"]),
            format_bytes(row["largest"]),
        )
    return table


def _time_table(plan: Plan) -> Table:
    assert plan.roofline is not None
    r, chip = plan.roofline, plan.topology.chip
    table = Table(
        "lower bound of a step (roofline of the program)", ("", "time", "at"), words=(0, 2)
    )
    table.add_row("compute", format_seconds(r.compute), f"{format_count(chip.flops)}FLOP/s a chip")
    own = plan.topology.compiles_for_itself
    rate = f"{chip.bandwidth / 1e9:.0f} GB/s"
    table.add_row("memory", format_seconds(r.memory), rate if own else f"{rate}, arguments only")
    either = "compute or memory"
    table.add_row(
        f"{either}, by instruction" if own else either, format_seconds(r.device), "the larger"
    )
    table.add_row(
        "network",
        format_seconds(r.network),
        f"{plan.topology.network / 1e9:.0f} GB/s out of a chip",
    )
    table.add_row("step, network overlapped", format_seconds(r.step), f"limited by {r.limit}")
    table.add_row("step, network not overlapped", format_seconds(r.serial), "one after the other")
    return table


def _notes(plan: Plan) -> list[str]:
    notes = []
    if not plan.topology.is_tpu:
        notes.append(
            "this machine's compiler fuses and allocates differently from the chip's: bytes and "
            "temporaries are rough, FLOPs and collectives of large arrays are the same"
        )
    if not plan.topology.compiles_for_itself:
        notes.append(
            "the memory traffic of a step is not known; a step may take several times as long as "
            "this bound. Temporaries contain attention weights, which kernels of GPUs do not keep"
        )
    if plan.topology.network < plan.topology.chip.network:
        notes.append(
            "all communication is counted at the rate of the network between machines; within one "
            f"it is {plan.topology.chip.network / 1e9:.0f} GB/s"
        )
    if plan.topology.chip.name == "cpu":
        notes.append("the rates of a cpu are rough figures of a server core; measure with a run")
    if plan.report.get("kernels"):
        notes.append(
            f"FLOPs within {plan.report['kernels']:.0f} kernels or library calls not counted"
        )
    if plan.report.get("unknown_loops"):
        notes.append(f"{plan.report['unknown_loops']} loops of unknown length are counted once")
    notes += plan.report["repeated"]
    whole = [row["name"] for row in plan.report["shardings"] if row["whole"]]
    if whole:
        notes.append(f"replicated on every device: {', '.join(whole)}; see --shardings")
    return notes


def _verdict(plan: Plan) -> str:
    available = format_bytes(plan.report.get("limit", plan.topology.chip.memory))
    if not plan.fits or plan.roofline is None or plan.utilization is None:
        needed = f"does not fit: {format_bytes(plan.needed)} of {available} a chip"
        max_bytes = plan.topology.chip.memory * MAX_GPU_SHARE / GPU_SHARE
        if plan.topology.is_gpu and plan.needed <= max_bytes:
            return (
                f"{needed}, the {GPU_SHARE:.0%} of a GPU that JAX takes by default; it would have "
                f"{format_bytes(max_bytes)} with XLA_PYTHON_CLIENT_MEM_FRACTION={MAX_GPU_SHARE}"
            )
        return f"{needed}; try --search, model.remat=block, train.accumulate, or more chips"
    seconds = format_seconds(plan.roofline.step)
    return (
        f"fits: {format_bytes(plan.needed)} of {available} a chip; a step of {plan.tokens:,} "
        f"tokens takes at least {seconds}, model FLOPs utilization at most "
        f"{format_percent(plan.utilization)}, limited by {plan.roofline.limit}"
    )


def show_search(config: Config, result: SearchResult) -> None:
    console = Output()
    title = f"the best of {result.estimated} candidates, {result.fitting} fitting by formula"
    columns = ("overrides", "a chip", "a step", "tokens/s", "MFU", "limit")
    table = Table(title, columns, words=(0,))
    for plan in result.best:
        assert plan.roofline is not None
        assert plan.utilization is not None
        table.add_row(
            format_overrides(config, plan.config),
            format_bytes(plan.needed),
            format_seconds(plan.roofline.step),
            f"{plan.tokens_per_second:,.0f}",
            format_percent(plan.utilization),
            plan.roofline.limit,
        )
    if result.best:
        console.print(table)
    else:
        console.print("no compiled candidate fits: take more chips, or a higher --compiles")


def show_shardings(report: dict[str, Any], topology: Topology) -> None:
    console = Output()
    mesh = " x ".join(f"{axis}={size}" for axis, size in report["mesh"].items())
    console.print(f"{topology.name}: {mesh}")
    columns = ("parameter", "shape", "logical axes", "mesh axes", "on a device", "")
    table = Table("", columns, words=range(len(columns)))
    for row in report["shardings"]:
        remark = "" if row["rule"] else "NO RULE"
        remark = "REPLICATED" if row["whole"] else remark
        table.add_row(
            row["name"],
            "x".join(map(str, row["shape"])),
            _axes(row["logical"]),
            _axes(row["mesh"]),
            "x".join(map(str, row["device_shape"])),
            remark,
        )
    console.print(table)
    whole = [row["name"] for row in report["shardings"] if row["whole"]]
    ruleless = [row["name"] for row in report["shardings"] if not row["rule"]]
    if whole:
        console.print(f"large and replicated on every device: {', '.join(whole)}")
    if ruleless:
        console.print(f"without a rule in parallel/sharding.py: {', '.join(ruleless)}")


def _axes(axes: Any) -> str:
    names = ("+".join(a) if isinstance(a, list) else a or "-" for a in axes)
    return ", ".join(names)


def format_bytes(count: float) -> str:
    """Return bytes in a suitable unit."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.2f} {unit}"
    return f"{count:.0f} B"


def format_count(count: float) -> str:
    """Return a count with a suitable prefix."""
    for power, unit in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if count >= 10**power:
            return f"{count / 10**power:.2f} {unit}"
    return f"{count:,.0f}"


def format_seconds(seconds: float) -> str:
    """Return seconds in a unit that does not round them to 0."""
    if not seconds:
        return "0 s"
    scale, unit = next(
        ((scale, unit) for scale, unit in _UNITS if seconds >= 0.9995 * scale), _UNITS[-1]
    )
    count = seconds / scale
    return f"{count:,.0f} {unit}" if count >= 999.5 else f"{count:.3g} {unit}"


def format_percent(part: float) -> str:
    """Return a fraction as a percentage; below 10% with two significant digits."""
    return f"{part:.0%}" if part >= 0.0995 else f"{100 * part:.2g}%"
