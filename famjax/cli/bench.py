"""`famjax bench fam`, `delta`, `lora`, `feedback`, `linear`, `eval`, `beam` and `mesh`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import tyro

from famjax.cli.bench_output import (
    BenchSizes,
    format_aim,
    format_median,
    missing_peers,
    paper_table,
    to_dict,
)
from famjax.cli.main import parse
from famjax.cli.tables import Output, Table
from famjax.config.schema import Config, DataConfig, LoraConfig, ModelConfig
from famjax.core.errors import UserError
from famjax.core.units import byte_size
from famjax.experiment.load import load_config
from famjax.experiment.memory import check_training_fits
from famjax.processes import runtime

# small enough for two cores; --config measures any other shape
_SMALL_FAM = ModelConfig(
    vocab_size=256, layers=2, width=256, heads=4, mlp_width=1024, block_len=512, fam_len=32
)

_SMALL_FEEDBACK = ModelConfig(vocab_size=256, layers=4, width=128, heads=4)
# heads have the same size as the paper's (T2R 3.2.1)
_SMALL_LINEAR = ModelConfig(
    vocab_size=256, layers=2, width=256, heads=2, head_dim=128, mlp_width=1024
)
# short blocks, because hypotheses are short
_SMALL_BEAM = replace(_SMALL_FAM, block_len=64, fam_len=8)
# eight heads, eight rows and eight blocks of a row, for eight devices
_SMALL_MESH = ModelConfig(
    vocab_size=256, layers=2, width=256, heads=8, mlp_width=1024, block_len=64, fam_len=8
)

# default numbers of rows, tokens per row and repetitions. For feedback they are small: its loop
# over tokens has no large products, and it measures many models
_SIZES = {
    "fam": (16, 1024, 7),
    "delta": (16, 1024, 7),
    "lora": (16, 1024, 7),
    "feedback": (32, 128, 3),
    "linear": (2, 16384, 5),
    "eval": (8, 16384, 5),
    "beam": (4, 64, 5),
    "mesh": (8, 512, 5),
}

# flags that only some of the benches read
_ONLY = {
    "layers": ("feedback",),
    "width": ("feedback",),
    "span": ("feedback",),
    "plot": ("feedback", "linear", "mesh"),
    "rank": ("lora",),
}


@dataclass(frozen=True)
class Arguments:
    """Measure the ratio of two programs in one process: the cost of memory (fam and delta: against
    BSWA of equal shape; feedback: training and generation against a Transformer, and against
    feedback-transformer-pytorch if installed); the savings of adapters (lora: against training all
    weights, and against PyTorch's peft if installed); linear attention (linear: alone, in decoding
    and in translation, against softmax attention, and against performer-pytorch if installed); the
    throughput of evaluation (eval: against the bare forward pass); beam search (beam: against
    greedy decoding, and against transformers if installed); the overhead of sharding a model along
    each mesh axis (mesh: 8 fake devices on a CPU, or all accelerators)."""

    name: tyro.conf.Positional[
        Literal["fam", "delta", "lora", "feedback", "linear", "eval", "beam", "mesh"]
    ]
    """What to measure."""
    config: str = ""
    """Take the model's shape from this config instead of a small one."""
    batch: int | None = None
    """Batch size: rows per training step and per streaming call.
    Default: 16; feedback 32, linear 2, eval and mesh 8, beam 4."""
    length: str = ""
    """Tokens per row (linear: the maximum; beam: tokens generated). Several lengths for feedback,
    such as 8,16,32,64, time only training steps of each length, with equal numbers of tokens.
    Default: 1024; feedback 128, mesh 512, linear and eval 16384, beam 64."""
    repetitions: int | None = None
    """Repetitions of each program, interleaved.
    Default: 7; feedback 3; linear, eval, beam and mesh 5."""
    layers: int | None = None
    """Number of layers, for feedback only. Default: that of the model."""
    width: int | None = None
    """Model width, for feedback only. Default: that of the model."""
    span: int | None = None
    """Attention span, for feedback only. Default: that of the model."""
    plot: str = ""
    """Plot to this .png, .svg or .pdf file, for feedback, linear and mesh."""
    rank: int = 64
    """Rank of the adapters, for lora."""
    json: bool = False
    """Print JSON instead of tables."""


def run(argv: list[str]) -> int:
    """Run the bench that is asked for, and print its tables, or JSON."""
    arguments, lengths = _fill_sizes(parse(Arguments, argv, "famjax bench"))
    runtime.setup()
    model = (
        load_config(arguments.config).model if arguments.config else _small_model(arguments.name)
    )
    # a config without a vocabulary size takes that of the byte tokenizer
    model = replace(model, vocab_size=model.vocab_size or 258)
    _check_sizes(arguments, model)
    # before anything asks JAX for its devices
    if arguments.name == "mesh":
        runtime.set_cpu_devices(8)
    elif arguments.name == "feedback":
        runtime.share_cores(arguments.batch)
    _check_memory(arguments, model)
    console = Output(stderr=arguments.json)
    note = Output(stderr=True)
    if arguments.name != "feedback" and not runtime.keeps_memory():
        note.print(
            "GLIBC_TUNABLES is already set, so memory is returned to the system between steps and "
            "page faults add noise to the times; unset it for more stable ones"
        )
    sizes = BenchSizes(
        arguments.batch, arguments.length, arguments.repetitions, arguments.plot, lengths
    )
    _BENCHES[arguments.name](model, arguments, sizes, console, note)
    return 0


def _check_memory(arguments: Any, model: ModelConfig) -> None:
    shape = _reshape(model, arguments) if arguments.name == "feedback" else model
    if arguments.name == "lora":
        shape = replace(shape, lora=LoraConfig(rank=arguments.rank))
    data = DataConfig(batch=arguments.batch, length=arguments.length)
    check_training_fits(Config(model=shape, data=data))


def _fill_sizes(arguments: Arguments) -> tuple[Any, tuple[int, ...]]:
    """Return the arguments with all sizes, and the lengths if there are several.

    The arguments have the longest length.
    """
    lengths = _parse_lengths(arguments)
    sizes = (arguments.batch, max(lengths, default=None), arguments.repetitions)
    pairs = zip(sizes, _SIZES[arguments.name], strict=True)
    batch, length, repetitions = (default if size is None else size for size, default in pairs)
    given: Any = arguments
    filled = replace(given, batch=batch, length=length, repetitions=repetitions)
    return filled, lengths if len(lengths) > 1 else ()


def _parse_lengths(arguments: Arguments) -> tuple[int, ...]:
    """Return the lengths, sorted; () are the bench's own."""
    if not arguments.length:
        return ()
    from famjax.tasks.parse import parse_lengths  # JAX, for which --help need not wait

    lengths = tuple(parse_lengths(arguments.length, "--length"))
    if len(lengths) > 1 and arguments.name != "feedback":
        raise UserError(f"--length {arguments.length}: bench {arguments.name} takes one length")
    for length in lengths:
        if lengths[-1] % length:
            raise UserError(
                f"--length {arguments.length}: {length} does not divide {lengths[-1]}, so that "
                "steps would have different numbers of tokens"
            )
    return lengths


def _small_model(name: str) -> ModelConfig:
    other = {"feedback": _SMALL_FEEDBACK, "linear": _SMALL_LINEAR, "mesh": _SMALL_MESH}
    other["beam"] = _SMALL_BEAM
    return other.get(name, _SMALL_FAM)


def _reshape(model: ModelConfig, arguments: Any) -> ModelConfig:
    """Return the model with the layers, width and span of the arguments."""
    width = arguments.width or model.width
    if width % model.heads:
        raise UserError(f"--width {width}: must be a multiple of the {model.heads} heads")
    span = arguments.span or model.feedback.span
    feedback = replace(model.feedback, span=span)
    layers = arguments.layers or model.layers
    block_len = math.gcd(arguments.length, 128)  # of the swa model
    return replace(model, layers=layers, width=width, feedback=feedback, block_len=block_len)


def _check_sizes(arguments: Any, model: ModelConfig) -> None:
    from famjax.bench.delta import BLOCKS
    from famjax.bench.fam import CHUNK, SIZES

    other = "an encoder" if model.encoder.layers and arguments.name != "feedback" else ""
    if arguments.name in _RESIDUAL and model.stack != "residual":
        other = f"model.stack={model.stack}"
    if other:
        raise UserError(
            f"--config {arguments.config}: has {other}, which bench {arguments.name} does not "
            "measure; take another config"
        )
    if arguments.name in ("fam", "lora") and CHUNK % model.block_len:
        raise UserError(f"model.block_len={model.block_len}: must divide {CHUNK} to be measured")
    if arguments.name == "delta" and model.layers % 2:
        raise UserError(
            f"model.layers={model.layers}: bench delta also measures a memory in every second "
            "layer; take an even number"
        )
    whole = max(BLOCKS) if arguments.name == "delta" else max(block for block, _ in SIZES)
    for flag, benches in _ONLY.items():
        is_given = (value := getattr(arguments, flag)) != getattr(Arguments, flag)
        if is_given and arguments.name not in benches:
            raise UserError(
                f"--{flag} {value}: is only for bench {', '.join(benches)}, not for "
                f"{arguments.name}; leave it out"
            )
    if arguments.repetitions < 2:
        raise UserError(f"--repetitions {arguments.repetitions}: a spread needs at least 2")
    if arguments.rank < 1:
        raise UserError(f"--rank {arguments.rank}: must be at least 1")
    if arguments.batch < 1:
        raise UserError(f"--batch {arguments.batch}: must be at least 1")
    for name in ("layers", "width", "span"):
        if (size := getattr(arguments, name)) is not None and size < 1:
            raise UserError(f"--{name} {size}: must be at least 1")
    if arguments.name in ("feedback", "linear", "eval", "beam", "mesh"):
        if arguments.length < 1:
            raise UserError(f"--length {arguments.length}: must be at least 1")
        return
    if arguments.length < 1 or arguments.length % whole:
        raise UserError(
            f"--length {arguments.length}: must be a multiple of the largest block, {whole}"
        )


# benches that change the mixers of the model
_RESIDUAL = ("fam", "delta", "lora", "linear", "beam")
_COST_COLUMNS = ("floor", "training", "gap", "median", "streaming", "gap", "median")


def _cost_cells(cost: Any) -> list[str]:
    """Return the cells of `_COST_COLUMNS` for a cost of a memory."""
    cells = [f"{cost.floor:.3f}"]
    for pair in (cost.training, cost.streaming):
        cells += [f"{pair.ratio:.3f}", f"{pair.ratio - cost.floor:+.3f}"]
        cells.append(f"{pair.typical:.2f} ± {pair.spread:.2f}")
    return cells


def _cost_to_dict(cost: Any) -> dict[str, Any]:
    pairs = {"training": cost.training._asdict(), "streaming": cost.streaming._asdict()}
    return cost._asdict() | pairs


def _bench_fam(
    model: ModelConfig, arguments: Any, sizes: BenchSizes, console: Output, note: Output
) -> None:
    from famjax.bench import fam

    costs = _bench_costs(fam, model, sizes, console, note)
    longs = _bench_long_documents(fam, model, console, note)
    compared = list(fam.compare_with_paper(longs))
    console.print(paper_table("TransformerFAM", compared))
    if arguments.json:
        report = {
            "costs": costs,
            "lengths": [to_dict(row) for row in longs],
            "paper": [to_dict(row) for row in compared],
        }
        print(json.dumps(report))


def _bench_costs(
    fam, model: ModelConfig, sizes: BenchSizes, console: Output, note: Output
) -> list[dict]:
    rows = []
    table = Table(
        f"FAM / BSWA, {model.layers} layers, width {model.width}, {sizes.batch} x {sizes.length}",
        ("block", "FAM", *_COST_COLUMNS),
    )
    for cost in fam.measure_costs(model, sizes.batch, sizes.length, sizes.repetitions):
        note.print(f"measured block {cost.block_len}, FAM {cost.fam_len}")
        table.add_row(str(cost.block_len), str(cost.fam_len), *_cost_cells(cost))
        rows.append(_cost_to_dict(cost))
    console.print(table)
    return rows


def _bench_delta(
    model: ModelConfig, arguments: Any, sizes: BenchSizes, console: Output, note: Output
) -> None:
    from famjax.bench import delta

    rows = []
    table = Table(
        f"Delta-rule memory / BSWA, {model.layers} layers, width {model.width}, "
        f"{sizes.batch} x {sizes.length}",
        ("mixer", "block", *_COST_COLUMNS),
        words=(0,),
    )
    for cost in delta.measure_costs(model, sizes.batch, sizes.length, sizes.repetitions):
        note.print(f"measured {cost.mixer}, block {cost.block_len}")
        table.add_row(cost.mixer, str(cost.block_len), *_cost_cells(cost))
        rows.append(_cost_to_dict(cost))
    console.print(table)
    if arguments.json:
        print(json.dumps(rows))


def _bench_long_documents(fam, model: ModelConfig, console: Output, note: Output) -> list[Any]:
    table = Table(
        "Reading a document and generating 256 tokens after it (Tables 13, 14)",
        ("tokens", "FAM s", "BSWA s", "ratio", "FAM peak", "BSWA peak", "FAM state"),
    )
    rows = []
    for row in fam.measure_long_documents(model, note.print):
        rows.append(row)
        table.add_row(
            f"{row.tokens:,}",
            f"{row.fam_seconds:.1f}",
            f"{row.bswa_seconds:.1f}",
            f"{row.fam_seconds / row.bswa_seconds:.3f}",
            byte_size(row.fam_bytes),
            byte_size(row.bswa_bytes),
            byte_size(row.state_bytes),
        )
    console.print(table)
    return rows


def _bench_evaluation(
    model: ModelConfig, arguments: Any, sizes: BenchSizes, console: Output, note: Output
) -> None:
    from famjax.bench import evaluation

    results = evaluation.compare(model, sizes.batch, sizes.length, sizes.repetitions)
    if arguments.json:
        print(json.dumps([to_dict(row) for row in results]))
        return
    table = Table(
        f"Evaluation against the forward pass alone, {model.mixer}, {model.layers} layers, width "
        f"{model.width}, {sizes.batch} documents of {sizes.length:,} tokens; upper bound 1",
        ("", "forward, tokens/s", "evaluation, tokens/s", "ratio", "median"),
        words=(0,),
    )
    for row in results:
        speeds = (f"{row.tokens / seconds:,.0f}" for seconds in (row.time.first, row.time.second))
        table.add_row(row.name, *speeds, f"{row.time.ratio:.3f}", format_median(row.time))
    console.print(table)
    lowest = min(row.time.ratio for row in results)
    console.print(format_aim("share of the bare throughput", lowest, 0.9, is_minimum=True))


def _bench_lora(
    model: ModelConfig, arguments: Any, sizes: BenchSizes, console: Output, note: Output
) -> None:
    from famjax.bench import lora

    model = lora.llama_config(model)
    setting = (model, arguments.rank, sizes.batch, sizes.length, sizes.repetitions)
    results = [lora.compare(*setting)]
    if lora.has_peers():
        results.append(lora.compare_peft(*setting))
    floor = lora.flops_floor(model, arguments.rank, sizes.length)
    if arguments.json:
        rows = [row._asdict() | {"time": row.time._asdict()} for row in results]
        print(
            json.dumps(
                {"floor": floor, "rows": rows}, default=lambda footprint: footprint._asdict()
            )
        )
        return
    table = Table(
        f"Adapters of rank {arguments.rank} against training all weights, Llama, {model.layers} "
        f"layers, width {model.width}, {sizes.batch} x {sizes.length} tokens, AdamW; "
        f"lower bound of the ratio by FLOPs {floor:.3f}",
        ("", "trained", "optimizer", "temporary", "step s", "ratio", "median"),
        words=(0,),
    )
    for row in results:
        for way, footprint, seconds in (
            ("adapters", row.adapters, row.time.first),
            ("all weights", row.everything, row.time.second),
        ):
            ours = way == "adapters"
            table.add_row(
                f"{row.name}: {way}",
                f"{footprint.trained:,}",
                byte_size(footprint.optimizer_bytes),
                byte_size(footprint.step_bytes) if footprint.step_bytes else "",
                f"{seconds:.3f}",
                f"{row.time.ratio:.3f}" if ours else "",
                f"{row.time.typical:.3f} ± {row.time.spread:.3f}" if ours else "",
            )
    console.print(table)
    if not lora.has_peers():
        console.print(missing_peers("PyTorch", lora.PEERS))


def _bench_feedback(
    model: ModelConfig, arguments: Any, sizes: BenchSizes, console: Output, note: Output
) -> None:
    from famjax.cli import bench_feedback

    measure = bench_feedback.run_lengths if sizes.lengths else bench_feedback.run
    measure(_reshape(model, arguments), sizes, arguments.json, console, note)


def _bench_linear(
    model: ModelConfig, arguments: Any, sizes: BenchSizes, console: Output, note: Output
) -> None:
    from famjax.cli import bench_linear

    alone = model if arguments.config else replace(model, heads=4, head_dim=64)
    bench_linear.run(alone, model, sizes, arguments.json, console, note)


def _bench_beam(
    model: ModelConfig, arguments: Any, sizes: BenchSizes, console: Output, note: Output
) -> None:
    from famjax.cli import bench_beam

    bench_beam.run(model, sizes, arguments.json, console, note)


def _bench_mesh(
    model: ModelConfig, arguments: Any, sizes: BenchSizes, console: Output, note: Output
) -> None:
    from famjax.cli import bench_mesh

    bench_mesh.run(model, sizes, arguments.json, console, note)


# (model, arguments, sizes, console, note) -> None: measures, and prints the tables or JSON. Each
# imports its own modules, so that a bench does not wait for those of the others
_Bench = Callable[[ModelConfig, Any, BenchSizes, Output, Output], None]
_BENCHES: dict[str, _Bench] = {
    "fam": _bench_fam,
    "delta": _bench_delta,
    "lora": _bench_lora,
    "feedback": _bench_feedback,
    "linear": _bench_linear,
    "eval": _bench_evaluation,
    "beam": _bench_beam,
    "mesh": _bench_mesh,
}
