"""`famjax report RUN ... [--out FILE]`: one page with the results of `famjax eval`."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from famjax.cli.arguments import RunsArgument
from famjax.cli.eval_labels import ABLATED
from famjax.cli.eval_output import result_tables
from famjax.cli.eval_plots import figures
from famjax.cli.eval_report import REPORT, read_report
from famjax.cli.main import parse
from famjax.core.errors import UserError, did_you_mean_path
from famjax.core.paths import expanded
from famjax.eval.examples import check_lines, digest, read_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# maximum number of examples of a task that are shown; the examples file has all of them
_EXAMPLES = 500
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
pre { overflow-x: auto; background: #f6f6f6; padding: .7rem }
img { max-width: 100% }
details { border-left: .4rem solid #c33; margin: .2rem 0; padding-left: .6rem }
details.right { border-color: #3a3 }
details.partly { border-color: #da3 }
body.wrong details.right { display: none }
dt { font-weight: 600 }
dd { white-space: pre-wrap }
"""


@dataclass(frozen=True)
class Arguments:
    """Write the results of `famjax eval` to one page, which needs no network: tables, plots, and
    for documents with questions every question with its answer."""

    runs: RunsArgument
    """Folders of evaluated runs."""
    out: str = ""
    """HTML file to write. Default: eval/report.html in the first run."""


def run(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, "famjax report")
    if not arguments.runs:
        raise UserError("report: name a run that was evaluated")
    runs = list(map(expanded, arguments.runs))
    out = expanded(arguments.out) if arguments.out else runs[0] / "eval" / "report.html"
    if arguments.out:
        check_file(out, "--out")
    page = _page("".join(map(_section, runs)))
    out.write_text(page, encoding="utf-8")
    print(f"wrote {out}")
    return 0


def read_results(run: Path) -> dict[str, Any]:
    """Return the results of a run's evaluations: for each label a dict of group and result.

    Raises:
      UserError: the run has no results.
    """
    if not run.is_dir():
        raise UserError(f"{run}: there is no such folder{did_you_mean_path(str(run))}")
    if not (run / "eval" / REPORT).exists():
        raise UserError(f"{run}: has no results; run famjax eval {run} first")
    results: dict[str, Any] = read_report(run / "eval")["results"]
    return results


def read_examples(run: Path, result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the examples of a result, with the fields of `famjax.eval.examples.Example`.

    The list is empty if the examples file is gone, or belongs to another evaluation.
    """
    file = run / "eval" / result["examples"]
    if not file.exists():
        return []
    settings, lines = read_lines(file)
    if digest(settings) != result["settings"]:
        return []
    check_lines(file, lines)
    # examples of questions in files have length 0: no length was asked for
    lengths = {row.get("length", 0) for row in result["rows"]}
    # the file may have more documents, from another call
    documents = result.get("documents", math.inf)
    return [
        line
        for line in lines
        if "output" in line and line["length"] in lengths and line["document"] < documents
    ]


def check_file(path: Path, option: str) -> None:
    """Raise a `UserError` if an output file is a folder, or its folder does not exist."""
    if path.is_dir():
        raise UserError(f"{option} {path}: is a folder; give a file in it")
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}; make it first")


def _page(body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>famjax report</title>'
        f"<style>{_STYLE}</style><body>"
        '<label><input type="checkbox" '
        "onchange=\"document.body.classList.toggle('wrong', this.checked)\"> "
        f"hide right answers</label>{body}</body></html>\n"
    )


def _section(run: Path) -> str:
    """Return the HTML of a run's results."""
    parts = [f"<h1>{html.escape(str(run))}</h1>"]
    for label, found in read_results(run).items():
        group, result = found["group"], found["result"]
        parts.append(f"<h2>{html.escape(label)}</h2>")
        parts += map(_block, result_tables(group, result))
        report = {"toy": [], "long": [], "text": [], group: result}
        if group != "passkey":
            report[group] = [result]
        parts += [_image(name, figure) for name, figure in figures(report)]
        if group in ("long", "questions", "translate"):
            parts += _examples(read_examples(run, result), result)
    return "".join(parts)


def _block(part: Any) -> str:
    """Return a table or a line of text as HTML."""
    if isinstance(part, str):
        return f"<p>{html.escape(part)}</p>"
    return f"<pre>{html.escape(chr(10).join(part.lines(None)))}</pre>"


def _image(name: str, figure: Figure) -> str:
    """Return a figure as HTML."""
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    data = base64.b64encode(content.getvalue()).decode()
    return f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">'


def sample_examples(examples: list[dict[str, Any]], max_examples: int) -> list[dict[str, Any]]:
    """Return up to `max_examples` examples by document: the first of each length and data set.

    Each length and data set has the same number of them, unless it has fewer examples.
    """
    groups: dict[tuple[int, str], list[int]] = {}
    for i, example in enumerate(examples):
        groups.setdefault((example["length"], example.get("subset", "")), []).append(i)
    by_turns = (i for together in zip_longest(*groups.values()) for i in together if i is not None)
    chosen = [examples[i] for i in sorted(islice(by_turns, max_examples))]
    # all questions of a document together
    places = {
        (example["length"], example["document"]): i
        for i, example in reversed(list(enumerate(chosen)))
    }
    return sorted(chosen, key=lambda each: places[each["length"], each["document"]])


def _examples(examples: list[dict[str, Any]], result: dict[str, Any]) -> Iterator[str]:
    """Yield the HTML of the examples of a result."""
    yield f"<h3>{len(examples):,} answers</h3>"
    for example in sample_examples(examples, _EXAMPLES):
        kind = {1: "right", 0: "none"}.get(example["score"], "partly")
        fields = {
            "question": example["prompt"],
            "answer": example["output"],
            "references": ", ".join(example["references"]),
        }
        for name, ablated in example["ablated"].items():
            fields[f"answer with {ABLATED[name]}"] = ablated["output"]
        listed = "".join(
            f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in fields.items()
        )
        asked = f"length {example['length']:,}, " if example["length"] else ""
        depth = "" if example["depth"] is None else f"depth {example['depth']:.0%}, "
        summary = (
            f"{asked}{example['tokens']:,} tokens, document {example['document']}, {depth}score "
            f"{example['score']:.0%}{', cut' * example['cut']}"
        )
        yield f'<details class="{kind}"><summary>{summary}</summary><dl>{listed}</dl></details>'
    if len(examples) > _EXAMPLES:
        yield f"<p>{len(examples) - _EXAMPLES:,} more are in {html.escape(result['examples'])}.</p>"
