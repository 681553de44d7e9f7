"""`famjax bench fam`, `lora`, `feedback`, `linear` and `mesh`."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import tyro

from famjax.cli.bench_output import Sizes, absent_peers
from famjax.cli.main import parse
from famjax.cli.tables import Output, Table
from famjax.core import runtime
from famjax.core.config import Config, DataConfig, LoraConfig, ModelConfig
from famjax.core.errors import UserError
from famjax.core.experiment import load_config
from famjax.core.memory import check_training_fits
from famjax.core.units import byte_size

# small enough for two cores; --config measures any other shape
_SMALL = ModelConfig(
    vocab_size=256, layers=2, width=256, heads=4, mlp_width=1024, block_len=512, fam_len=32
)

_SMALL_FEEDBACK = ModelConfig(vocab_size=256, layers=4, width=128, heads=4)
# heads as wide as the paper's (T2R 3.2.1)
_SMALL_LINEAR = ModelConfig(
    vocab_size=256, layers=2, width=256, heads=2, head_dim=128, mlp_width=1024
)
# eight heads, eight rows and eight blocks of a row, for eight devices
_SMALL_MESH = ModelConfig(
    vocab_size=256, layers=2, width=256, heads=8, mlp_width=1024, block_len=64, fam_len=8
)

# rows, tokens of a row and turns, where they are not given; feedback's loop over tokens has no
# large products, and many models take turns
_SIZES = {
    "fam": (16, 1024, 7),
    "lora": (16, 1024, 7),
    "feedback": (32, 128, 3),
    "linear": (2, 16384, 5),
    "mesh": (8, 512, 5),
}

# flags that only some of them read
_ONLY = {
    "layers": ("feedback",),
    "width": ("feedback",),
    "span": ("feedback",),
    "plot": ("feedback", "linear", "mesh"),
    "rank": ("lora",),
}


@dataclass(frozen=True)
class Bench:
    """Measure, in one run: what feedback memory costs (fam: against BSWA of equal shape; feedback:
    a Feedback Transformer's training and generation against a Transformer's, and beside
    feedback-transformer-pytorch if installed); what adapters spare (lora: against training
    everything, and beside PyTorch's peft if installed); what linear attention costs and gains
    (linear: alone, and in decoding, beside softmax attention and performer-pytorch if
    installed); what dividing a model over devices costs, along each axis of the mesh (mesh: 8 fake
    ones of a CPU machine, or all accelerators)."""

    name: tyro.conf.Positional[Literal["fam", "lora", "feedback", "linear", "mesh"]]
    """what to measure"""
    config: str = ""
    """take the model's shape from this config instead of a small one"""
    batch: int | None = None
    """rows of the training step and of the streaming call: 16, feedback 32, linear 2, mesh 8"""
    length: int | None = None
    """tokens of a row: 1024, feedback 128, mesh 512; linear: at most so many, 16384"""
    turns: int | None = None
    """times each program runs, in turns with the others: 7, feedback 3, linear and mesh 5"""
    layers: int | None = None
    """feedback: instead of the shape's"""
    width: int | None = None
    """feedback: instead of the shape's"""
    span: int | None = None
    """feedback: tokens that are remembered, instead of the shape's"""
    plot: str = ""
    """feedback, linear, mesh: a file to draw into, .png, .svg or .pdf"""
    rank: int = 64
    """lora: of the adapters"""
    json: bool = False
    """print one JSON object instead of tables"""


def run(argv: list[str]) -> int:
    """Print the ratio of the least times, the floor and the gap; then time and memory by length."""
    asked = _filled(parse(Bench, argv, "famjax bench"))
    runtime.setup()
    model = load_config(asked.config).model if asked.config else _small(asked.name)
    # a config without a vocabulary takes that of its tokenizer: bytes
    model = replace(model, vocab_size=model.vocab_size or 258)
    _check(asked, model)
    _refuse_large(asked, model)
    console = Output(stderr=asked.json)
    note = Output(stderr=True)
    if asked.name != "feedback" and not runtime.keeps_memory():
        note.print(
            "GLIBC_TUNABLES was set already, so memory goes back to the system between steps and "
            "times jump by its page faults; unset it for steadier ones"
        )
    if asked.name == "lora":
        _lora(model, asked, console)
        return 0
    sizes = Sizes(asked.batch, asked.length, asked.turns, asked.plot)
    if asked.name == "linear":
        from famjax.cli import bench_linear

        alone = model if asked.config else replace(model, heads=4, head_dim=64)
        bench_linear.run(alone, model, sizes, asked.json, console, note)
        return 0
    if asked.name == "mesh":
        from famjax.cli import bench_mesh

        runtime.set_cpu_devices(8)
        bench_mesh.run(model, sizes, asked.json, console, note)
        return 0
    if asked.name == "feedback":
        from famjax.cli import bench_feedback

        runtime.share_cores(asked.batch)
        bench_feedback.run(_reshaped(model, asked), sizes, asked.json, console, note)
        return 0
    from famjax.bench import fam

    costs = _costs(fam, model, asked, console, note)
    longs = _longs(fam, model, console, note)
    if asked.json:
        print(json.dumps({"costs": costs, "lengths": longs}))
    return 0


def _refuse_large(asked: Any, model: ModelConfig) -> None:
    shape = _reshaped(model, asked) if asked.name == "feedback" else model
    if asked.name == "lora":
        shape = replace(shape, lora=LoraConfig(rank=asked.rank))
    data = DataConfig(batch=asked.batch, length=asked.length)
    check_training_fits(Config(model=shape, data=data))


def _filled(asked: Bench) -> Any:
    """Return what was asked for, with the bench's own sizes where none were given."""
    given = (asked.batch, asked.length, asked.turns)
    pairs = zip(given, _SIZES[asked.name], strict=True)
    batch, length, turns = (size if given is None else given for given, size in pairs)
    return replace(asked, batch=batch, length=length, turns=turns)


def _small(name: str) -> ModelConfig:
    other = {"feedback": _SMALL_FEEDBACK, "linear": _SMALL_LINEAR, "mesh": _SMALL_MESH}
    return other.get(name, _SMALL)


def _reshaped(model: ModelConfig, asked: Any) -> ModelConfig:
    """Return the model with the layers, width and span asked for."""
    width = asked.width or model.width
    if width % model.heads:
        raise UserError(f"--width {width}: must be a multiple of the {model.heads} heads")
    span = asked.span or model.feedback.span
    feedback = replace(model.feedback, span=span)
    layers = asked.layers or model.layers
    block_len = math.gcd(asked.length, 128)  # of swa beside it
    return replace(model, layers=layers, width=width, feedback=feedback, block_len=block_len)


def _check(asked: Any, model: ModelConfig) -> None:
    from famjax.bench.fam import CHUNK, SIZES

    if asked.name in ("fam", "lora") and CHUNK % model.block_len:
        raise UserError(f"model.block_len={model.block_len}: must divide {CHUNK} to be measured")
    whole = max(block for block, _ in SIZES)
    for flag, benches in _ONLY.items():
        if (value := getattr(asked, flag)) != getattr(Bench, flag) and asked.name not in benches:
            raise UserError(
                f"--{flag} {value}: bench {asked.name} does not read it, {' and '.join(benches)} "
                f"{'do' if len(benches) > 1 else 'does'}; leave it out"
            )
    if asked.turns < 2:
        raise UserError(f"--turns {asked.turns}: a spread takes at least 2")
    if asked.rank < 1:
        raise UserError(f"--rank {asked.rank}: must be at least 1")
    if asked.batch < 1:
        raise UserError(f"--batch {asked.batch}: must be at least 1")
    for name in ("layers", "width", "span"):
        if (size := getattr(asked, name)) is not None and size < 1:
            raise UserError(f"--{name} {size}: must be at least 1")
    if asked.name in ("feedback", "linear", "mesh"):
        if asked.length < 1:
            raise UserError(f"--length {asked.length}: must be at least 1")
        return
    if asked.length < 1 or asked.length % whole:
        raise UserError(
            f"--length {asked.length}: must be a multiple of the largest block, {whole}"
        )


def _costs(fam, model: ModelConfig, asked: Any, console: Output, note: Output) -> list[dict]:
    rows = []
    table = Table(
        f"FAM / BSWA, {model.layers} layers, width {model.width}, {asked.batch} x {asked.length}",
        ("block", "FAM", "floor", "training", "gap", "turns", "streaming", "gap", "turns"),
    )
    for cost in fam.costs(model, asked.batch, asked.length, asked.turns):
        note.print(f"measured block {cost.block_len}, FAM {cost.fam_len}")
        train, stream = cost.training, cost.streaming
        table.add_row(
            str(cost.block_len),
            str(cost.fam_len),
            f"{cost.floor:.3f}",
            f"{train.ratio:.3f}",
            f"{train.ratio - cost.floor:+.3f}",
            f"{train.typical:.2f} ± {train.spread:.2f}",
            f"{stream.ratio:.3f}",
            f"{stream.ratio - cost.floor:+.3f}",
            f"{stream.typical:.2f} ± {stream.spread:.2f}",
        )
        rows.append(cost._asdict() | {"training": train._asdict(), "streaming": stream._asdict()})
    console.print(table)
    return rows


def _longs(fam, model: ModelConfig, console: Output, note: Output) -> list[dict]:
    table = Table(
        "Reading a document, 256 tokens generated behind it (Tables 13, 14)",
        ("tokens", "FAM s", "BSWA s", "ratio", "FAM peak", "BSWA peak", "FAM state"),
    )
    rows = []
    for row in fam.long_documents(model, note.print):
        rows.append(row._asdict())
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


def _lora(model: ModelConfig, asked: Any, console: Output) -> None:
    from famjax.bench import lora

    model = lora.llama(model)
    given = (model, asked.rank, asked.batch, asked.length, asked.turns)
    found = [lora.compare(*given)]
    if lora.peers():
        found.append(lora.compare_peft(*given))
    least = lora.floor(model, asked.rank, asked.length)
    if asked.json:
        rows = [row._asdict() | {"time": row.time._asdict()} for row in found]
        print(json.dumps({"floor": least, "rows": rows}, default=lambda kept: kept._asdict()))
        return
    table = Table(
        f"Adapters of rank {asked.rank} against training everything, a Llama of {model.layers} "
        f"layers, width {model.width}, {asked.batch} x {asked.length} tokens, AdamW; "
        f"floor of the ratio {least:.3f}",
        ("", "trained", "optimizer", "step's arrays", "step s", "ratio", "median"),
        words=(0,),
    )
    for row in found:
        for way, kept, seconds in (
            ("adapters", row.adapters, row.time.first),
            ("everything", row.everything, row.time.second),
        ):
            ours = way == "adapters"
            table.add_row(
                f"{row.name}: {way}",
                f"{kept.trained:,}",
                byte_size(kept.optimizer_bytes),
                byte_size(kept.step_bytes) if kept.step_bytes else "",
                f"{seconds:.3f}",
                f"{row.time.ratio:.3f}" if ours else "",
                f"{row.time.typical:.3f} ± {row.time.spread:.3f}" if ours else "",
            )
    console.print(table)
    if not lora.peers():
        console.print(absent_peers("PyTorch", lora.PEERS))
