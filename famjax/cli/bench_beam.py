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
    lowest = min(cost.equal.ratio for cost in costs)
    console.print(format_aim("share of greedy decoding", lowest, bench.GREEDY_AIM, is_minimum=True))
    peers: dict[str, bench.BeamPeer] = {}
    if bench.has_peers():
        peers["Llama"] = bench.measure_peer(*setting)
        peers["Marian"] = bench.measure_translation_peer(*setting)
        console.print(_peer_table(peers, model, sizes))
        lowest = min(peer.time.ratio for peer in peers.values())
        console.print(format_aim("speedup", lowest, bench.PEER_AIM, is_minimum=True))
    else:
        console.print(missing_peers("transformers", bench.PEERS))
    if as_json:
        by_name = {name: to_dict(peer) for name, peer in peers.items()}
        print(json.dumps({"costs": [to_dict(cost) for cost in costs], "peers": by_name}))


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


def _peer_table(peers: dict[str, bench.BeamPeer], model: ModelConfig, sizes: BenchSizes) -> Table:
    table = Table(
        f"Beam search of transformers against famjax, {_shape(model, sizes)}, prompts included; a "
        "Marian has as many encoder layers, too, and reads a source for a prompt",
        ("", "transformers, tokens/s", "famjax", "speedup", "median", "same hypotheses"),
        words=(0,),
    )
    written = sizes.batch * bench.BEAMS * sizes.length
    for name, peer in peers.items():
        table.add_row(
            name,
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
