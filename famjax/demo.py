"""The demo: feedback memory against windows on passkey retrieval (TransformerFAM Figure 3).

`make demo` trains FAM without memory segments, and BSWA of equal size with one and two; evaluates
all of them at lengths far beyond training; prints the table and plots the figure; and asks the
saved FAM model for a key that it read 100,000 tokens ago.

`make demo-full` trains BSWA with 0 to 12 memory segments, and goes to a million tokens. There the
windows read only their receptive field of a document, with the same answers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from famjax.cli.main import run_guarded
from famjax.cli.tables import Output, Table
from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.core.json_files import read_json
from famjax.data.train_tokenizer import train_sentencepiece
from famjax.eval.memory import memory_report
from famjax.eval.passkey import evaluate_passkey
from famjax.eval.streaming import Streamer
from famjax.experiment.load import load_config
from famjax.processes import runtime
from famjax.tasks.passkey import QUESTION, evaluated_task, sample_text
from famjax.train.checkpoint import Checkpoints
from famjax.train.loop import train
from famjax.train.run import Run, open_run

_VOCABULARY = 600
# of the baselines' process, in the demo's folder
LOG = "baselines.log"
_RUN_AGAIN = "remove it, and run again"


@dataclass(frozen=True)
class Demo:
    """Settings of a demo.

    Attributes:
      folder: of its runs.
      segments: memory segments of the BSWA baselines.
      lengths: tokens of the evaluated documents.
      examples: maximum number of documents of one length.
      tokens: maximum number of tokens of one length, over all its documents.
      batch: documents per batch.
      remembered: tokens of the document after which the saved model is asked.
      overrides: of the config.
      whole: windows also read every document from its first token, not only their receptive field;
        the answers are the same.
    """

    folder: Path
    segments: tuple[int, ...]
    lengths: tuple[int, ...]
    examples: int
    tokens: int
    batch: int = 8
    remembered: int = 100_000
    overrides: tuple[str, ...] = ()
    whole: bool = True

    def count(self, length: int) -> int:
        return max(8, min(self.examples, self.tokens // length))


SHORT_DEMO = Demo(
    Path("runs/demo"), (1, 2), (96, *(2**k for k in range(7, 19))), examples=32, tokens=2**19
)
FULL_DEMO = Demo(
    Path("runs/demo-full"),
    (0, 1, 2, 3, 4, 6, 8, 12),
    tuple(2**k for k in range(7, 21)),
    examples=100,
    tokens=100 * 2**20,
    batch=10,
    whole=False,
)


# what table and figure show
CAVEAT = (
    "One seed. Documents are up to 31 tokens shorter than that, so that questions are anywhere in "
    "a block of 32 tokens or cross its end. Other seeds: docs/results.md."
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m famjax.demo", description=__doc__)
    parser.add_argument("--full", action="store_true", help="M0 to M12, 100 examples, 1M tokens")
    demo = FULL_DEMO if parser.parse_args().full else SHORT_DEMO
    return run_guarded(lambda: demonstrate(demo))


def demonstrate(demo: Demo) -> int:
    """Train, evaluate, ask, and print; all output is in the demo's folder."""
    console = Console(highlight=False)
    begin = time.perf_counter()
    demo.folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(demo)
    names = ["FAM", *(f"M{m}" for m in demo.segments)]
    console.print(
        f"TransformerFAM without memory segments, and BSWA {', '.join(names[1:])} of equal size, "
        "learn to find a passkey.\nTraining FAM; the others train in parallel."
    )
    train_all(demo, names, console)
    results = [read_json(demo.folder / name / "result.json", _RUN_AGAIN) for name in names]
    remembered = ask(demo, console)
    picture = draw(demo, results)
    Output().print(table(demo, results))
    console.print(CAVEAT)
    seconds = time.perf_counter() - begin
    report = {
        "seconds": seconds,
        "devices": [d.device_kind for d in jax.devices()],
        "models": results,
        "remembered": remembered,
    }
    (demo.folder / "report.json").write_text(json.dumps(report, indent=1))
    console.print(
        f"figure: {picture}   report: {demo.folder / 'report.json'}   {seconds:.0f} seconds"
    )
    return 0


def train_all(demo: Demo, names: Sequence[str], console: Console) -> None:
    """Measure FAM here and the baselines in another process, each on half of the cores.

    Two small models on half of the cores each are faster than sequentially on all cores.
    """
    baseline_process = multiprocessing.get_context("spawn").Process(
        target=measure_baselines, args=(demo, names[1:])
    )
    baseline_process.start()
    cores = share_cores(first_half=True)
    runtime.setup()
    try:
        measure(demo, names[0], quiet=False)
        with console.status("waiting for the baselines"):
            baseline_process.join()
    finally:
        baseline_process.kill()
        if cores:
            os.sched_setaffinity(0, cores)
    if baseline_process.exitcode:
        raise UserError(f"the baselines failed; see {demo.folder / LOG}")


def measure_baselines(demo: Demo, names: Sequence[str]) -> None:
    """Measure the baselines in a separate process; their output goes to a file."""
    with (demo.folder / LOG).open("w") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
        share_cores(first_half=False)
        runtime.setup()
        for name in names:
            measure(demo, name, quiet=True)


def share_cores(first_half: bool) -> set[int]:
    """Restrict the process to half of the cores, if supported; return the previous set."""
    if not hasattr(os, "sched_setaffinity"):
        return set()
    before = os.sched_getaffinity(0)
    cores = sorted(before)
    middle = (len(cores) + 1) // 2
    os.sched_setaffinity(0, (cores[:middle] if first_half else cores[middle:]) or cores)
    return before


def make_tokenizer(demo: Demo) -> Path:
    """Train the SentencePiece model of the demo, once."""
    path = demo.folder / "tokenizer.model"
    if not path.exists():
        text = demo.folder / "tokenizer.txt"
        text.write_text(sample_text())
        train_sentencepiece(str(text), _VOCABULARY, path)
    return path


def make_config(demo: Demo, name: str) -> Config:
    """Return the config of "FAM", or of "M" plus a number of memory segments."""
    tokenizer = f"data.tokenizer={demo.folder / 'tokenizer.model'}"
    if name == "FAM":
        config = load_config("passkey", [tokenizer, *demo.overrides])
    else:
        config = load_config("passkey", [tokenizer, *baseline_overrides(demo, int(name[1:]))])
    return replace(config, name=name)


def baseline_overrides(demo: Demo, segments: int) -> list[str]:
    """Return the overrides of a BSWA baseline to FAM's config.

    A window has no memory beyond its receptive field: it cannot answer later questions or learn
    from longer documents, and it learns from those in half of the steps.
    """
    shape = load_config("passkey")
    seen = shape.model.layers * segments * shape.model.block_len
    passkey = shape.data.passkey
    return [
        "model.mixer=bswa",
        f"model.memory_segments={segments}",
        f"train.steps={shape.train.steps // 2}",
        "data.passkey.ask_every=0",
        f"data.passkey.max_length={max(passkey.min_length, min(seen, passkey.max_length))}",
        *demo.overrides,
    ]


def measure(demo: Demo, name: str, quiet: bool) -> None:
    """Train a model, evaluate it at every length, and write the results."""
    folder = demo.folder / name
    run, trained = train_and_time(make_config(demo, name), folder, quiet)
    begin = time.perf_counter()
    rows = evaluate_passkey(
        run, demo.lengths, demo.count, demo.batch, quiet, demo.whole, anywhere=True
    )
    result = {
        "name": name,
        "parameters": sum(x.size for x in jax.tree.leaves(parameters(run))),
        "train_seconds": trained,
        "evaluation_seconds": time.perf_counter() - begin,
        "state_bytes": Streamer(run.model, 1).state_bytes(),
        **memory_report(),
        "rows": rows,
    }
    (folder / "result.json").write_text(json.dumps(result, indent=1))


def train_and_time(config: Config, folder: Path, quiet: bool) -> tuple[Run, float]:
    """Train, or continue training; return the run and the training seconds over all calls.

    A call after the end of training adds none.
    """
    path = folder / "train_seconds.json"
    before = Checkpoints(folder / "checkpoints").latest()
    spent = read_json(path, _RUN_AGAIN) if before and path.exists() else 0.0
    begin = time.perf_counter()
    run = train(config, folder, quiet)
    if run.step != before:
        spent += time.perf_counter() - begin
        path.write_text(json.dumps(spent))
    return run, spent


def parameters(run: Run) -> Any:
    from flax import nnx

    return nnx.state(run.model, nnx.Param)


def ask(demo: Demo, console: Console) -> dict[str, Any]:
    """Stream a key and 100,000 tokens through the saved model, and print its answer."""
    run = open_run(demo.folder / "FAM")
    task = evaluated_task(run.tokenizer, run.config.data.passkey)
    rng = np.random.default_rng([2026, 1])
    tokens = np.concatenate([p.tokens for p in task.document(rng, demo.remembered)])
    asked = tokens[: -task.digits - 1]
    answer = tokens[len(asked) : -1]
    streamer = Streamer(run.model, 1)
    streamer.read(asked[None])
    found = []
    for _ in answer:
        found.append(int(np.asarray(streamer.logits).argmax()))
        streamer.step(np.array([[found[-1]]], np.int32))
    key, said = run.tokenizer.decode(answer), run.tokenizer.decode(found)
    console.print(
        f"\nFAM, loaded from its checkpoint, read a key and {len(asked):,} tokens; its whole "
        f"memory is {streamer.state_bytes():,} bytes.\n> ...{QUESTION}[bold]{said}[/bold]"
        f"   (correct: {key})\n"
    )
    return {"tokens": len(asked), "key": key, "answer": said}


def table(demo: Demo, results: Sequence[dict[str, Any]]) -> Table:
    """Return the table of retrieved keys by model and length."""
    columns = ("tokens", *(result["name"] for result in results), "texts")
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
    """Plot accuracy against length, the paper's Figure 3."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for result in results:
        fam = result["name"] == "FAM"
        axes.plot(
            demo.lengths,
            [100 * row["key_accuracy"] for row in result["rows"]],
            marker="o",
            markersize=4,
            linewidth=2.5 if fam else 1.5,
            label="TransformerFAM, M0" if fam else f"BSWA, {result['name']}",
            zorder=3 if fam else 2,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(demo.lengths, [format_count(n) for n in demo.lengths])
    axes.set(xlabel="document, tokens", ylabel="whole keys retrieved, %", ylim=(-3, 103))
    axes.set_title(
        "Passkey retrieval, needle first (TransformerFAM, Figure 3)\n"
        "one seed; questions anywhere in a block, or across its end",
        fontsize="medium",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="center right")
    path = demo.folder / "plots" / "passkey.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)
    return path


def format_count(number: int) -> str:
    if number >= 2**20:
        return f"{number // 2**20}M"
    return f"{number // 2**10}k" if number >= 2**10 else str(number)


if __name__ == "__main__":
    sys.exit(main())
