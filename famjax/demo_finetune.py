"""The finetuning demo: a pretrained model is converted to one with memory, and learns to use it.

`make demo-finetune` pretrains a tiny Llama on Python's standard library; exports it as a Hugging
Face folder; converts that to a window with a delta-rule memory, and to the window alone (BSWA);
finetunes both with the same LoRA on passkey retrieval, with a row of text in each batch; evaluates
them before and after, at lengths beyond training; and exports the first one, with its adapters
merged, with streaming PyTorch code. `make demo-finetune-full` adds two more seeds of the delta-rule
memory, FAM with three seeds, FAM with the paper's sum, and the delta-rule memory with three seeds
and the key anywhere. `make demo-finetune-large` uses a Llama
of a million parameters that is pretrained for an hour on the standard library, and optionally on
books:

    python -m famjax.demo_finetune --large --books TRAINING:HELD_OUT
"""

from __future__ import annotations

import argparse
import functools
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from famjax.cli.figures import new_figure, save_figure
from famjax.cli.main import run_guarded
from famjax.cli.tables import Output, Table
from famjax.config.schema import (
    ArchConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PasskeyConfig,
)
from famjax.convert.folder import convert
from famjax.core.errors import UserError
from famjax.core.json_files import RUN_AGAIN, read_json, write_json
from famjax.data.find_files import list_files
from famjax.data.standard_library import standard_library
from famjax.data.train_tokenizer import train_sentencepiece
from famjax.demo import LOG, format_count, read_result
from famjax.eval.passkey import count_documents, evaluate_passkey
from famjax.eval.text import evaluate_text
from famjax.experiment.load import load_config, override
from famjax.export.export import export
from famjax.processes import runtime
from famjax.processes.half_cores import run_in_halves, run_in_process
from famjax.tasks.passkey import Passkey
from famjax.tokenizers.load import load_tokenizer
from famjax.train.loop import train
from famjax.train.partition import partition_trainable
from famjax.train.recipe import claim_folder, train_and_time
from famjax.train.run import Run, open_run

_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
# number of rows of a finetuning batch, one of them text
_ROWS = 4


def _packages(*names: str) -> str:
    """Return packages of Python's standard library, in the form of `data.files`."""
    return ",".join(str(_LIBRARY / name) for name in names)


@dataclass(frozen=True)
class Base:
    """A pretrained model.

    Attributes:
      texts: texts for the pretraining, and for one row of each finetuning batch, in the form of
        `data.files`.
      held_out: pairs of a name and files, texts on which its bits per byte are measured.
      vocabulary: number of SentencePiece tokens.
      overrides: overrides of its config.
    """

    texts: str
    held_out: tuple[tuple[str, str], ...]
    vocabulary: int = 512
    overrides: tuple[str, ...] = ()


_TINY = Base(
    _packages("asyncio", "email", "http", "json", "unittest"), (("code", _packages("wsgiref")),)
)


@dataclass(frozen=True)
class TunedModel:
    """A model that is converted and finetuned.

    Attributes:
      name: name of its folder, and in the table.
      to: value of `famjax convert --to`.
      settings: overrides for the converted model.
      finetuning: overrides for its finetuning.
      seed: seed of the finetuning.
    """

    name: str
    to: str
    settings: tuple[str, ...]
    finetuning: tuple[str, ...] = ()
    seed: int = 0

    @property
    def converted(self) -> str:
        """Name of the folder of the converted model, which seeds share."""
        return "-".join(["converted", self.to, *self.settings]).replace("model.", "")


# A block holds the shortest document, so the models first learn to find the key within a block,
# then to keep it. All attend to one previous block in each layer, and differ only in their memory.
_WINDOW = ("model.memory_segments=1",)
_BSWA = TunedModel("BSWA", "bswa", _WINDOW)
# with a write penalty, a memory leaves out filler, which could overwrite a key (docs/memory.md)
_DELTA = TunedModel("DELTA", "delta", _WINDOW, ("train.write_loss=0.1",))
# the key anywhere in a row of 15 blocks; all other models find it at a document's beginning
_ANYWHERE = replace(
    _DELTA,
    name="ANYWHERE",
    finetuning=(*_DELTA.finetuning, "data.passkey.needle_within=2880"),
)
# such a penalty closes FAM's gates (docs/memory.md)
_FAM = TunedModel("FAM", "fam", (*_WINDOW, "model.fam_len=16"), ("train.write_loss=0",))
_SUM = replace(_FAM, name="sum", settings=(*_FAM.settings, "model.fam_update=sum"))


def _seeds(model: TunedModel, *seeds: int) -> list[TunedModel]:
    return [replace(model, name=f"{model.name}-{seed}", seed=seed) for seed in seeds]


@dataclass(frozen=True)
class FinetuneDemo:
    """Settings of a finetuning demo.

    Attributes:
      folder: folder of its output.
      examples: maximum number of documents of one length; there are fewer long ones, see
        `famjax.eval.passkey.count_documents`.
      base: the model that is pretrained.
      blocks: lengths of the evaluated documents, in blocks.
      block: number of tokens of a block.
      row: number of blocks of a row that a memory is trained on.
      tokens: number of tokens over all documents of one length to which long documents are limited.
      models: the converted models. The first one is trained on all cores; then two processes, each
        on half of the cores, evaluate it, and train and evaluate the others.
      pretraining, finetuning: overrides of the two configs.
    """

    folder: Path
    examples: int
    base: Base = _TINY
    # the longest document is a hundred times as long as a row
    blocks: tuple[int, ...] = (1, 4, 16, 64, 512, 1500)
    block: int = 192
    row: int = 15
    tokens: int = 400_000
    models: tuple[TunedModel, ...] = (_DELTA, _BSWA)
    pretraining: tuple[str, ...] = ()
    finetuning: tuple[str, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the evaluated documents, in tokens."""
        return tuple(self.block * n for n in self.blocks)


# maximum number of blocks of documents that are evaluated before finetuning: an untrained memory
# finds nothing in longer ones
_BLOCKS_BEFORE = 16
DEMO = FinetuneDemo(Path("runs/demo-finetune"), examples=16)
FULL_DEMO = FinetuneDemo(
    Path("runs/demo-finetune-full"),
    examples=32,
    tokens=3_200_000,
    models=(
        *(_DELTA, *_seeds(_DELTA, 1, 2), _BSWA),
        *(_FAM, *_seeds(_FAM, 1, 2), _SUM),
        *(_ANYWHERE, *_seeds(_ANYWHERE, 1, 2)),
    ),
)


def make_large_demo(books: str | None) -> FinetuneDemo:
    """Return the demo with a larger base, trained on code and optionally on books.

    Args:
      books: TRAINING:HELD_OUT, each in the form of `data.files`; None or "" is no books.
    """
    folder = Path("runs/demo-finetune-large")
    code = standard_library(folder / "library")
    texts, held_out = code.training, [("code", code.held_out)]
    if books:
        training, _, evaluated = books.partition(":")
        if not (training and evaluated):
            raise UserError(f"--books {books}: give TRAINING:HELD_OUT")
        for files in (training, evaluated):  # a wrong path now, not after the training
            list_files(files, "--books")
        texts = f"{texts},{training}"
        held_out.append(("books", evaluated))
    shape = ("layers=4", "width=128", "mlp_width=384", "capacity=512")
    base = Base(
        texts,
        tuple(held_out),
        vocabulary=1024,
        overrides=(
            *(f"model.{setting}" for setting in shape),
            # in parts, so that each batch has as many texts as rows: with whole books, the model
            # forgets earlier ones
            *("data.length=512", "data.part_bytes=2048"),
            *("train.steps=2400", "train.checkpoint_every=100"),
        ),
    )
    return FinetuneDemo(
        folder,
        examples=32,
        base=base,
        block=128,
        tokens=3_200_000,
        models=(_DELTA, _FAM, *_seeds(_DELTA, 1), _BSWA, *_seeds(_DELTA, 2)),
        finetuning=("train.steps=400",),
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m famjax.demo_finetune", description=__doc__)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument(
        "--full",
        action="store_true",
        help="finetune delta and FAM with three seeds, the paper's update, and delta with the key "
        "anywhere",
    )
    sizes.add_argument(
        "--large", action="store_true", help="use a base of a million parameters and three seeds"
    )
    parser.add_argument("--books", help="more texts for --large's base, TRAINING:HELD_OUT")
    arguments = parser.parse_args()
    return run_guarded(lambda: demonstrate(_read_arguments(arguments)))


def _read_arguments(arguments: argparse.Namespace) -> FinetuneDemo:
    if arguments.large:
        return make_large_demo(arguments.books)
    if arguments.books:
        raise UserError("--books: only --large trains on them")
    return FULL_DEMO if arguments.full else DEMO


def demonstrate(demo: FinetuneDemo) -> int:
    """Pretrain, convert, finetune, evaluate, export, print; all output is in the demo's folder."""
    console = Console(highlight=False)
    begin = time.perf_counter()
    demo.folder.mkdir(parents=True, exist_ok=True)
    run_in_process(prepare, demo)
    runtime.setup()
    run_in_halves(functools.partial(tune, demo), demo.models, demo.folder / LOG, console)
    results = [read_result(demo.folder / model.name) for model in demo.models]
    first = demo.models[0].name
    console.print(f"Merging {first}'s adapters and exporting it.")
    exported = demo.folder / first / "exported"
    if not exported.exists():
        for line in export(demo.folder / first, exported, "hf", "float32", report=console.print):
            console.print(line)
    picture = draw(demo, results)
    Output().print(table(demo, results))
    seconds = time.perf_counter() - begin
    report = {"seconds": seconds, "models": results}
    write_json(demo.folder / "report.json", report)
    console.print(f"figure: {picture}   exported: {exported}   {seconds:.0f} seconds")
    return 0


def prepare(demo: FinetuneDemo) -> int:
    """Do the part that uses all cores; return the exit status."""
    return run_guarded(lambda: train_first_model(demo))


def train_first_model(demo: FinetuneDemo) -> int:
    """Pretrain, convert, and finetune the first model, on all cores."""
    console = Console(highlight=False)
    runtime.share_cores(_ROWS)
    runtime.setup()
    console.print("Pretraining a tiny Llama.")
    pretrain(demo)
    # measure it here, so that the two processes that tune do not both do it
    measure_base(demo)
    convert_models(demo, console)
    names = ", ".join(model.name for model in demo.models)
    console.print(f"Finetuning with LoRA on passkey retrieval and text: {names}.")
    model = demo.models[0]
    train_and_time(make_config(demo, model), demo.folder / model.name, quiet=False)
    return 0


def pretrain(demo: FinetuneDemo) -> Run:
    """Train the base model, with the mathematics of a Llama."""
    config = make_base_config(demo)
    # the tokenizer and the converted models belong to the base, too
    for folder in (demo.folder, demo.folder / "pretrained"):
        claim_folder(folder, repr(config))
    tokenizer = demo.folder / "tokenizer.model"
    if not tokenizer.exists():
        train_sentencepiece(demo.base.texts, demo.base.vocabulary, tokenizer)
    return train(config, demo.folder / "pretrained")


def make_base_config(demo: FinetuneDemo) -> Config:
    """Return the pretraining config."""
    config = Config(
        name="pretrained",
        model=ModelConfig(
            layers=2,
            width=64,
            heads=4,
            mlp_width=128,
            tied=False,
            rope_base=1e5,
            mixer="full",
            capacity=256,
            scan_layers=False,
            arch=ArchConfig(embed_scale=1.0),
        ),
        data=DataConfig(
            files=demo.base.texts,
            tokenizer=str(demo.folder / "tokenizer.model"),
            layout="packed",
            batch=16,
            length=256,
        ),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20),
    )
    steps = ["train.steps=350", "train.checkpoint_every=350"]
    return override(config, [*steps, *demo.base.overrides, *demo.pretraining])


def convert_models(demo: FinetuneDemo, console: Console) -> None:
    """Export the pretrained model as a Hugging Face folder, and convert that folder."""
    source = demo.folder / "hugging_face"
    if not source.exists():
        for line in export(demo.folder / "pretrained", source, "hf", "float32"):
            console.print(line)
    for model in demo.models:
        target = demo.folder / model.converted
        if not target.exists():
            overrides = (f"model.block_len={demo.block}", *model.settings)
            convert(source, target, model.to, overrides=overrides, report=console.print)


def make_config(demo: FinetuneDemo, model: TunedModel) -> Config:
    """Return the finetuning config: the one of `make demo`, with adapters."""
    tokenizer = load_tokenizer(str(demo.folder / "tokenizer.model"))
    shortest = Passkey(tokenizer, PasskeyConfig().digits).shortest
    row = demo.row * demo.block
    overrides = [
        f"init={demo.folder / model.converted}",
        f"name={model.name}",
        f"seed={model.seed}",
        "model.lora.rank=16",
        f"data.length={row}",
        f"data.passkey.max_length={row}",
        f"data.passkey.ask_every={2 * demo.block}",
        f"data.passkey.min_length={shortest}",
        f"data.passkey.start_length={max(shortest, demo.block)}",
        # the key comes first; found anywhere by a delta memory with two seeds of three in as many
        # steps (docs/log.md)
        "data.passkey.needle_within=0",
        # when all other keys are right, three of four hard ones are
        "data.passkey.threshold=0.7",
        # a pretrained model already predicts text: it should learn the answers, while a row of text
        # in each batch keeps what it knows
        "data.passkey.other_weight=0.002",
        f"data.batch={_ROWS}",
        "data.text_rows=1",
        "data.text_weight=0.2",
        # parts of texts, for another text in every step: of whole books it would read few, and
        # forget the others
        f"data.part_bytes={4 * row}",
        f"data.files={demo.base.texts}",
        "optimizer.schedule=wsd",
        "optimizer.decay_fraction=0.3",
        "train.steps=700",
    ]
    if model.to == "bswa":
        # It has no memory beyond its receptive field, so there are no intermediate questions or
        # longer documents. With half of the steps it learns nothing.
        seen = make_base_config(demo).model.layers + 1
        overrides += [
            f"data.length={(seen + 2) * demo.block}",
            "data.passkey.ask_every=0",
            f"data.passkey.max_length={seen * demo.block}",
        ]
    return load_config("passkey", [*overrides, *model.finetuning, *demo.finetuning])


def tune(demo: FinetuneDemo, model: TunedModel, quiet: bool) -> None:
    """Finetune a converted model with LoRA, measure it before and after, and write the results."""
    config = make_config(demo, model)
    evaluation = repr((demo.lengths, demo.examples, demo.tokens, demo.base.held_out))
    folder = demo.folder / model.name
    claim_folder(folder, repr(config))
    if (folder / "result.json").exists() and read_result(folder)["evaluation"] == evaluation:
        return
    before = measure_before(demo, model, evaluation)
    is_trained = model == demo.models[0]
    run, seconds = train_and_time(config, folder, quiet or is_trained)
    _, trained, frozen = partition_trainable(run.config.model, run.model)
    result = {
        "name": model.name,
        "evaluation": evaluation,
        "pretrained": measure_base(demo),
        "trained": _count(trained),
        "frozen": _count(frozen),
        "finetuning_seconds": seconds,
        "before": before,
        "after": measure(demo, run, demo.lengths),
    }
    write_json(folder / "result.json", result)


def measure_before(demo: FinetuneDemo, model: TunedModel, evaluation: str) -> dict[str, Any]:
    """Measure a converted model before it is finetuned, only once for all seeds."""
    file = demo.folder / model.converted / "before.json"
    if file.exists():
        saved = read_json(file, RUN_AGAIN)
        if saved["evaluation"] == evaluation:
            return dict(saved["before"])
    longest = _BLOCKS_BEFORE * demo.block
    lengths = tuple(length for length in demo.lengths if length <= longest)
    before = measure(demo, open_run(demo.folder / model.converted), lengths)
    write_json(file, {"evaluation": evaluation, "before": before})
    return before


def measure(demo: FinetuneDemo, run: Run, lengths: Sequence[int]) -> dict[str, Any]:
    """Return retrieved keys by length, and bits per byte of the held-out texts."""
    count = functools.partial(count_documents, demo.examples, demo.tokens)
    rows = evaluate_passkey(run, lengths, count, 4, True, whole=False, anywhere=True)
    return {"passkey": rows, "bits_per_byte": measure_text(demo, run)}


def measure_text(demo: FinetuneDemo, run: Run, window: int | None = None) -> dict[str, float]:
    """Return bits per byte of each held-out text."""
    return {
        name: evaluate_text(run, files, quiet=True, window=window)["bits_per_byte"]
        for name, files in demo.base.held_out
    }


def measure_base(demo: FinetuneDemo) -> dict[str, float]:
    """Return the base's bits per byte with its own attention, in windows of its training length."""
    folder = demo.folder / "pretrained"
    file, texts = folder / "text.json", repr(demo.base.held_out)
    if file.exists():
        saved = read_json(file, RUN_AGAIN)
        if saved["held_out"] == texts:
            return dict(saved["bits_per_byte"])
    run = open_run(folder)
    bits = measure_text(demo, run, run.config.data.length)
    write_json(file, {"held_out": texts, "bits_per_byte": bits})
    return bits


def _count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def table(demo: FinetuneDemo, results: Sequence[dict[str, Any]]) -> Table:
    """Return the table of the keys retrieved after finetuning, and of what finetuning changed."""
    headings = ("tokens", *(result["name"] for result in results))
    out = Table("Whole keys retrieved after finetuning, by tokens", headings, words=(0,))
    for i, length in enumerate(demo.lengths):
        shares = (f"{r['after']['passkey'][i]['key_accuracy']:.0%}" for r in results)
        out.add_row(format_count(length), *shares)
    out.add_rule()
    best = (max(row["key_accuracy"] for row in r["before"]["passkey"]) for r in results)
    out.add_row("best length, before finetuning", *(f"{share:.0%}" for share in best))
    for name, _ in demo.base.held_out:
        bits = (f"{r['pretrained'][name]:.3f}" for r in results)
        out.add_row(f"{name}, bits per byte pretrained", *bits)
        for when in ("before", "after"):
            bits = (f"{r[when]['bits_per_byte'][name]:.3f}" for r in results)
            out.add_row(f"{name}, bits per byte {when}", *bits)
    for label, key in (("parameters trained", "trained"), ("frozen", "frozen")):
        out.add_row(label, *(f"{r[key]:,}" for r in results))
    return out


def draw(demo: FinetuneDemo, results: Sequence[dict[str, Any]]) -> Path:
    """Plot accuracy against length, in a color for each memory; return the file.

    Dotted lines are the models before finetuning. After it seed 0 has a solid line, seed 1 a dashed
    and seed 2 a dash-dotted one.
    """
    figure, axes = new_figure(size=(8, 4.5))
    memories = list(dict.fromkeys(_memory_and_seed(result["name"])[0] for result in results))
    for result in results:
        memory, seed = _memory_and_seed(result["name"])
        for when, style in (("before", ":"), ("after", ("-", "--", "-.")[seed])):
            axes.plot(
                [row["length"] for row in result[when]["passkey"]],
                [100 * row["key_accuracy"] for row in result[when]["passkey"]],
                style,
                marker="o^s"[seed],
                markersize=4,
                color=f"C{memories.index(memory)}",
                label=result["name"] if when == "after" else None,
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks(demo.lengths, [format_count(n) for n in demo.lengths])
    axes.set(xlabel="document, tokens", ylabel="whole keys retrieved, %", ylim=(-3, 103))
    axes.set_title("A pretrained Llama with a new memory, LoRA of rank 16")
    axes.grid(alpha=0.3)
    axes.legend()
    return save_figure(figure, demo.folder / "plots" / "finetune.png")


def _memory_and_seed(name: str) -> tuple[str, int]:
    """Return "FAM" and 1 for "FAM-1"; a name without a number has seed 0."""
    memory, _, seed = name.partition("-")
    return memory, int(seed or 0)


if __name__ == "__main__":
    runtime.start_program()
    sys.exit(main())
