"""`famjax bench beam`: tables."""

from __future__ import annotations

import json

from famjax.bench import beam as bench
from famjax.cli.bench_output import BenchSizes, format_aim, format_median, missing_peers, to_dict
from famjax.cli.tables import Output, Table
from famjax.config.schema import ModelConfig


def run(
    model: ModelConfig, sizes: BenchSizes, as_json: bool, console: Output, note: Output
) -> None:
    """Measure, and print the tables or one JSON object."""
    setting = (model, sizes.batch, sizes.length, sizes.repetitions)
    costs = []
    for cost in bench.measure_costs(*setting):
        note.print(f"measured {cost.mixer}")
        costs.append(cost)
    console.print(_costs_table(costs, model, sizes))
    least = min(cost.equal.ratio for cost in costs)
    console.print(format_aim("share of greedy decoding", least, bench.GREEDY_AIM, least=True))
    peer = bench.measure_peer(*setting) if bench.has_peers() else None
    if peer is None:
        console.print(missing_peers("transformers", bench.PEERS))
    else:
        console.print(_peer_table(peer, model, sizes))
        console.print(format_aim("speedup", peer.time.ratio, bench.PEER_AIM, least=True))
    if as_json:
        rows = [to_dict(cost) for cost in costs]
        print(json.dumps({"costs": rows, "peer": None if peer is None else to_dict(peer)}))


def _costs_table(costs: list[bench.BeamCost], model: ModelConfig, sizes: BenchSizes) -> Table:
    table = Table(
        f"Beam search with {bench.BEAMS} beams, {_shape(model, sizes)}: tokens/s per hypothesis, "
        "and the ratio to greedy decoding with as many hypotheses, and with one hypothesis per row",
        ("", "beam", "greedy", "ratio", "median", "greedy, one per row", "ratio", "median"),
        words=(0,),
    )
    for cost in costs:
        beam, equal, single = (
            f"{sizes.length / seconds:,.0f}"
            for seconds in (cost.equal.second, cost.equal.first, cost.single.first)
        )
        table.add_row(
            cost.mixer,
            beam,
            equal,
            f"{cost.equal.ratio:.2f}",
            format_median(cost.equal),
            single,
            f"{cost.single.ratio:.2f}",
            format_median(cost.single),
        )
    return table


def _peer_table(peer: bench.BeamPeer, model: ModelConfig, sizes: BenchSizes) -> Table:
    table = Table(
        f"Beam search of transformers against famjax, a Llama of {_shape(model, sizes)}, including "
        "the prompts",
        ("transformers, tokens/s", "famjax", "speedup", "median", "same hypotheses"),
    )
    written = sizes.batch * bench.BEAMS * sizes.length
    table.add_row(
        f"{written / peer.time.first:,.0f}",
        f"{written / peer.time.second:,.0f}",
        f"{peer.time.ratio:.2f}",
        format_median(peer.time),
        f"{peer.same:.0%}",
    )
    return table


def _shape(model: ModelConfig, sizes: BenchSizes) -> str:
    return (
        f"{model.layers} layers, width {model.width}, {sizes.batch} rows, {sizes.length} tokens "
        f"after {bench.PROMPT}"
    )
