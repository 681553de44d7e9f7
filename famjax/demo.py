"""The demo: feedback memory against windows on passkey retrieval (TransformerFAM Figure 3).

`make demo` trains FAM with one memory segment, and BSWA of equal size with one and two; evaluates
all of them at lengths far beyond training; prints a table and plots the figure; and asks the saved
FAM model for a key that it read 100,000 tokens ago.

`make demo-full` trains FAM and the delta memory with five seeds each, and BSWA with 0 to 12 memory
segments, and evaluates them on up to ten million tokens. Of a document, windows read only what is
in their receptive field; the answers are the same.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from famjax.cli.figures import new_figure, save_figure
from famjax.cli.main import run_guarded
from famjax.cli.tables import Output, Table
from famjax.config.schema import Config
from famjax.core.json_files import RUN_AGAIN, read_json, write_json
from famjax.data.train_tokenizer import train_sentencepiece
from famjax.eval.memory_usage import memory_report
from famjax.eval.passkey import evaluate_passkey
from famjax.eval.streaming import Streamer
from famjax.experiment.load import load_config
from famjax.processes import runtime
from famjax.processes.half_cores import run_in_halves, run_in_process
from famjax.tasks.passkey import QUESTION, evaluated_task, sample_text
from famjax.train.recipe import train_and_time
from famjax.train.run import Run, open_run

_VOCABULARY = 600
# log file of the second process, in the demo's folder
LOG = "other_process.log"


@dataclass(frozen=True)
class DemoModel:
    """A model that is trained and evaluated.

    Attributes:
      name: name of its folder, and in the table.
      mixer: fam, delta or bswa.
      segments: memory segments of BSWA; FAM and delta have the config's.
      seed: seed of the training.
    """

    name: str
    mixer: str = "fam"
    segments: int = 1
    seed: int = 0


def _fam(seed: int) -> DemoModel:
    return DemoModel(f"FAM-{seed}" if seed else "FAM", seed=seed)


def _delta(seed: int) -> DemoModel:
    return DemoModel(f"DELTA-{seed}" if seed else "DELTA", "delta", seed=seed)


def _bswa(segments: int) -> DemoModel:
    return DemoModel(f"M{segments}", "bswa", segments)


@dataclass(frozen=True)
class Demo:
    """Settings of a demo.

    Attributes:
      folder: folder of its runs.
      models: the models. The first one is trained on all cores; then two processes, each on half of
        the cores, evaluate it, and train and evaluate the others.
      lengths: lengths of the evaluated documents, in tokens.
      examples: maximum number of documents of one length.
      tokens: maximum number of tokens over all documents of one length.
      batch: number of documents that are read together.
      remembered: length of the document after which the saved model is asked, in tokens.
      overrides: overrides of the config.
    """

    folder: Path
    models: tuple[DemoModel, ...]
    lengths: tuple[int, ...]
    examples: int
    tokens: int
    batch: int = 8
    remembered: int = 100_000
    overrides: tuple[str, ...] = ()

    def count(self, length: int) -> int:
        return max(8, min(self.examples, self.tokens // length))


SHORT_DEMO = Demo(
    Path("runs/demo"),
    (_fam(0), _bswa(1), _bswa(2)),
    (96, *(2**k for k in range(7, 19))),
    examples=32,
    tokens=2**19,
)
FULL_DEMO = Demo(
    Path("runs/demo-full"),
    (
        *map(_fam, range(5)),
        *map(_delta, range(5)),
        *map(_bswa, (0, 1, 2, 3, 4, 6, 8, 12)),
    ),
    (*(2**k for k in range(7, 21)), 10 * 2**20),
    examples=100,
    # twenty documents of ten million tokens for each seed, a hundred over all seeds
    tokens=200 * 2**20,
    batch=20,
)


# printed below the table: what table and figure show
CAVEAT = (
    "The key is anywhere in the first 4,096 tokens. Documents are up to 31 tokens shorter than "
    "that, so that questions are anywhere in a block of 32 or cross its end. Other seeds: "
    "docs/results.md."
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m famjax.demo", description=__doc__)
    parser.add_argument(
        "--full",
        action="store_true",
        help="train FAM and delta with 5 seeds, BSWA M0 to M12; 100 examples, 10M tokens",
    )
    demo = FULL_DEMO if parser.parse_args().full else SHORT_DEMO
    return run_guarded(lambda: demonstrate(demo))


def demonstrate(demo: Demo) -> int:
    """Train, evaluate, ask, and print; all output is in the demo's folder."""
    console = Console(highlight=False)
    begin = time.perf_counter()
    demo.folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(demo)
    names = ", ".join(model.name for model in demo.models)
    console.print(
        "Memories with one memory segment, and BSWA of equal size (M1: with one), "
        f"learn to find a passkey: {names}."
    )
    run_in_process(prepare, demo)
    runtime.setup()
    run_in_halves(functools.partial(measure, demo), demo.models, demo.folder / LOG, console)
    results = [read_result(demo.folder / model.name) for model in demo.models]
    remembered = ask(demo, console)
    picture = draw(demo, results)
    for part in by_table(results):
        Output().print(table(demo, part))
    console.print(CAVEAT)
    seconds = time.perf_counter() - begin
    report = {
        "seconds": seconds,
        "devices": [d.device_kind for d in jax.devices()],
        "models": results,
        "remembered": remembered,
    }
    write_json(demo.folder / "report.json", report)
    console.print(
        f"figure: {picture}   report: {demo.folder / 'report.json'}   {seconds:.0f} seconds"
    )
    return 0


def prepare(demo: Demo) -> int:
    """Do the part that uses all cores; return the exit status."""
    return run_guarded(lambda: train_first_model(demo))


def train_first_model(demo: Demo) -> int:
    """Train the first model on all cores. On a CPU, each is a device with a part of the rows."""
    model = demo.models[0]
    config = make_config(demo, model)
    runtime.share_cores(config.data.batch)
    runtime.setup()
    train_and_time(config, demo.folder / model.name, quiet=False)
    return 0


def make_tokenizer(demo: Demo) -> Path:
    """Train the SentencePiece model of the demo, unless it is there; return its file."""
    path = demo.folder / "tokenizer.model"
    if not path.exists():
        text = demo.folder / "tokenizer.txt"
        text.write_text(sample_text())
        train_sentencepiece(str(text), _VOCABULARY, path)
    return path


def make_config(demo: Demo, model: DemoModel) -> Config:
    """Return the training config of a model."""
    tokenizer = f"data.tokenizer={demo.folder / 'tokenizer.model'}"
    own = [f"seed={model.seed}"]
    if model.mixer == "bswa":
        own += baseline_overrides(model.segments)
    if model.mixer == "delta":
        own += ["model.mixer=delta", "train.write_loss=0.1"]
    config = load_config("passkey", [tokenizer, *own, *demo.overrides])
    return replace(config, name=model.name)


def baseline_overrides(segments: int) -> list[str]:
    """Return the overrides that make FAM's config that of a BSWA baseline.

    A window has no memory beyond its receptive field: it cannot answer later questions, or learn
    from longer documents. A quarter of the tokens per step is enough for it.
    """
    shape = load_config("passkey")
    seen = shape.model.layers * segments * shape.model.block_len
    passkey = shape.data.passkey
    return [
        "model.mixer=bswa",
        f"model.memory_segments={segments}",
        "data.batch=2",
        "data.length=1024",
        "optimizer.learning_rate=3e-3",
        "data.passkey.ask_every=0",
        f"data.passkey.max_length={max(passkey.start_length, min(seen, passkey.max_length))}",
    ]


def measure(demo: Demo, model: DemoModel, quiet: bool) -> None:
    """Train a model, evaluate it at every length, and write the results."""
    folder = demo.folder / model.name
    is_trained = model == demo.models[0]
    run, trained = train_and_time(make_config(demo, model), folder, quiet or is_trained)
    rows = evaluate_passkey(
        run,
        demo.lengths,
        demo.count,
        demo.batch,
        quiet,
        whole=False,
        anywhere=True,
        file=folder / "answers.json",
    )
    result = {
        "name": model.name,
        "mixer": model.mixer,
        "parameters": sum(x.size for x in jax.tree.leaves(parameters(run))),
        "train_seconds": trained,
        "evaluation_seconds": sum(row["seconds"] for row in rows),
        "state_bytes": Streamer(run.model, 1).state_bytes(),
        **memory_report(),
        "rows": rows,
    }
    write_json(folder / "result.json", result)


def read_result(folder: Path) -> dict[str, Any]:
    """Return the result that `measure` wrote into a model's folder."""
    return dict(read_json(folder / "result.json", RUN_AGAIN))


def parameters(run: Run) -> Any:
    from flax import nnx

    return nnx.state(run.model, nnx.Param)


def ask(demo: Demo, console: Console) -> dict[str, Any]:
    """Stream a key and 100,000 tokens through the saved model, and print its answer."""
    run = open_run(demo.folder / "FAM")
    task = evaluated_task(run.tokenizer, run.config.data.passkey)
    rng = np.random.default_rng([2026, 1])
    tokens = np.concatenate([p.tokens for p in task.document(rng, demo.remembered)])
    prompt = tokens[: -task.digits - 1]
    answer = tokens[len(prompt) : -1]
    streamer = Streamer(run.model, 1)
    streamer.read(prompt[None])
    written = []
    for _ in answer:
        written.append(int(np.asarray(streamer.logits).argmax()))
        streamer.step(np.array([[written[-1]]], np.int32))
    key, written_text = run.tokenizer.decode(answer), run.tokenizer.decode(written)
    console.print(
        f"\nFAM, loaded from its checkpoint, read a key and {len(prompt):,} tokens; its whole "
        f"memory is {streamer.state_bytes():,} bytes.\n> ...{QUESTION}[bold]{written_text}[/bold]"
        f"   (correct: {key})\n"
    )
    return {"tokens": len(prompt), "key": key, "answer": written_text}


def by_table(results: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the results for each table: all in one, or if there are many, one table per mixer."""
    if len(results) <= 8:
        yield list(results)
        return
    for _, group in itertools.groupby(results, key=itemgetter("mixer")):
        yield list(group)


def table(demo: Demo, results: Sequence[dict[str, Any]]) -> Table:
    """Return the table of retrieved keys by model and length."""
    columns = ("tokens", *(result["name"] for result in results), "documents")
    out = Table("Whole keys retrieved, by tokens", columns)
    for i, length in enumerate(demo.lengths):
        rows = [result["rows"][i] for result in results]
        shares = (f"{row['key_accuracy']:.0%}" for row in rows)
        out.add_row(format_count(length), *shares, str(rows[0]["examples"]))
    out.add_rule()
    for label, name, unit in (
        ("params k", "parameters", 1000),
        ("state kB", "state_bytes", 1000),
        ("train s", "train_seconds", 1),
    ):
        out.add_row(label, *(f"{result[name] / unit:.0f}" for result in results))
    return out


def draw(demo: Demo, results: Sequence[dict[str, Any]]) -> Path:
    """Plot accuracy against length, as in the paper's Figure 3; return the file."""
    figure, axes = new_figure(size=(8, 4.5))
    # the seeds of a memory share its color
    memories = {"fam": "C0", "delta": "C1"}
    windows = (f"C{number}" for number in range(2, 10))
    for result in results:
        is_window = result["mixer"] == "bswa"
        axes.plot(
            demo.lengths,
            [100 * row["key_accuracy"] for row in result["rows"]],
            color=next(windows) if is_window else memories[result["mixer"]],
            marker="o",
            markersize=4,
            linewidth=2.5 if result["name"] == "FAM" else 1.5,
            linestyle="--" if result["mixer"] == "delta" else "-",
            label=f"BSWA, {result['name']}" if is_window else result["name"],
            zorder=2 if is_window else 3,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(demo.lengths, [format_count(n) for n in demo.lengths])
    axes.set(xlabel="document, tokens", ylabel="whole keys retrieved, %", ylim=(-3, 103))
    axes.set_title(
        "Passkey retrieval (TransformerFAM, Figure 3)\n"
        "the key anywhere in the first 4,096 tokens, questions anywhere in a block",
        fontsize="medium",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="center right", fontsize="small" if len(results) > 8 else None)
    return save_figure(figure, demo.folder / "plots" / "passkey.png")


def format_count(number: int) -> str:
    if number >= 2**20:
        return f"{number // 2**20}M"
    return f"{number // 2**10}k" if number >= 2**10 else str(number)


if __name__ == "__main__":
    runtime.start_program()
    sys.exit(main())
