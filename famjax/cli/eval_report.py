"""The results of a run's evaluations, in RUN/eval/report.json."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from famjax.core.errors import UserError
from famjax.core.folder_lock import lock_folder
from famjax.core.json_files import RUN_AGAIN, read_json, write_json
from famjax.core.paths import expanded

REPORT = "report.json"


def eval_folder(run: str) -> Path | None:
    """Return the folder of a run's results; None, and a line that says so, if it is read-only.

    Raises:
      UserError: it is not a folder.
    """
    folder = expanded(run) / "eval"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is in the way of the results; remove it")
    if os.access(folder if folder.exists() else folder.parent, os.W_OK):
        return folder
    print(
        f"{folder}: cannot be written, so results are only printed, and an evaluation that is "
        "stopped begins anew",
        file=sys.stderr,
    )
    return None


def read_report(folder: Path, name: str = REPORT) -> dict[str, Any]:
    """Return step, weights and results of a run's report.json, which may not be there.

    Raises:
      UserError: it is damaged.
    """
    file = folder / name
    saved = read_json(file, RUN_AGAIN) if file.exists() else {"results": {}}
    results = saved.get("results") if isinstance(saved, dict) else None
    if not isinstance(results, dict) or not all(
        isinstance(found, dict) and set(found) == {"group", "result"} for found in results.values()
    ):
        raise UserError(f"{file}: damaged; {RUN_AGAIN}")
    return {"step": saved.get("step"), "weights": saved.get("weights"), "results": results}


def save_result(
    folder: Path, step: int, weights: str | None, group: str, name: str, result: Any
) -> None:
    """Add a result to the report.json of a run, which `famjax report` reads.

    It has the newest result of every task, files and settings, all of them of the same weights.
    The report of other weights is kept beside it, under its step.

    Args:
      weights: what tells them from others of the same step, of a model's folder; else None.
    """
    folder.mkdir(exist_ok=True)
    with lock_folder(folder):
        saved = read_report(folder)
        if saved["results"] and (saved["step"], saved["weights"]) != (step, weights):
            kept = _kept_name(saved["step"], saved["weights"])
            os.replace(folder / REPORT, folder / kept)
            print(
                f"{folder / REPORT}: its results are of other weights, of step {saved['step']}; "
                f"they are kept in {kept}",
                file=sys.stderr,
            )
            # those of an earlier evaluation of these weights, if there was one
            saved = read_report(folder, _kept_name(step, weights))
        label = result_label(group, name, result)
        before = saved["results"].get(label)
        if before is not None:
            result = _with_other_lengths(group, result, before["result"])
        results = {**saved["results"], label: {"group": group, "result": result}}
        write_json(folder / REPORT, {"step": step, "weights": weights, "results": results})


def _kept_name(step: int, weights: str | None) -> str:
    return f"report-{step}{'' if weights is None else f'-{weights}'}.json"


def _with_other_lengths(group: str, result: Any, before: Any) -> Any:
    """Return a result with the rows of those lengths that only an earlier one has.

    Examples of other settings are other examples, whose rows are left out.
    """
    if group in ("passkey", "toy", "long") and _settings(result) == _settings(before):
        rows = {row["length"]: row for found in (before, result) for row in _rows(found)}
        joined = [rows[length] for length in sorted(rows)]
        if isinstance(result, list):
            return joined
        result = {**result, "rows": joined}
        if group == "long":
            from famjax.eval.long import effective_lengths  # JAX

            result["effective_length"] = effective_lengths(joined)
    return result


def _settings(result: Any) -> Any:
    """Return what tells the examples of a result from other ones, whatever their lengths."""
    if isinstance(result, dict) and "settings" in result:
        return result["settings"]
    # of passkeys the documents are known by row, of toy tasks the episodes by their number
    return sorted({(row.get("documents", ""), row["examples"]) for row in _rows(result)})


def _rows(result: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = result if isinstance(result, list) else result["rows"]
    return rows


def result_label(group: str, name: str, result: Any) -> str:
    """Return what tells a result from the others of a run, as options."""
    if group == "passkey":
        return name
    parts = [name, *[f":{files}" for files in [result.get("files")] if files]]
    named = ["facts", "shots", "chat", "window"]
    # of other tasks it is the score of the answers
    if group == "text" and result.get("score") != result.get("window"):
        named.append("score")
    parts += [f" --{key} {result[key]}" for key in named if result.get(key)]
    return "".join([*parts, *_search_label(result)])


def _search_label(result: Any) -> list[str]:
    """Return what of a search tells it from others of the same pairs, as options."""
    if "beam" not in result:
        return []
    if "penalties" in result:  # the best of which is a result, and differs between runs
        penalty = " --tune"
    else:
        penalty = f" --length-penalty {result['length_penalty']:g}" if result["beam"] > 1 else ""
    ngram = f" --no-repeat-ngram {size}" if (size := result["no_repeat_ngram"]) else ""
    most = f" --max-tokens {most}" if (most := result.get("max_tokens")) else ""
    tokenized = " --tokenized" if result.get("tokenized") else ""
    return [f" --beam {result['beam']}", penalty, ngram, most, tokenized]
