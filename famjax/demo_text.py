"""Memories against block sliding window attention on text, at equal steps and at equal time.

`make demo-text` trains a window without any memory on the long modules of Python's standard
library; gives it a FAM, a delta-rule memory in the upper layer, an n-gram memory, or none of them,
each with a memory segment and without; trains all of these models further for the same number of
steps; evaluates them on held-out modules; and prints bits per byte of three seeds, with paired
intervals.
The models of a seed share the first training, since a memory is only of use to a model that has
learned to predict from its own block. For other texts:

    python -m famjax.demo_text --data books=TRAIN_FOLDER:HELD_OUT_FOLDER
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from famjax.bench.steps import training_call
from famjax.bench.timing import compare_times, time_interleaved
from famjax.cli.figures import new_figure, save_figure
from famjax.cli.main import run_guarded
from famjax.cli.tables import Output, Table
from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.core.json_files import parse_json, write_json
from famjax.data.find_files import list_files
from famjax.data.standard_library import Texts, standard_library
from famjax.data.train_tokenizer import train_sentencepiece
from famjax.demo import LOG, read_result
from famjax.eval.intervals import paired_interval
from famjax.eval.text import evaluate_text
from famjax.experiment.load import load_config
from famjax.processes import runtime
from famjax.processes.half_cores import run_in_halves
from famjax.tokenizers.load import load_tokenizer
from famjax.train.recipe import claim_folder, train_and_time

_VOCABULARY = 1024
# file with the times of training steps; how many steps of each model are timed
_STEP_TIMES, _REPETITIONS = "step_times.json", 20
# memories that last longer than the window, and their settings: a config's own do not count where
# `init` gives the model
_MEMORIES = {
    "fam": ("model.mixer=fam", "model.fam_update=gated", "model.fam_len=8"),
    # as in configs/text_delta.py
    "bswa,delta": ("model.mixer=bswa,delta", "model.delta_order=8", "model.delta_heads=1"),
    "n-grams": ("model.mixer=bswa", "model.ngram_memory=8"),
}
_WINDOW = "bswa"


@dataclass(frozen=True)
class TextModel:
    """A model that is trained and evaluated.

    Attributes:
      memory: name of its memory in `_MEMORIES`, or bswa for a window without one.
      segments: number of memory segments.
      seed: seed of the training.
      time_of: memory whose training takes the same time as this one; "" trains for the demo's
        steps.
      steps: steps of the training; 0 is the demo's number.
      pretrained: whether it continues the training of the seed's base; if not, it is a base.
    """

    memory: str
    segments: int
    seed: int
    time_of: str = ""
    steps: int = 0
    pretrained: bool = True

    @property
    def base(self) -> TextModel:
        """The model that this one continues: a window without memory."""
        return TextModel(_WINDOW, 0, self.seed, pretrained=False)

    @property
    def kind(self) -> str:
        """Name of the kind of model; models of the same kind differ only in the seed."""
        if not self.pretrained:
            return "base"
        name = f"{self.memory.upper()} M{self.segments}"
        return f"{name}, time of {self.time_of.upper()}" if self.time_of else name

    @property
    def folder(self) -> str:
        steps = f"{self.steps} steps" if self.time_of else ""
        return "-".join(re.findall("[a-z0-9]+", f"{self.kind} {steps} {self.seed}".lower()))


@dataclass(frozen=True)
class TextDemo:
    """Settings of a comparison on texts of one kind.

    Attributes:
      folder: folder of its output.
      texts: the documents.
      seeds: number of trainings of each model.
      base_steps: steps of the training that the models of a seed share.
      steps: steps of the further training of each model.
      overrides: overrides of the configs.
    """

    folder: Path
    texts: Texts
    seeds: int = 3
    base_steps: int = 1000
    steps: int = 400
    overrides: tuple[str, ...] = ()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m famjax.demo_text", description=__doc__)
    parser.add_argument(
        "--data", help="texts, NAME=TRAINING:HELD_OUT; default: the standard library"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--base-steps", type=int, default=1000, help="steps of the base, without memory"
    )
    parser.add_argument("--steps", type=int, default=400, help="further steps of each model")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="overrides of both configs"
    )
    arguments = parser.parse_args()
    return run_guarded(lambda: demonstrate(_read_arguments(arguments)))


def _read_arguments(arguments: argparse.Namespace) -> TextDemo:
    if arguments.seeds < 1:
        raise UserError(f"--seeds {arguments.seeds}: must be at least 1")
    folder = Path("runs/demo-text")
    if arguments.data is None:
        texts = standard_library(folder / "library")
    else:
        name, _, files = arguments.data.partition("=")
        training, _, held_out = files.partition(":")
        if not (name and training and held_out):
            raise UserError(f"--data {arguments.data}: give NAME=TRAINING:HELD_OUT")
        for files in (training, held_out):  # a wrong path now, not after the training
            list_files(files, "--data")
        texts = Texts(name, training, held_out)
    return TextDemo(
        folder / texts.name,
        texts,
        arguments.seeds,
        arguments.base_steps,
        arguments.steps,
        tuple(arguments.overrides),
    )


def demonstrate(demo: TextDemo) -> int:
    """Train, evaluate, and print; all output is in the demo's folder."""
    console = Console(highlight=False)
    begin = time.perf_counter()
    models = [model for seed in range(demo.seeds) for model in models_of(seed)]
    bases = list(dict.fromkeys(model.base for model in models))
    # the tokenizer and the steps' times belong to the bases, too
    claim_folder(demo.folder, repr(make_config(demo, bases[0])))
    tokenizer = demo.folder / "tokenizer.model"
    if not tokenizer.exists():
        train_sentencepiece(demo.texts.training, _VOCABULARY, tokenizer)
    runtime.setup()
    console.print(
        f"FAM, delta and BSWA learn to predict {demo.texts.name}, with {demo.seeds} seeds."
    )
    run_in_halves(functools.partial(pretrain, demo), bases, demo.folder / LOG, console)
    _measure_all(demo, models, console)
    run_in_halves(time_steps, [demo], demo.folder / LOG, console)
    times = read_step_times(demo)
    slower = [
        replace(
            model, memory=_WINDOW, time_of=model.memory, steps=steps_in_time(demo, times, model)
        )
        for model in models
        if model.memory in _MEMORIES
    ]
    _measure_all(demo, slower, console)
    results = _by_kind(demo, [*models, *slower])
    Output().print(table(demo, results, times))
    console.print(
        "Gain: bits saved by the memory, compared with a reset at every block. Against BSWA: the "
        "row's bits minus those of BSWA with as many segments, trained for as many steps or for "
        "the same time (negative: the row is better), with the 95% interval of a paired bootstrap "
        "over documents."
    )
    picture = draw(demo, results)
    seconds = time.perf_counter() - begin
    write_json(demo.folder / "report.json", results)
    report = demo.folder / "report.json"
    console.print(f"figure: {picture}   report: {report}   {seconds:.0f} seconds")
    return 0


def models_of(seed: int) -> list[TextModel]:
    """Return the models of a seed that train for equal steps."""
    return [
        TextModel(memory, segments, seed) for segments in (0, 1) for memory in (*_MEMORIES, _WINDOW)
    ]


def _measure_all(demo: TextDemo, models: Sequence[TextModel], console: Console) -> None:
    run_in_halves(functools.partial(measure, demo), models, demo.folder / LOG, console)


def make_config(demo: TextDemo, model: TextModel) -> Config:
    """Return the training config of a model."""
    if model.pretrained:
        # another seed, for another order of the documents
        training = [f"init={demo.folder / model.base.folder}", f"seed={1000 + model.seed}"]
        training += [f"train.steps={model.steps or demo.steps}", "optimizer.warmup_steps=20"]
    else:
        training = [f"seed={model.seed}", f"train.steps={demo.base_steps}"]
        training += ["optimizer.schedule=constant"]
    return load_config(
        "text_fam" if model.memory == "fam" else "text_bswa",
        [
            f"name={model.folder}",
            "model.mixer=bswa",
            *training,
            f"model.memory_segments={model.segments}",
            # without smeared keys, models of this size do not even copy from their own window
            "model.smeared_keys=true",
            "model.layers=2",
            "model.mlp_width=512",
            *_MEMORIES.get(model.memory, ()),
            f"data.files={demo.texts.training}",
            f"data.tokenizer={demo.folder / 'tokenizer.model'}",
            "data.holdout=0",
            # many documents in a step: with few, the memory becomes a fingerprint of them
            "data.batch=8",
            "data.length=512",
            "train.log_every=20",
            "train.checkpoint_every=250",
            *demo.overrides,
        ],
    )


def pretrain(demo: TextDemo, base: TextModel, quiet: bool) -> None:
    """Train the base, which all models of its seed continue."""
    train_and_time(make_config(demo, base), demo.folder / base.folder, quiet)


def measure(demo: TextDemo, model: TextModel, quiet: bool) -> None:
    """Train a model, evaluate it on the held-out documents, and write the results."""
    folder = demo.folder / model.folder
    config = make_config(demo, model)
    if model.pretrained:  # the recipe names only the base's folder, not how the base was trained
        claim_folder(folder, repr(make_config(demo, model.base)), "base.txt")
    claim_folder(folder, repr(config))
    file = folder / "result.json"
    if file.exists() and read_result(folder)["held_out"] == demo.texts.held_out:
        return
    run, seconds = train_and_time(config, folder, quiet)
    scores = evaluate_text(run, demo.texts.held_out, batch=16, quiet=quiet)
    write_json(file, {"held_out": demo.texts.held_out, "train_seconds": seconds, **scores})


def time_steps(demo: TextDemo, quiet: bool) -> None:
    """Write the seconds of training steps, by kind of model.

    Steps of all kinds alternate, so that other work on the machine disturbs them equally.
    """
    file = demo.folder / _STEP_TIMES
    if file.exists():
        return
    vocab_size = load_tokenizer(str(demo.folder / "tokenizer.model")).vocab_size
    calls = {}
    for model in models_of(0):
        config = make_config(demo, model)
        shape = replace(config.model, vocab_size=vocab_size)
        calls[model.kind] = training_call(shape, config.data.batch, config.data.length)
    with Console(quiet=quiet).status("timing training steps"):
        write_json(file, time_interleaved(calls, _REPETITIONS))


def read_step_times(demo: TextDemo) -> dict[str, list[float]]:
    """Return what `time_steps` wrote."""
    return parse_json((demo.folder / _STEP_TIMES).read_text())


def steps_in_time(demo: TextDemo, times: dict[str, list[float]], model: TextModel) -> int:
    """Return the number of BSWA's steps that take the time of the model's training."""
    window = replace(model, memory=_WINDOW)
    return round(demo.steps * compare_times(times[model.kind], times[window.kind]).typical)


def _by_kind(demo: TextDemo, models: Sequence[TextModel]) -> list[dict[str, Any]]:
    """Return for each kind of model its results over all seeds.

    Those of memories also have the differences to windows.
    """
    kinds: dict[str, list[TextModel]] = {}
    for model in sorted(models, key=lambda m: (m.segments, m.memory, m.time_of)):
        kinds.setdefault(model.kind, []).append(model)
    rows: dict[str, dict[str, Any]] = {}
    for kind, every in kinds.items():
        seeds = [read_result(demo.folder / model.folder) for model in every]
        first = every[0]
        row: dict[str, Any] = {"kind": kind, "memory": first.memory, "seeds": seeds}
        row["segments"] = first.segments
        rows[kind] = {**row, "time_of": first.time_of, "steps": first.steps or demo.steps}
    for row in rows.values():
        if row["memory"] in _MEMORIES:
            window = TextModel(_WINDOW, row["segments"], 0)
            others = {"steps": window, "time": replace(window, time_of=row["memory"])}
            row["against_bswa"] = {
                name: paired_interval(_nats(row), _nats(rows[other.kind]), _bytes(row))
                for name, other in others.items()
            }
    return list(rows.values())


def _nats(row: dict[str, Any]) -> np.ndarray:
    """Return the loss of each document in nats, averaged over seeds, [documents]."""
    seeds = [[document["nats"] for document in seed["by_document"]] for seed in row["seeds"]]
    return np.array(seeds).mean(0)


def _bytes(row: dict[str, Any]) -> np.ndarray:
    return np.array([document["bytes"] for document in row["seeds"][0]["by_document"]])


def table(
    demo: TextDemo, results: Sequence[dict[str, Any]], times: dict[str, list[float]]
) -> Table:
    """Return the table of bits per byte."""
    numbers = [str(seed) for seed in range(demo.seeds)]
    columns = ("model", "steps", "s/step", *numbers, "mean", "gain")
    columns = (*columns, "minus BSWA, equal steps", "minus BSWA, equal time")
    out = Table(
        f"Bits per byte of held-out {demo.texts.name}, by seed",
        columns,
        words=(0, len(columns) - 2, len(columns) - 1),
    )
    for row in results:
        bits = [seed["bits_per_byte"] for seed in row["seeds"]]
        gain = np.mean([seed["memory_gain"]["bits_per_byte"] for seed in row["seeds"]])
        step = np.median(times[TextModel(row["memory"], row["segments"], 0).kind])
        against = row.get("against_bswa", {})
        out.add_row(
            row["kind"],
            f"{row['steps']:,}",
            f"{step:.2f}",
            *(f"{value:.4f}" for value in bits),
            f"{np.mean(bits):.4f}",
            f"{gain:.4f}",
            *(
                "{:+.3f} ({:+.3f} to {:+.3f})".format(*against[name]) if against else ""
                for name in ("steps", "time")
            ),
        )
    return out


def draw(demo: TextDemo, results: Sequence[dict[str, Any]]) -> Path:
    """Plot the loss by the position in the document; return the file."""
    figure, axes = new_figure(size=(8, 4.5))
    for row in results:
        ends = [bucket["to"] + 1 for bucket in row["seeds"][0]["by_position"]]
        nats = np.mean([[b["loss"] for b in seed["by_position"]] for seed in row["seeds"]], 0)
        if row["time_of"]:
            continue  # no more lines than can be distinguished
        style = {"fam": "--", "bswa,delta": "-.", "n-grams": "-", _WINDOW: ":"}[row["memory"]]
        color = f"C{row['segments']}"
        axes.plot(ends, nats, style, marker="o", markersize=3, color=color, label=row["kind"])
    axes.set_xscale("log", base=2)
    axes.set(xlabel="position in the document, tokens", ylabel="nats per token")
    axes.set_title(f"Held-out {demo.texts.name}, mean of {demo.seeds} seeds")
    axes.grid(alpha=0.3)
    axes.legend()
    return save_figure(figure, demo.folder / "plots" / "text.png")


if __name__ == "__main__":
    runtime.start_program()
    sys.exit(main())
