"""What `famjax plan` prints for people."""

from __future__ import annotations

from typing import Any

from famjax.cli.tables import Output, Table
from famjax.core.config import Config
from famjax.plan.chips import Topology
from famjax.plan.plan import Plan
from famjax.plan.search import Found, named

# of time
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))

ARRAYS = {
    "trained": "parameters, trained",
    "frozen": "parameters, frozen",
    "optimizer": "optimizer",
    "carried": "carried to the next step",
    "state of a row": "state of one document",
}


def show(done: Plan) -> None:
    console = Output()
    source = "compiled for it by libtpu" if done.on.is_tpu else "compiled for this machine's CPU"
    mesh = " x ".join(f"{axis}={size}" for axis, size in done.seen["mesh"].items())
    chips = f"{done.on.count} chip{'s' * (done.on.count != 1)}"
    console.print(f"{done.config.name} on {done.on.name}, {chips}: {mesh}")
    for table in (_arrays(done), _memory(done, source)):
        console.print(table)
    if len(done.seen["activations"]) > 1:
        console.print(_policies(done))
    if done.roofline is not None:
        console.print(_work(done, source))
        console.print(_collectives(done, source))
        console.print(_time(done))
    for line in (*_notes(done), _verdict(done)):
        console.print(line)


def _arrays(done: Plan) -> Table:
    table = Table(
        "what is kept (from shapes and the mesh)", ("", "elements", "bytes", "a chip"), words=(0,)
    )
    for name, title in ARRAYS.items():
        of = done.seen["arrays"][name]
        here = "-" if name == "state of a row" else size(of["device_bytes"])
        table.add_row(title, number(of["elements"]), size(of["bytes"]), here)
    return table


def _memory(done: Plan, source: str) -> Table:
    table = Table(f"memory of a chip ({source})", ("", "bytes"), words=(0,))
    limit = done.seen.get("limit", done.on.chip.memory)
    if "memory" in done.seen:
        parts = done.seen["memory"]
        table.add_row("parameters, optimizer, batch", size(parts["arguments"]))
        table.add_row("results that need room of their own", size(parts["results"]))
        table.add_row(f"activations, temporaries (remat={done.config.model.remat})",
                      size(parts["temporaries"]))  # fmt: skip
        table.add_row("program", size(parts["code"]))
    table.add_row("needed", size(done.needed))
    table.add_row("there is", size(limit))
    return table


def _policies(done: Plan) -> Table:
    table = Table(
        "activations of a chip by model.remat (formula, rough)", ("", "bytes"), words=(0,)
    )
    for name, held in done.seen["activations"].items():
        table.add_row(f"model.remat={name}", size(held))
    return table


def _work(done: Plan, source: str) -> Table:
    table = Table("FLOPs of a step, all chips", ("", "FLOPs", "from"), words=(0, 2))
    all_chips = done.seen["flops"] * done.seen["devices"]
    table.add_row("pairs that the masks let through", number(done.model_flops), "formula")
    table.add_row("all pairs that are computed", number(done.computed_flops), "formula")
    table.add_row("of the program, recomputing too", number(all_chips), source)
    return table


def _collectives(done: Plan, source: str) -> Table | str:
    if not done.seen["collectives"]:
        chips = (
            "the one chip has no other" if done.on.count == 1 else "chips send each other nothing"
        )
        return f"collectives of a step: none, {chips}"
    columns = ("collective", "devices", "times", "bytes a chip sends", "largest")
    table = Table(f"collectives of a step ({source})", columns, words=(0,))
    for row in done.seen["collectives"]:
        table.add_row(
            row["kind"],
            str(row["group"]),
            f"{row['count']:.0f}",
            size(row["bytes"]),
            size(row["largest"]),
        )
    return table


def _time(done: Plan) -> Table:
    assert done.roofline is not None
    r, chip = done.roofline, done.on.chip
    table = Table(
        "a step takes at least (roofline of the program)", ("", "time", "at"), words=(0, 2)
    )
    table.add_row("compute", duration(r.compute), f"{number(chip.flops)}FLOP/s a chip")
    table.add_row("memory", duration(r.memory), f"{chip.bandwidth / 1e9:.0f} GB/s")
    table.add_row("compute or memory, by instruction", duration(r.device), "the longer of both")
    table.add_row("network", duration(r.network), f"{chip.network / 1e9:.0f} GB/s out of a chip")
    table.add_row("step, the network meanwhile", duration(r.step), f"limited by {r.limit}")
    table.add_row("step, the network alone", duration(r.apart), "nothing at the same time")
    return table


def _notes(done: Plan) -> list[str]:
    notes = []
    if not done.on.is_tpu:
        notes.append(
            "this machine's compiler fuses and stores otherwise than the chip's: bytes and "
            "temporaries are guides, FLOPs and collectives of large arrays alike"
        )
    if done.on.chip.name == "cpu":
        notes.append("the rates of a cpu stand for a server's core; only a run tells")
    if done.seen.get("kernels"):
        notes.append(
            f"FLOPs within {done.seen['kernels']:.0f} kernels or library calls not counted"
        )
    if done.seen.get("unknown_loops"):
        notes.append(f"{done.seen['unknown_loops']} loops of unknown length are counted once")
    notes += done.seen["repeated"]
    whole = [row["name"] for row in done.seen["shardings"] if row["whole"]]
    if whole:
        notes.append(f"whole on every device: {', '.join(whole)}; see --shardings")
    return notes


def _verdict(done: Plan) -> str:
    there = size(done.seen.get("limit", done.on.chip.memory))
    if not done.fits or done.roofline is None or done.utilisation is None:
        return (
            f"does not fit: {size(done.needed)} of {there} a chip; try --search, "
            "model.remat=block, train.accumulate, or more chips"
        )
    seconds = duration(done.roofline.step)
    return (
        f"fits: {size(done.needed)} of {there} a chip; a step of {done.tokens:,} tokens takes at "
        f"least {seconds}, model FLOPs utilisation at most {share(done.utilisation)}, "
        f"limited by {done.roofline.limit}"
    )


def show_search(config: Config, found: Found) -> None:
    console = Output()
    title = f"the best of {found.estimated} candidates, {found.fitting} fitting by formula"
    columns = ("overrides", "a chip", "a step", "tokens/s", "MFU", "limit")
    table = Table(title, columns, words=(0,))
    for done in found.best:
        assert done.roofline is not None
        assert done.utilisation is not None
        table.add_row(
            named(config, done.config),
            size(done.needed),
            duration(done.roofline.step),
            f"{done.tokens_per_second:,.0f}",
            share(done.utilisation),
            done.roofline.limit,
        )
    if found.best:
        console.print(table)
    else:
        console.print("none that was compiled fits: take more chips, or a higher --compiles")


def show_shardings(seen: dict[str, Any], on: Topology) -> None:
    console = Output()
    mesh = " x ".join(f"{axis}={size}" for axis, size in seen["mesh"].items())
    console.print(f"{on.name}: {mesh}")
    columns = ("parameter", "shape", "logical axes", "mesh axes", "on a device", "")
    table = Table("", columns, words=range(len(columns)))
    for row in seen["shardings"]:
        remark = "" if row["rule"] else "NO RULE"
        remark = "WHOLE on every device" if row["whole"] else remark
        table.add_row(
            row["name"],
            "x".join(map(str, row["shape"])),
            _axes(row["logical"]),
            _axes(row["mesh"]),
            "x".join(map(str, row["device_shape"])),
            remark,
        )
    console.print(table)
    whole = [row["name"] for row in seen["shardings"] if row["whole"]]
    ruleless = [row["name"] for row in seen["shardings"] if not row["rule"]]
    if whole:
        console.print(f"large and whole on every device: {', '.join(whole)}")
    if ruleless:
        console.print(f"without a rule in core/sharding.py: {', '.join(ruleless)}")


def _axes(axes: Any) -> str:
    names = ("+".join(a) if isinstance(a, list) else a or "-" for a in axes)
    return ", ".join(names)


def size(count: float) -> str:
    """Return bytes in the unit that suits."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:.2f} {unit}"
    return f"{count:.0f} B"


def number(count: float) -> str:
    """Return a count in the unit that suits."""
    for power, unit in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if count >= 10**power:
            return f"{count / 10**power:.2f} {unit}"
    return f"{count:,.0f}"


def duration(seconds: float) -> str:
    """Return seconds in the unit that suits, never "0.000"."""
    if not seconds:
        return "0 s"
    scale, unit = next(
        ((scale, unit) for scale, unit in _UNITS if seconds >= 0.9995 * scale), _UNITS[-1]
    )
    count = seconds / scale
    return f"{count:,.0f} {unit}" if count >= 999.5 else f"{count:.3g} {unit}"


def share(part: float) -> str:
    """Return a part of 1 as a percentage, small ones with the digits that they need."""
    return f"{part:.0%}" if part >= 0.0995 else f"{100 * part:.2g}%"
