"""`famjax bench feedback`: tables and plot."""

from __future__ import annotations

import json
from pathlib import Path

from famjax.bench import feedback as bench
from famjax.bench import feedback_peers as peers
from famjax.bench import feedback_translation as translation
from famjax.bench.timing import PairedTimes
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
from famjax.config.schema import ModelConfig
from famjax.core.units import byte_size


def run(
    model: ModelConfig, sizes: BenchSizes, as_json: bool, console: Output, note: Output
) -> None:
    """Measure, print the tables or one JSON object, and plot."""
    plot = plot_file(sizes.plot) if sizes.plot else None
    setting = (model, sizes.batch, sizes.length, sizes.repetitions)
    note.print("training steps")
    steps = list(bench.measure_training(*setting))
    rows = bench.measure_rows_floor(*setting)
    max_difference = bench.compare_gradients(model, 2, min(sizes.length, 24))
    console.print(_training_table(steps, rows, max_difference, model, sizes))
    for line in _training_aims(steps):
        console.print(line)
    generated = list(bench.measure_generation(model, sizes.repetitions, note.print))
    console.print(_generation_table(generated, model))
    console.print(_generation_aim(generated))
    note.print("translation")
    translated = list(translation.measure_translation(*setting))
    console.print(_translation_table(translated, model, sizes))
    compared = [
        *bench.compare_with_paper(steps, generated),
        *translation.compare_with_paper(translated),
    ]
    console.print(paper_table("the Feedback Transformer's papers", compared))
    peer_rows = []
    if peers.is_installed():
        note.print(peers.NAME)
        peer_rows = list(peers.measure_peers(model, sizes.batch, sizes.length, 2))
        console.print(_peers_table(peer_rows, model, sizes))
    else:
        console.print(missing_peers(peers.NAME, peers.PEERS))
    if as_json:
        report = {
            "steps": [to_dict(step) for step in steps],
            "rows_floor": rows._asdict(),
            "max_difference_to_plain_autodiff": max_difference,
            "generation": [to_dict(row) for row in generated],
            "translation": [to_dict(row) for row in translated],
            "paper": [to_dict(row) for row in compared],
            "peers": [to_dict(row) for row in peer_rows],
        }
        print(json.dumps(report))
    if plot:
        _draw(steps, generated, plot)
        note.print(f"wrote {plot}")


def run_lengths(
    model: ModelConfig, sizes: BenchSizes, as_json: bool, console: Output, note: Output
) -> None:
    """Measure training steps by the length of their rows; print a table or JSON, and plot."""
    plot = plot_file(sizes.plot) if sizes.plot else None
    note.print("training steps by length")
    rows = list(bench.measure_lengths(model, sizes.batch, sizes.lengths, sizes.repetitions))
    console.print(_lengths_table(rows, model, sizes))
    compared = [bench.compare_lengths_with_paper(rows)]
    console.print(paper_table("the Feedback Transformer's papers", compared))
    if as_json:
        report = {
            "lengths": [to_dict(row) for row in rows],
            "paper": [to_dict(row) for row in compared],
        }
        print(json.dumps(report))
    if plot:
        _draw_lengths(rows, plot)
        note.print(f"wrote {plot}")


def _lengths_table(rows: list[bench.LengthStep], model: ModelConfig, sizes: BenchSizes) -> Table:
    table = Table(
        f"Training step by the length of back-propagation, {_shape(model)}, "
        f"{sizes.batch * sizes.length:,} tokens",
        ("length", "rows", "", "ms", "/ transformer", "median"),
        words=(2,),
    )
    for row in rows:
        table.add_row(
            str(row.length),
            str(row.batch),
            row.name.removeprefix("feedback, "),
            f"{1000 * row.time.first:.0f}",
            f"{row.time.ratio:.2f}",
            format_median(row.time),
        )
    return table


def _translation_table(
    rows: list[translation.TranslationSpeed], model: ModelConfig, sizes: BenchSizes
) -> Table:
    table = Table(
        f"Translation, an encoder of {model.layers} layers and decoders of {translation.DECODER}, "
        f"width {model.width}, {sizes.batch} pairs of {sizes.length} and {sizes.length} tokens: "
        "tokens/s of targets, greedy decoding, its encoder included",
        ("", "training", "/ transformer", "median", "decoding", "/ transformer", "median"),
        words=(0,),
    )
    for row in rows:
        table.add_row(
            row.name.removeprefix("feedback, "),
            f"{row.training_speed:,.0f}",
            f"{row.training.ratio:.2f}",
            format_median(row.training),
            f"{row.decoding_speed:,.0f}",
            f"{row.decoding.ratio:.2f}",
            format_median(row.decoding),
        )
    return table


def _training_table(
    steps: list[bench.TrainingStep],
    rows: PairedTimes,
    max_difference: float,
    model: ModelConfig,
    sizes: BenchSizes,
) -> Table:
    table = Table(
        f"Training step, {_shape(model)}, {sizes.batch} x {sizes.length} tokens. Matrix products "
        f"with {sizes.batch} rows, as in the scan over tokens, take {rows.ratio:.2f} times as long "
        "as with all tokens at once; gradients differ from those of plain autodiff by at most "
        f"{max_difference:.1e} of their range",
        ("", "s", "/ transformer", "median", "/ swa", "FLOPs ratio", "temporary", "last sweep"),
        words=(0,),
    )
    for step in steps:
        change = step.sweep_change
        table.add_row(
            step.name.removeprefix("feedback, "),
            f"{step.transformer.first:.3f}",
            f"{step.transformer.ratio:.2f}",
            format_median(step.transformer),
            f"{step.swa.ratio:.2f}",
            f"{step.floor:.3f}",
            byte_size(step.temporary_bytes),
            "" if change is None else f"{change:.1e}",
        )
    return table


def _training_aims(steps: list[bench.TrainingStep]) -> list[str]:
    by_name = {step.name: step for step in steps}
    ours, theirs = by_name["feedback"], by_name["transformer"]
    memory = ours.temporary_bytes / max(theirs.temporary_bytes, 1)
    return [
        format_aim("training step / transformer's", ours.transformer.ratio, bench.TRAINING_AIM),
        format_aim("temporary bytes / transformer's", memory, bench.MEMORY_AIM),
    ]


def _generation_aim(rows: list[bench.Generation]) -> str:
    best = bench.best_generation(rows)
    quantity = f"tokens/s / transformer's after {best.span:,}, best (equal {best.equal})"
    return format_aim(quantity, best.ratio, bench.GENERATION_AIM, is_minimum=True)


def _generation_table(rows: list[bench.Generation], model: ModelConfig) -> Table:
    table = Table(
        f"Generation, one token at a time, {model.layers} layers, width {model.width}, "
        "feedback / Transformer",
        ("before", "", "equal", "batch", "state", "tokens/s", "ratio", "median"),
        words=(1, 2),
    )
    for row in rows:
        scale = row.batch / row.other_batch
        table.add_row(
            f"{row.span:,}",
            row.name.removeprefix("feedback, "),
            row.equal,
            f"{row.batch} / {row.other_batch}",
            f"{byte_size(row.state_bytes)} / {byte_size(row.other_state_bytes)}",
            f"{row.tokens_per_second:,.0f} / {row.other_tokens_per_second:,.0f}",
            f"{row.ratio:.2f}",
            f"{scale / row.time.typical:.2f}",
        )
    return table


def _peers_table(rows: list[peers.FeedbackPeer], model: ModelConfig, sizes: BenchSizes) -> Table:
    table = Table(
        f"Forward and backward, {peers.NAME} against famjax, {model.layers} layers, "
        f"{sizes.batch} x {sizes.length} tokens, aim {peers.AIM:.0f}; the package differs in: "
        f"{peers.DIFFERENCES}; without these, the difference of the logits is in the last column",
        ("width", "package s", "famjax s", "speedup", "median", "difference"),
    )
    for row in rows:
        table.add_row(
            str(row.width),
            f"{row.time.first:.3f}",
            f"{row.time.second:.3f}",
            f"{row.time.ratio:.2f}",
            format_median(row.time),
            f"{row.max_difference:.1e}",
        )
    return table


def _shape(model: ModelConfig) -> str:
    return f"{model.layers} layers, width {model.width}, span {model.feedback.span}"


def _draw_lengths(rows: list[bench.LengthStep], path: Path) -> None:
    figure, axes = new_figure()
    for name in dict.fromkeys(row.name for row in rows):
        mine = [row for row in rows if row.name == name]
        axes.plot(
            [row.length for row in mine], [1000 * row.time.first for row in mine], "o-", label=name
        )
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens of back-propagation", ylabel="ms a step", ylim=(0, None))
    axes.legend()
    save_figure(figure, path)


def _draw(steps: list[bench.TrainingStep], rows: list[bench.Generation], path: Path) -> None:
    figure, (left, right) = new_figure(1, 2, (10, 4))
    left.barh([step.name for step in steps], [step.transformer.ratio for step in steps])
    left.axvline(bench.TRAINING_AIM, color="grey", linestyle=":", label="aim")
    left.invert_yaxis()
    left.set(xlabel="training step / transformer's")
    left.legend()
    for kind in dict.fromkeys((row.name, row.equal, row.other_batch) for row in rows):
        name, equal, batch = kind
        mine = [row for row in rows if (row.name, row.equal, row.other_batch) == kind]
        label = f"{name}, equal {equal} ({batch})"
        right.plot([row.span for row in mine], [row.ratio for row in mine], "o-", label=label)
    right.axhline(bench.GENERATION_AIM, color="grey", linestyle=":", label="aim")
    right.set_xscale("log", base=2)
    right.set(xlabel="tokens before", ylabel="tokens/s / transformer's", ylim=(0, None))
    right.legend(fontsize="small")
    save_figure(figure, path)
