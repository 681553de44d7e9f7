"""`famjax compare RUN RUN ... [--plot FILE] [--segments FILE]`: results of `famjax eval`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from famjax.cli.arguments import RunsArgument
from famjax.cli.compare_segments import draw_segments
from famjax.cli.eval_labels import ends_of
from famjax.cli.figures import new_figure, save_figure
from famjax.cli.main import parse
from famjax.cli.report import check_file, read_examples, read_results
from famjax.cli.tables import Output, Table
from famjax.cli.translation_tables import search_speed
from famjax.core.errors import UserError
from famjax.core.paths import expanded
from famjax.eval.intervals import mean_interval, mean_of_ratios, paired_interval

# for each `Task.group`, the key of the share of right answers
_SHARES = {"passkey": "key_accuracy", "toy": "episode_accuracy", "long": "score"}
# the end of a label, which says how documents were read; it may differ between compared results
_READING = re.compile(r"(?: --window (\d+))?(?: --score \d+)?$")


@dataclass(frozen=True)
class Arguments:
    """Compare runs on everything that all of them were evaluated on, in tables. For texts and long
    documents they have the difference to the first run with a 95% interval (a paired bootstrap over
    documents)."""

    runs: RunsArgument
    """Folders of two or more evaluated runs, the reference first."""
    plot: str = ""
    """Plot the loss on texts by position, and the accuracy by document length, to this file."""
    segments: str = ""
    """Plot the scores against the number of memory segments to this file, each score divided by
    that of the best run (TransformerFAM, Figure 4)."""


def run(argv: list[str]) -> int:
    arguments = parse(Arguments, argv, "famjax compare")
    if len(arguments.runs) < 2:
        raise UserError("compare: name two runs or more that were evaluated")
    runs = list(map(expanded, arguments.runs))
    found = [read_results(run) for run in runs]
    shared = shared_labels(found)
    if not shared:
        listed = "; ".join(f"{r}: {', '.join(f)}" for r, f in zip(runs, found, strict=True))
        raise UserError(
            f"no task was evaluated on all runs ({listed}); run famjax eval on each with the same "
            "--tasks"
        )
    short = short_names(runs)
    # if the runs read documents in different ways, the way follows each run's name
    names = {
        title: [f"{n}{_reading(label, title)}" for n, label in zip(short, labels, strict=True)]
        for title, labels in shared.items()
    }
    found = [
        {title: results[labels[i]] for title, labels in shared.items()}
        for i, results in enumerate(found)
    ]
    out = Output()
    for title in shared:
        results = [results[title]["result"] for results in found]
        for table in _tables(title, found[0][title]["group"], names[title], results, runs):
            out.print(table)
    if arguments.segments:
        path = expanded(arguments.segments)
        check_file(path, "--segments")
        out.print(f"wrote {draw_segments(found, list(shared), runs, path)}")
    if arguments.plot:
        check_file(expanded(arguments.plot), "--plot")
        drawn = [each for each in shared if found[0][each]["group"] in ("text", *_SHARES)]
        if not drawn:
            raise UserError("--plot: only texts and tasks of several lengths are drawn")
        path = draw(found, drawn, names, expanded(arguments.plot))
        out.print(f"wrote {path}")
    return 0


def shared_labels(found: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return everything that all runs were evaluated on: titles, and the labels of their results.

    Results with equal labels are compared, since they were read in the same way. Otherwise, for
    each run the result with the longest windows is taken: a run with full attention in windows is
    compared with a run that streams whole documents.

    Args:
      found: results of each run by label, see `famjax.cli.report.read_results`.

    Returns:
      for each title, the label of each run's result.
    """
    shared = {label: [label] * len(found) for label in found[0] if all(label in f for f in found)}
    for title in dict.fromkeys(_READING.sub("", label) for label in found[0]):
        read = [[label for label in f if _READING.sub("", label) == title] for f in found]
        if all(read):
            longest = [max(labels, key=_window) for labels in read]
            if len(set(longest)) > 1:
                shared[title] = longest
    return shared


def _window(label: str) -> float:
    """Return the window of a result in tokens; infinity if documents were read whole."""
    match = _READING.search(label)
    return float(match[1]) if match and match[1] else np.inf


def _reading(label: str, title: str) -> str:
    return "" if label == title else label[len(_READING.sub("", label)) :]


def _tables(
    title: str, group: str, names: Sequence[str], results: Sequence[Any], runs: Sequence[Path]
) -> list[Table]:
    """Return the tables that compare one result of each run."""
    if group == "text":
        return [text_table(title, names, results), position_table(names, results)]
    if group in _SHARES:
        return [share_table(title, group, names, results, runs)]
    if group == "questions":
        return [questions_table(title, names, results, runs)]
    if group == "translate":
        return [translation_table(title, names, results, runs)]
    return [harness_table(title, names, results)] if group == "lm_eval" else []


def short_names(runs: Sequence[Path]) -> list[str]:
    """Return the shortest ends of paths that distinguish all of them."""
    for size in range(1, 1 + max(len(run.parts) for run in runs)):
        names = ["/".join(run.parts[-size:]) for run in runs]
        if len(set(names)) == len(names):
            return names
    return [f"{run} ({number})" for number, run in enumerate(runs, 1)]


def text_table(label: str, names: Sequence[str], results: Sequence[dict[str, Any]]) -> Table:
    """Return the table of bits per byte."""
    against = f"against {names[0]}"
    has_ablations = any(result.get("ablations") for result in results)
    columns = ("run", "bits per byte", against, "95%", "gained by memory", "tokens/s")
    table = Table(label, (*columns, *["gained against"] * has_ablations), words=(0, 6))
    # with --ablate the documents are read once more, and slower
    is_alike = len({tuple(result.get("ablations", ())) for result in results}) == 1
    for name, result in zip(names, results, strict=True):
        difference = _difference(result, results[0]) if result is not results[0] else None
        table.add_row(
            name,
            f"{result['bits_per_byte']:.4f}",
            "" if difference is None else f"{difference[0]:+.4f}",
            "" if difference is None else ends_of(difference[1:]),
            f"{result['memory_gain']['bits_per_byte']:.4f}",
            f"{result['tokens_per_second']:,.0f}" if is_alike else "",
            *[_gains(result)] * has_ablations,
        )
    return table


def _gains(result: dict[str, Any]) -> str:
    """Return by how many bits per byte a run is better than each of its ablations."""
    ablations = result.get("ablations", {}).items()
    return "; ".join(f"{name} {r['gain'][0]:+.4f}" for name, r in ablations if "gain" in r)


def _difference(
    result: dict[str, Any], other: dict[str, Any]
) -> tuple[float, float | None, float | None] | None:
    """Return by how many bits per byte a run is worse than another; None if it cannot be paired."""
    rows, others = result.get("by_document") or [], other.get("by_document") or []
    where = [[(row["file"], row["line"], row["bytes"]) for row in each] for each in (rows, others)]
    if not rows or where[0] != where[1]:
        return None
    nats, other_nats = (np.array([row["nats"] for row in each]) for each in (rows, others))
    return paired_interval(nats, other_nats, np.array([row["bytes"] for row in rows]))


def position_table(names: Sequence[str], results: Sequence[dict[str, Any]]) -> Table:
    """Return the table of the loss by position; cells are empty where a result has no position."""
    table = Table("loss by position", ("tokens before", *names))
    every = [{(r["from"], r["to"]): r["loss"] for r in result["by_position"]} for result in results]
    for first, last in sorted({span for losses in every for span in losses}):
        losses = (each.get((first, last)) for each in every)
        cells = ("" if loss is None else f"{loss:.4f}" for loss in losses)
        table.add_row(f"{first:,} to {last:,}", *cells)
    return table


def share_table(
    label: str,
    group: str,
    names: Sequence[str],
    results: Sequence[Any],
    runs: Sequence[Path],
) -> Table:
    """Return the table of the share of right answers by length."""
    is_paired = group in ("long", "passkey")
    differences = [f"{name} against {names[0]}, 95%" for name in names[1:]] * is_paired
    table = Table(label, ("length", *names, *differences))
    every = [_rows(result) for result in results]
    for length in (row["length"] for row in every[0]):
        aligned = [next((r for r in rows if r["length"] == length), None) for rows in every]
        cells = ["" if row is None else f"{row[_SHARES[group]]:.1%}" for row in aligned]
        if group == "passkey":
            cells += [_paired_keys(row, aligned[0]) for row in aligned[1:]]
        elif differences:
            scores = [_scores(r, result, length) for r, result in zip(runs, results, strict=True)]
            cells += [_paired(each, scores[0]) for each in scores[1:]]
        table.add_row(f"{length:,}", *cells)
    return table


def _paired_keys(row: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    """Return the difference of the shares of keys found in the same documents, and its interval."""
    if row is None or other is None:
        return ""
    # results of versions that did not keep a hash of the documents have none
    versions = {each.get("documents") for each in (row, other)}
    if len(versions) > 1 or None in versions or row["examples"] != other["examples"]:
        return "other documents"
    gains = np.array(row["by_document"], float) - np.array(other["by_document"], float)
    mean, low, high = mean_interval(gains)
    return f"{mean:+.1%} ({100 * low:+.0f} to {100 * high:+.0f})"


def questions_table(
    label: str, names: Sequence[str], results: Sequence[dict[str, Any]], runs: Sequence[Path]
) -> Table:
    """Return the table of the scores on questions in files, and of their paired differences."""
    against = f"against {names[0]}, 95%"
    columns = ("run", "metric", "score", against, "gained against", "tokens/s")
    table = Table(label, columns, words=(0, 1, 4))
    scores = [_scores(r, result, 0) for r, result in zip(runs, results, strict=True)]
    for i, (name, result) in enumerate(zip(names, results, strict=True)):
        table.add_row(
            name,
            result["metric"],
            f"{result['score']:.1%}",
            _paired(scores[i], scores[0]) if i else "",
            "; ".join(f"{name} {r['gain'][0]:+.1%}" for name, r in result["ablations"].items()),
            f"{result['tokens_per_second']:,.0f}",
        )
    return table


def translation_table(
    label: str, names: Sequence[str], results: Sequence[dict[str, Any]], runs: Sequence[Path]
) -> Table:
    """Return the table of BLEU and chrF, or of ROUGE, and of the paired differences of outputs.

    The differences are of chrF, or of ROUGE-L of whole summaries, since BLEU is only defined for a
    corpus.
    """
    # results of earlier versions lack rouge_lsum
    summary = "rouge_lsum" if all("rouge_lsum" in result for result in results) else "rouge_l"
    kinds = {"bleu": "BLEU", "chrf": "chrF"} if "bleu" in results[0] else {summary: "ROUGE-L"}
    against = f"{list(kinds.values())[-1]} of each against {names[0]}, 95%"
    table = Table(
        label, ("run", "length penalty", *kinds.values(), against, "tokens/s"), words=(0,)
    )
    scores = [_scores(r, result, 0) for r, result in zip(runs, results, strict=True)]
    for i, (name, result) in enumerate(zip(names, results, strict=True)):
        table.add_row(
            name,
            f"{result['length_penalty']:g}",
            *(f"{result[kind] * (1 if 'bleu' in kinds else 100):.2f}" for kind in kinds),
            _paired(scores[i], scores[0]) if i else "",
            search_speed(result),
        )
    return table


def harness_table(label: str, names: Sequence[str], results: Sequence[dict[str, Any]]) -> Table:
    """Return the table of the harness's metrics, and of their paired differences over examples."""
    differences = [f"{name} against {names[0]}, 95%" for name in names[1:]]
    table = Table(label, ("task", "metric", *names, *differences), words=(0, 1))
    every = [{_metric(row): row for row in result["rows"]} for result in results]
    for metric, first in every[0].items():
        values = [rows.get(metric) for rows in every]
        cells = ["" if row is None else f"{row['value']:.4f}" for row in values]
        table.add_row(*metric[:2], *cells, *(_paired_examples(row, first) for row in values[1:]))
    return table


def _metric(row: dict[str, Any]) -> tuple[str, ...]:
    return row["task"], row["metric"], row["filter"], str(row["version"]), str(row["shots"])


def _paired_examples(row: dict[str, Any] | None, other: dict[str, Any]) -> str:
    """Return the mean difference of a metric over the same examples, and its interval."""
    if row is None or not row["by_example"]:
        return ""
    # results from before 2026-11-26 have no hash of the examples
    documents = {each["documents"] for each in (row, other) if "documents" in each}
    if len(documents) > 1 or len(row["by_example"]) != len(other["by_example"]):
        return "other examples"
    gains = np.array(row["by_example"]) - np.array(other["by_example"])
    return "{:+.4f} ({:+.4f} to {:+.4f})".format(*mean_interval(gains))


def _rows(result: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = result if isinstance(result, list) else result["rows"]
    return rows


def _scores(
    run: Path, result: Any, length: int
) -> dict[tuple[str, int], dict[tuple[Any, ...], float]]:
    """Return the scores at a length, by document (data set and number), then by question.

    A question is identified by its text and references.
    """
    scores: dict[tuple[str, int], dict[tuple[Any, ...], float]] = {}
    # also by tokens and depth if documents are generated; those from files have other numbers of
    # tokens with another tokenizer
    named = ("prompt", "references", *(("tokens", "depth") if length else ()))
    for example in read_examples(run, result):
        if example["length"] == length:
            asked = tuple(repr(example[name]) for name in named)
            document = example.get("subset", ""), example["document"]
            scores.setdefault(document, {})[asked] = example["score"]
    return scores


def _paired(
    scores: dict[tuple[str, int], dict[Any, float]], other: dict[tuple[str, int], dict[Any, float]]
) -> str:
    """Return the difference of the scores and its interval, if the same questions were asked.

    For a collection it is the mean over its data sets.
    """
    asked = [{n: set(each[n]) for n in each} for each in (scores, other)]
    if not scores or not other:
        return "not measured"
    if asked[0] != asked[1]:
        return "other documents"
    sets = []
    for subset in sorted({subset for subset, _ in scores}):
        documents = [each for each in scores if each[0] == subset]
        sums = [np.array([sum(s[n].values()) for n in documents]) for s in (scores, other)]
        sets.append((sums[0] - sums[1], np.array([len(scores[n]) for n in documents])))
    mean, low, high = mean_of_ratios(sets)
    return f"{mean:+.1%} ({100 * low:+.0f} to {100 * high:+.0f})"


def draw(
    found: Sequence[dict[str, Any]],
    shared: Sequence[str],
    names: Mapping[str, Sequence[str]],
    path: Path,
) -> Path:
    """Plot the loss by position, and the share of right answers by length, of all runs."""
    figure, axes = new_figure(1, len(shared), size=(6 * len(shared), 4))
    for ax, label in zip(np.atleast_1d(axes), shared, strict=True):
        group = found[0][label]["group"]
        for name, results in zip(names[label], found, strict=True):
            result = results[label]["result"]
            rows = result["by_position"] if group == "text" else _rows(result)
            at = "to" if group == "text" else "length"
            key = "loss" if group == "text" else _SHARES.get(group, "accuracy")
            ax.plot([row[at] for row in rows], [row[key] for row in rows], "o-", label=name)
        ax.set_xscale("log", base=2)
        if group == "text":
            ax.set(title=label, xlabel="position, up to", ylabel="loss (nats a token)")
        else:
            ax.set(title=label, xlabel="tokens of the document", ylabel="right answers")
        ax.legend()
    return save_figure(figure, path)
