"""`famjax analyze RUN [--memory | --attention] [--teacher RUN] [--tasks text:FILES] [--plot F]`."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from famjax.cli.analyze_attention import (
    DRAWN,
    measure_attention_maps,
    plot_attention,
    show_attention,
)
from famjax.cli.analyze_memory import measure_memory, show_memory
from famjax.cli.arguments import RunArgument
from famjax.cli.figures import new_figure, save_figure
from famjax.cli.main import parse
from famjax.cli.plot import plot_file
from famjax.cli.plot_memory import plot_memory
from famjax.cli.tables import Output, Table
from famjax.core.errors import UserError
from famjax.core.json_files import dump_strictly
from famjax.processes import runtime

_EXAMPLES = 16


@dataclass(frozen=True)
class Arguments:
    """Measure the entropy of a run's attention, and its distance from a teacher's (T2R 4, A.2); or
    with --memory, how a memory changes along a document; or with --attention, where blocks and
    their memory attend to."""

    run: RunArgument
    """Folder of the run, or of a Hugging Face model."""
    memory: bool = False
    """Measure instead the size, rotation, rank and gates of the memory by block, the attention on
    it, and the loss without it, along one document of --length tokens. For an n-gram memory: how
    often contexts of each length are found, and the loss without it."""
    attention: bool = False
    """Measure instead how the attention of each layer and head is divided among memory, memory
    segments and the block itself, and how far back the last block's loss depends on tokens, along
    one document of --length tokens. With --plot, draw the attention maps of the last block."""
    teacher: str = ""
    """Folder of the run it was converted from; adds the distance to its attention on this text."""
    tasks: str = "text:holdout"
    """Text to read: text:FILES (files, folders or globs separated by commas) or text:holdout,
    the documents that training held out.
    With --memory or --attention also passkey, a document of that task; the default for its runs."""
    layers: str = ""
    """Layers whose maps --attention draws, or prints with --json, separated by commas, such as 0,7.
    Default: the first 8 are drawn, and all are printed."""
    length: int = 512
    """Number of tokens of an example, a contiguous part of one document. A passkey document is
    rounded up, so that it ends with a block."""
    examples: int | None = None
    """Number of examples, taken round robin from the documents, one at a time. Default: 16."""
    json: bool = False
    """Print one JSON object, with every head, instead of a table."""
    plot: str = ""
    """Plot the results (by default every head of every layer) to this .png, .svg or .pdf file."""


def run(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, "famjax analyze")
    drawn = plot_file(arguments.plot) if arguments.plot else None
    if arguments.memory and arguments.attention:
        raise UserError("--memory and --attention: give one of them")
    if arguments.layers and not arguments.attention:
        raise UserError(f"--layers {arguments.layers}: is for --attention; remove it")
    if arguments.layers and not (arguments.plot or arguments.json):
        raise UserError(f"--layers {arguments.layers}: chooses maps; give --plot FILE or --json")
    if arguments.attention:
        report, show, draw = _measure_maps(arguments), show_attention, plot_attention
    elif arguments.memory:
        report, show, draw = _measure_memory(arguments), show_memory, plot_memory
    else:
        report, show, draw = measure(arguments, _parse_files(arguments.tasks)), _show, plot
    if arguments.json:
        print(dump_strictly(report))
    else:
        show(report)
    if drawn:
        draw(report, drawn)
        print(f"wrote {drawn}", file=sys.stderr)
    return 0


def _measure_memory(arguments: Arguments) -> dict[str, Any]:
    return measure_memory(arguments.run, *_one_document(arguments, "--memory"))


def _measure_maps(arguments: Arguments) -> dict[str, Any]:
    layers = _parse_layers(arguments.layers) if arguments.layers else []
    max_layers = None if arguments.json else DRAWN if arguments.plot else 0
    document = _one_document(arguments, "--attention")
    return measure_attention_maps(arguments.run, *document, layers, max_layers)


def _parse_layers(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"--layers {text}: write the numbers of layers, from 0, as 0,7") from None


def _one_document(arguments: Arguments, option: str) -> tuple[str | None, int, bool]:
    """Return files, length, and whether the document is a passkey one."""
    if arguments.teacher:
        raise UserError(f"{option} measures one run; leave out --teacher")
    if arguments.examples is not None:
        raise UserError(f"{option} reads one document; leave out --examples")
    passkey = arguments.tasks == "passkey"
    files = "" if passkey else _parse_files(arguments.tasks)
    runtime.setup()
    return _text_files(files), arguments.length, passkey


def _text_files(files: str) -> str | None:
    """Return files as `evaluate_text` takes them, where None is the text that training held out."""
    return None if files in ("", "holdout") else files


def _parse_files(tasks: str) -> str:
    from famjax.tasks.parse import parse_tasks  # JAX, for which --help need not wait

    requests = parse_tasks(tasks)
    if len(requests) != 1 or requests[0][0] != "text":
        raise UserError(f"--tasks {tasks}: analyze reads text; write text:FILES, or text:holdout")
    return requests[0][1]


def measure(arguments: Arguments, files: str) -> dict[str, Any]:
    """Measure the attention of a run.

    Returns:
      run, step, teacher and teacher_step (None without a teacher), files, and the results of
      `famjax.eval.attention.analyze`.
    """
    runtime.setup()
    from famjax.convert.open import open_language_model
    from famjax.eval.attention import analyze

    opened = open_language_model(arguments.run)
    teacher = open_language_model(arguments.teacher) if arguments.teacher else None
    examples = _EXAMPLES if arguments.examples is None else arguments.examples
    return {
        "run": arguments.run,
        "step": opened.step,
        "teacher": arguments.teacher or None,
        "teacher_step": None if teacher is None else teacher.step,
        "files": files,
        **analyze(opened, teacher, _text_files(files), arguments.length, examples),
    }


def _show(report: dict[str, Any]) -> None:
    out = Output()
    line = f"{report['run']}, step {report['step']:,}"
    if report["teacher"]:
        line += f"; teacher {report['teacher']}, step {report['teacher_step']:,}"
    out.print(line)
    out.print(_table(report))
    for note in _notes(report):
        out.print(note)


def _table(report: dict[str, Any]) -> Table:
    shown = [name for name in ("entropy", "distance") if report[name] is not None]
    table = Table(
        f"text:{report['files']}: {report['examples']:,} x {report['length']:,} tokens; means "
        f"over heads; maximum entropy {math.log(report['length']):.3f} nats",
        ("layer", "mixer", *(f"{n}, {q}" for n in shown for q in ("all", "last query"))),
    )
    for row in report["layers"]:
        table.add_row(str(row["layer"]), row["mixer"], *_cells(row, shown))
    table.add_rule()
    table.add_row("all", "", *_cells(report, shown))
    return table


def _cells(row: dict[str, Any], shown: list[str]) -> list[str]:
    values = [(row[name] or {}).get(key) for name in shown for key in ("mean", "last")]
    return ["" if value is None else f"{value:.4f}" for value in values]


def _notes(report: dict[str, Any]) -> list[str]:
    notes = []
    layers = report["layers"]
    skipped = [str(row["layer"]) for row in layers if row["entropy"] is None]
    if skipped:
        notes.append(
            f"skipped: layers {', '.join(skipped)}, which also read a memory; --memory measures it"
        )
    for row in layers:
        share = 0 if row["entropy"] is None else row["entropy"]["undefined"]
        if share:
            notes.append(
                f"layer {row['layer']}: no entropy for {share:.2%} of the queries, whose weights "
                "are not a distribution (some below 0, or all 0)"
            )
    return notes


def plot(report: dict[str, Any], path: Path) -> None:
    """Plot each measure over all queries as a heat map of layers and heads."""
    shown = [name for name in ("entropy", "distance") if report[name] is not None]
    figure, axes = new_figure(1, len(shown), (5 * len(shown), 4))
    heads = max(len(row["entropy"]["heads"]) for row in report["layers"] if row["entropy"])
    blank = {"heads": [None] * heads}
    for name, axis in zip(shown, np.atleast_1d(axes), strict=True):
        values = [(row[name] or blank)["heads"] for row in report["layers"]]
        image = axis.imshow(np.array(values, float), aspect="auto")
        title = "entropy (nats)" if name == "entropy" else "distance from the teacher"
        axis.set(title=title, xlabel="head", ylabel="layer")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.yaxis.get_major_locator().set_params(integer=True)
        figure.colorbar(image, ax=axis)
    save_figure(figure, path)
