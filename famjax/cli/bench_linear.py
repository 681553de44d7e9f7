"""`famjax bench linear`: tables and plot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from famjax.bench import linear as bench
from famjax.bench import linear_peers as peers
from famjax.bench.linear import Attention, Decoding
from famjax.cli.bench_output import (
    BenchSizes,
    format_aim,
    format_median,
    missing_peers,
    paper_table,
    to_dict,
)
from famjax.cli.figures import new_figure, save_figure
from famjax.cli.plot import plot_file
from famjax.cli.tables import Output, Table
from famjax.config.resolved import resolve_model
from famjax.config.schema import ModelConfig
from famjax.core.errors import UserError
from famjax.core.units import byte_size


def run(
    alone: ModelConfig,
    model: ModelConfig,
    sizes: BenchSizes,
    as_json: bool,
    console: Output,
    note: Output,
) -> None:
    """Measure, print the tables or one JSON object, and plot.

    Args:
      alone: model config with the heads, features and chunk for the bench of attention alone.
      model: model config for the bench of decoding.
      sizes: rows, tokens, repetitions and plot file.
      as_json: whether to print one JSON object.
      console, note: outputs for tables, and for progress.
    """
    shortest = bench.LENGTHS[0]
    if sizes.length < shortest:
        raise UserError(f"--length {sizes.length}: must be at least {shortest}")
    plot = plot_file(sizes.plot) if sizes.plot else None
    setting = (alone, sizes.batch, sizes.length, sizes.repetitions)
    attended = list(bench.measure_attention(*setting, note.print))
    console.print(_attention_table(attended, alone, sizes))
    for line in _attention_aims(attended):
        console.print(line)
    peer_rows = []
    if peers.is_installed():
        note.print(peers.NAME)
        peer_rows = list(peers.measure_peers(alone, sizes.batch, sizes.length, 2))
        console.print(_peers_table(peer_rows))
    else:
        console.print(missing_peers(peers.NAME, peers.PEERS))
    decoded = list(bench.measure_decoding(model, sizes.repetitions, note.print))
    console.print(_decoding_table(decoded, model))
    for line in _decoding_aims(decoded):
        console.print(line)
    translator = replace(model, encoder=replace(model.encoder, layers=model.layers))
    translated = list(bench.measure_decoding(translator, sizes.repetitions, note.print))
    console.print(_decoding_table(translated, translator))
    compared = list(bench.compare_with_paper(decoded, translated))
    console.print(paper_table("T2R", compared))
    if as_json:
        report = {
            "attention": [to_dict(row) for row in attended],
            "peers": [to_dict(row) for row in peer_rows],
            "decoding": [to_dict(row) for row in decoded],
            "translation": [to_dict(row) for row in translated],
            "paper": [to_dict(row) for row in compared],
        }
        print(json.dumps(report))
    if plot:
        _draw(decoded, translated, plot)
        note.print(f"wrote {plot}")


def _attention_table(rows: list[Attention], model: ModelConfig, sizes: BenchSizes) -> Table:
    k, e = model.linear.features, resolve_model(model).head_dim
    table = Table(
        f"Attention alone, forward and backward, {sizes.batch} rows, {model.heads} heads of {e}, "
        f"{k} features, chunks of {model.linear.chunk}; skipped (-): over "
        f"{bench.MAX_SECONDS:.0f} s or {bench.MAX_BYTES / 1e9:.0f} GB",
        ("tokens", "", "ms", "/ chunkwise", "median", "/ floor", "median", "difference"),
        words=(1,),
    )
    for row in rows:
        if row.time is None:
            table.add_row(f"{row.length:,}", row.name, "-")
            continue
        table.add_row(
            f"{row.length:,}",
            row.name,
            f"{row.time.first * 1e3:.1f}",
            f"{row.time.ratio:.2f}",
            format_median(row.time),
            f"{row.floor.ratio:.2f}" if row.floor else "",
            format_median(row.floor) if row.floor else "",
            "" if row.max_difference is None else f"{row.max_difference:.0e}",
        )
    return table


def _attention_aims(rows: list[Attention]) -> list[str]:
    others = [row for row in rows if row.time and row.name != "chunkwise"]
    slowest = max((row.floor for row in rows if row.floor), key=lambda floor: floor.ratio)
    nearest = min(others, key=lambda row: row.time.ratio if row.time else 0)
    assert nearest.time
    quantity = f"nearest other form's time ({nearest.name}, {nearest.length:,} tokens) / ours"
    lines = [format_aim(quantity, nearest.time.ratio, 1.0, is_minimum=True)]
    for row in others:
        if row.time and (row.name, row.length) == ("softmax", bench.AIM_LENGTH):
            quantity = f"softmax's time / ours at {row.length:,} tokens"
            lines.append(format_aim(quantity, row.time.ratio, bench.SOFTMAX_AIM, is_minimum=True))
    return [*lines, format_aim("time / floor, at worst", slowest.ratio, bench.FLOOR_AIM)]


def _peers_table(rows: list[peers.LinearPeer]) -> Table:
    table = Table(
        f"{peers.NAME} against the chunkwise form, forward and backward, equal features",
        ("tokens", "package ms", "famjax ms", "speedup", "median", "difference"),
    )
    for row in rows:
        table.add_row(
            f"{row.length:,}",
            f"{row.time.first * 1e3:.1f}",
            f"{row.time.second * 1e3:.1f}",
            f"{row.time.ratio:.2f}",
            format_median(row.time),
            f"{row.max_difference:.0e}",
        )
    return table


def _decoding_table(rows: list[Decoding], model: ModelConfig) -> Table:
    why = bench.fold_obstacle(model)
    what = "Translation of as many tokens" if model.encoder.layers else "Decoding"
    table = Table(
        f"{what}, greedy, {bench.LANES} lanes, {model.layers} layers, width {model.width}, "
        f"{model.linear.features} features, after this many tokens; "
        f"T2R's map {f'not folded: {why}' if why else 'folded'}",
        ("tokens", "", "tokens/s", "attention"),
        words=(1,),
    )
    for row in rows:
        speed = f"{row.tokens_per_second:,.0f}" if row.seconds else "-"
        size = byte_size(row.state_bytes) if row.seconds else ""
        table.add_row(f"{row.length:,}", row.name, speed, size)
    return table


def _decoding_aims(rows: list[Decoding]) -> list[str]:
    by_key = {(row.name, row.length): row for row in rows}
    context = bench.AIM_CONTEXT
    longest = by_key["T2R", max(bench.CONTEXTS)]
    ours = by_key["T2R", context]
    lines = []
    if bench.is_measured(rows, "transformer", context):
        ratio = bench.relative_speed(rows, "transformer", context)
        quantity = f"tokens/s / transformer's at {context:,} tokens"
        lines.append(format_aim(quantity, ratio, bench.TRANSFORMER_AIM, is_minimum=True))
    flat = longest.tokens_per_second / ours.tokens_per_second
    quantity = f"tokens/s at {longest.length:,} tokens / at {context:,}"
    lines.append(format_aim(quantity, flat, bench.FLAT_AIM, is_minimum=True))
    for name in ("elu", "rfa"):
        # their work does not depend on the length, so all repetitions count
        ratio = bench.relative_speed(rows, name)
        lines.append(format_aim(f"tokens/s / {name}'s", ratio, bench.MAPS_AIM, is_minimum=True))
    share = bench.relative_bytes(rows)
    return [*lines, format_aim("attention's bytes / elu's", share, bench.BYTES_AIM)]


def _draw(decoded: list[Decoding], translated: list[Decoding], path: Path) -> None:
    """Plot speed (Figure 2) and attention's memory (Figure 3) against length, with translation."""
    figure, panels = new_figure(2, 2, (10, 8))
    titles = "language model", "encoder-decoder, sources of equal length"
    for rows, title, (left, right) in zip((decoded, translated), titles, panels, strict=True):
        for name in dict.fromkeys(row.name for row in rows):
            mine = [row for row in rows if row.name == name and row.seconds]
            lengths = [row.length for row in mine]
            left.plot(lengths, [row.tokens_per_second for row in mine], "o-", label=name)
            right.plot(lengths, [row.state_bytes / 1e6 for row in mine], "o-", label=name)
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set(xlabel="tokens", title=title)
        left.set(ylabel="tokens/s", ylim=(0, None))
        right.set(ylabel="MB of attention state", yscale="log")
        left.legend(fontsize="small")
    save_figure(figure, path)
