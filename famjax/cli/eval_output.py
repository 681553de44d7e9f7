"""Tables of `famjax eval`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from famjax.cli.eval_labels import ABLATED, depth_labels, percent_range
from famjax.cli.question_tables import question_tables
from famjax.cli.tables import Output, Table
from famjax.cli.text_tables import text_tables
from famjax.cli.translation_tables import translation_notes, translation_table
from famjax.core.units import byte_size
from famjax.eval.effective_length import effective_lengths

if TYPE_CHECKING:
    from famjax.eval.long import LongResult
    from famjax.eval.passkey import PasskeyRow


def show_run(report: dict[str, Any]) -> None:
    """Print which run is evaluated."""
    Output().print(f"{report['run']}, step {report['step']:,}")


def show_result(group: str, result: Any) -> None:
    """Print the tables of a result, except for tasks of lm-evaluation-harness."""
    if group == "lm_eval":
        return  # `show_end` has one table of all
    out = Output()
    for part in result_tables(group, result):
        out.print(part)


def show_end(report: dict[str, Any]) -> None:
    """Print what follows the results: the harness's scores, and the peak memory."""
    out = Output()
    if report["lm_eval"]:
        out.print(harness_table(report["lm_eval"]))
    out.print(f"peak memory {byte_size(report['memory']['peak_bytes'])}")


def result_tables(group: str, result: Any) -> list[Table | str]:
    """Return the tables of a result, and lines that explain them.

    Args:
      group: the `Task.group` of the result.
      result: what the task's evaluation returned.
    """
    if group == "passkey":
        ablations = [
            ablation_table("passkey", result, name, "key_accuracy")
            for name in dict.fromkeys(name for row in result for name in row.get("ablations", {}))
        ]
        scores = [{"length": row["length"], "score": row["key_accuracy"]} for row in result]
        scores.sort(key=lambda row: row["length"])
        effective = _effective(effective_lengths(scores))
        return [passkey_table(result), effective, reading_table(result), *ablations]
    if group == "toy":
        return [toy_table(result)]
    if group == "long":
        ablations = [
            ablation_table(result["task"], result["rows"], name)
            for name in result["rows"][0].get("ablations", {})
        ]
        effective = _effective(result["effective_length"])
        return [long_table(result), effective, reading_table(result["rows"]), *ablations]
    if group == "text":
        return text_tables(result)
    if group == "questions":
        return question_tables(result)
    if group == "lm_eval":
        return [harness_table([result])]
    if group == "translate":
        return [translation_table(result), *translation_notes(result)]
    return [rows_table(group, result["rows"])]


def harness_table(results: list[dict[str, Any]]) -> Table:
    seconds = sum(result["seconds"] for result in results)
    table = Table(
        f"lm-evaluation-harness {results[0]['harness']}, {seconds:.0f} seconds",
        ("task", "version", "shots", "examples", "metric", "value", "standard error"),
        words=(0, 4),
    )
    for row in (row for result in results for row in result["rows"]):
        filtered = "" if row["filter"] == "none" else f", {row['filter']}"
        table.add_row(
            row["task"],
            f"{row['version']}",
            f"{row['shots']}",
            "" if row["examples"] is None else f"{row['examples']:,}",
            f"{row['metric']}{filtered}",
            f"{row['value']:.4f}",
            "" if row["error"] is None else f"{row['error']:.4f}",
        )
    return table


def rows_table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Return the table of a task that has no special one: a column for each value of its rows."""
    table = Table(title, tuple(name.replace("_", " ") for name in rows[0]))
    for row in rows:
        table.add_row(
            *(
                f"{v:.4g}" if isinstance(v, float) else f"{v:,}" if isinstance(v, int) else str(v)
                for v in row.values()
            )
        )
    return table


def passkey_table(rows: list[PasskeyRow]) -> Table:
    keys, digits = 100 * rows[0]["key_chance"], rows[0]["token_chance"]
    table = Table(
        f"passkey (guessing gets {keys:.3g}% of whole keys, {digits:.0%} of digits)",
        ("tokens", "documents", "whole keys", "95%", "digits"),
    )
    for row in rows:
        table.add_row(
            f"{row['length']:,}",
            f"{row['examples']:,}",
            f"{row['key_accuracy']:.1%}",
            percent_range(row["interval"]) if "interval" in row else "",
            f"{row['token_accuracy']:.1%}",
        )
    return table


def reading_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of time and memory of reading, by length.

    Updates and state are those of one document. Rows from before 2026-11-26 lack some values.
    """
    columns = ("tokens", "updates", "state", "seconds", "tokens/s", "s/answer", "peak memory")
    table = Table("reading", columns)
    for row in rows:
        table.add_row(
            f"{row['length']:,}",
            f"{row['updates']:,}" if "updates" in row else "",
            byte_size(row["state_bytes"]) if "state_bytes" in row else "",
            f"{row['seconds']:.1f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['answer_seconds']:.2f}" if "answer_seconds" in row else "",
            byte_size(row["peak_bytes"]),
        )
    return table


def toy_table(toy: dict[str, Any]) -> Table:
    first = toy["rows"][0]
    columns = ("steps", "episodes", "whole episodes", "answers", f"always {first['commonest']}")
    table = Table(
        f"{toy['task']} (guessing gets {first['chance']:.1%} of answers)",
        (*columns, "repeat last answer", "tokens/s"),
    )
    for row in toy["rows"]:
        table.add_row(
            f"{row['length']:,}",
            f"{row['examples']:,}",
            f"{row['episode_accuracy']:.1%}",
            f"{row['accuracy']:.1%}",
            f"{row['commonest_accuracy']:.1%}",
            "" if row["last_accuracy"] is None else f"{row['last_accuracy']:.1%}",
            f"{row['tokens_per_second']:,.0f}",
        )
    return table


def long_table(long: LongResult) -> Table:
    rows = long["rows"]
    depths = depth_labels(len(rows[0]["by_depth"]))
    table = Table(
        f"{long['task']} ({long['source']}): share of the references in the answers, by depth",
        ("tokens", "answers", "score", "95%", *depths, "cut"),
    )
    for row in rows:
        table.add_row(
            f"{row['length']:,}",
            f"{row['examples']:,}",
            f"{row['score']:.1%}",
            percent_range(row["interval"]),
            *("" if share is None else f"{share:.0%}" for share in row["by_depth"]),
            f"{row['cut']:,}",
        )
    return table


def ablation_table(
    task: str, rows: Sequence[Mapping[str, Any]], name: str, score: str = "score"
) -> Table:
    """Return the table of how much a run gains against an ablation.

    Args:
      task: name of the task.
      rows: results of the lengths.
      name: name of the ablation.
      score: key of the run's own score in the rows.
    """
    table = Table(
        f"{task}: gained against {ABLATED[name]}",
        ("tokens", "updates", "score without", "score with", "gained", "95%"),
    )
    for row in rows:
        if name not in row.get("ablations", {}):
            continue  # a length of an earlier evaluation
        gain, low, high = row["ablations"][name]["gain"]
        table.add_row(
            f"{row['length']:,}",
            f"{row['updates']:,}",
            f"{row['ablations'][name]['score']:.1%}",
            f"{row[score]:.1%}",
            f"{gain:+.1%}",
            f"{100 * low:+.0f} to {100 * high:+.0f}",
        )
    return table


def _effective(lengths: dict[str, int | None]) -> str:
    """Return a line with the effective lengths."""
    shown = {rule: "none" if n is None else f"{n:,} tokens" for rule, n in lengths.items()}
    return (
        f"effective length: {shown['ruler']} (RULER: scores of 85.6% and more), {shown['nolima']} "
        "(NoLiMa: at least 85% of the score of the shortest)"
    )
