"""The results of a run's evaluations, in RUN/eval/report.json."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

from famjax.core.atomic import write_file
from famjax.core.errors import UserError
from famjax.core.folder_lock import lock_folder
from famjax.core.json_files import RUN_AGAIN, dump_strictly, read_json
from famjax.core.paths import expanded
from famjax.eval.effective_length import effective_lengths

REPORT = "report.json"
# numbers of a text that are not finite if its loss is very large or NaN
_MAY_BE_NULL = {
    *("loss", "loss_without_memory", "perplexity", "word_perplexity", "bits_per_byte"),
    *("nats", "nats_without_memory"),
}


def eval_folder(run: str) -> Path | None:
    """Return the folder of a run's results; print a line and return None if it is read-only.

    Raises:
      UserError: a file is in its place.
    """
    folder = expanded(run) / "eval"
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is not a folder, and results are written there; remove it")
    if os.access(folder if folder.exists() else folder.parent, os.W_OK):
        return folder
    print(
        f"{folder}: cannot be written to; results are printed but not saved, and an evaluation "
        "that is interrupted starts from the beginning",
        file=sys.stderr,
    )
    return None


def read_report(folder: Path, name: str = REPORT) -> dict[str, Any]:
    """Return step, weights and results in a run's report.json; no results if there is no file.

    Numbers of texts that were not finite are NaN.

    Raises:
      UserError: the file is damaged.
    """
    file = folder / name
    saved = read_json(file, RUN_AGAIN) if file.exists() else {"results": {}}
    results = saved.get("results") if isinstance(saved, dict) else None
    if not isinstance(results, dict) or not all(
        isinstance(found, dict) and set(found) == {"group", "result"} for found in results.values()
    ):
        raise UserError(f"{file}: damaged; {RUN_AGAIN}")
    results = _with_nan(results)
    return {"step": saved.get("step"), "weights": saved.get("weights"), "results": results}


def _with_nan(value: Any) -> Any:
    """Return results with NaN where `dump_strictly` wrote null for a number of a text."""
    if isinstance(value, list):
        return [_with_nan(part) for part in value]
    if not isinstance(value, dict):
        return value
    restored = {key: _with_nan(part) for key, part in value.items()}
    for key, part in value.items():
        if part is None and key in _MAY_BE_NULL:
            restored[key] = math.nan
        elif key == "gain" and isinstance(part, list) and part[:1] == [None]:
            # the ends of its interval may be None
            restored[key] = [math.nan, *part[1:]]
    return restored


def save_result(
    folder: Path, step: int, weights: str | None, group: str, name: str, result: Any
) -> None:
    """Add a result to the report.json of a run, which `famjax report` reads.

    The file has the newest result for each combination of task, files and settings, all for the
    same weights. Of lm_eval, questions, pairs and toy tasks, a result of fewer examples, such as a
    trial, does not replace one of more. A report for other weights is kept beside it, with the step
    in its name.

    Args:
      folder: folder of the results.
      step: step of the weights.
      weights: for a model's folder, a hash that distinguishes its weights from others of the same
        step; None for a run.
      group: the `Task.group` of the result.
      name: name of the task.
      result: what the task's evaluation returned.
    """
    folder.mkdir(exist_ok=True)
    with lock_folder(folder):
        saved = read_report(folder)
        if saved["results"] and (saved["step"], saved["weights"]) != (step, weights):
            kept = _kept_name(saved["step"], saved["weights"])
            os.replace(folder / REPORT, folder / kept)
            print(
                f"{folder / REPORT}: the earlier results belong to other weights, of step "
                f"{saved['step']}; they were moved to {kept}",
                file=sys.stderr,
            )
            # continue the report of an earlier evaluation of these weights, if there is one
            saved = read_report(folder, _kept_name(step, weights))
        label = result_label(group, name, result)
        before = saved["results"].get(label)
        if before is not None:
            if reason := _reason_to_keep(group, result, before["result"]):
                print(f"{folder / REPORT}: {label}: {reason}", file=sys.stderr)
                return
            given, result = result, _with_other_rows(group, result, before["result"])
            if note := _difference(group, given, result, before["result"]):
                print(f"{folder / REPORT}: {label}: {note}", file=sys.stderr)
        results = {**saved["results"], label: {"group": group, "result": result}}
        report = {"step": step, "weights": weights, "results": results}
        # strictly, because other programs read it, too
        write_file(folder / REPORT, dump_strictly(report, indent=1))


def _kept_name(step: int, weights: str | None) -> str:
    return f"report-{step}{'' if weights is None else f'-{weights}'}.json"


def _with_other_rows(group: str, result: Any, before: Any) -> Any:
    """Return a result, with the rows of an earlier result for lengths that only that one has.

    The earlier row of a toy task stays, too, if it has more episodes. If the settings of the
    earlier result differ, so do its examples, and its rows are left out.
    """
    if group in ("passkey", "toy", "long") and _settings(result) == _settings(before):
        rows: dict[int, dict[str, Any]] = {}
        for row in (*_rows(before), *_rows(result)):
            earlier = rows.get(row["length"], row)
            if group != "toy" or earlier["examples"] <= row["examples"]:
                rows[row["length"]] = row
        joined = [rows[length] for length in sorted(rows)]
        if isinstance(result, list):
            return joined
        result = {**result, "rows": joined}
        if group == "long":
            result["effective_length"] = effective_lengths(joined)
    return result


def _reason_to_keep(group: str, result: Any, before: Any) -> str:
    """Return why an earlier result stays in the report, or "" if the new one replaces it."""
    if group == "text":
        # the same text, read by the same weights
        is_same = result.get("tokens") == before.get("tokens")
        lacks = set(before.get("ablations", {})) - set(result.get("ablations", {}))
        if is_same and lacks:
            return f"keeps the earlier evaluation, which has --ablate {','.join(sorted(lacks))}"
    earlier, examples = _examples(group, before), _examples(group, result)
    if earlier > examples:
        return (
            f"keeps the earlier evaluation of {earlier:,} examples, which these {examples:,} do "
            "not replace; to replace it, remove its entry from the file"
        )
    return ""


def _examples(group: str, result: Any) -> int:
    """Return the number of examples of a result whose task may be limited to some; else 0."""
    if group == "lm_eval":
        return sum(row["examples"] or 0 for row in result["rows"])
    keys = {"questions": "questions", "translate": "pairs"}
    return result.get(keys[group], 0) if group in keys else 0


def _difference(group: str, given: Any, saved: Any, before: Any) -> str:
    """Return a line about rows of earlier results that are lost, or of new ones that are not saved.

    Args:
      given: the new result.
      saved: the result that is saved, with rows of the earlier one.
      before: the earlier result.
    """
    if group not in ("passkey", "toy", "long"):
        return ""
    if _settings(given) != _settings(before):
        lengths = ", ".join(f"{row['length']:,}" for row in _rows(before))
        return f"replaces an earlier evaluation with other settings (of {lengths} tokens)"
    in_file = {id(row) for row in _rows(saved)}
    kept = [f"{row['length']:,}" for row in _rows(given) if id(row) not in in_file]
    more = "keeps the earlier evaluation with more episodes"
    return f"{more} (of {', '.join(kept)} steps)" if kept else ""


def _settings(result: Any) -> Any:
    """Return a value that identifies the examples of a result, apart from their lengths."""
    if isinstance(result, dict) and "settings" in result:
        return result["settings"]
    # passkey rows have a hash of their documents; all episodes of a toy task are of the same kind
    rows = [row for row in _rows(result) if "documents" in row]
    return sorted({(row["documents"], row["examples"]) for row in rows})


def _rows(result: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = result if isinstance(result, list) else result["rows"]
    return rows


def result_label(group: str, name: str, result: Any) -> str:
    """Return a label that distinguishes a result from others of the same run, with its options."""
    if group == "passkey":
        return name
    parts = [name, *[f":{files}" for files in [result.get("files")] if files]]
    named = ["facts", "shots", "chat", "window"]
    # in results of other tasks, score is that of the answers
    if group == "text" and result.get("score") != result.get("window"):
        named.append("score")
    # without shots, an example has as many as its task's file says
    given = [(key, result.get(key)) for key in named]
    parts += [f" --{key} {value}" for key, value in given if value or (key, value) == ("shots", 0)]
    return "".join([*parts, *_search_label(result)])


def _search_label(result: Any) -> list[str]:
    """Return the options that distinguish a search from others on the same pairs."""
    if "beam" not in result:
        return []
    if "penalties" in result:  # not the best penalty, which differs between runs
        penalty = " --tune"
    else:
        penalty = f" --length-penalty {result['length_penalty']:g}" if result["beam"] > 1 else ""
    ngram = f" --no-repeat-ngram {size}" if (size := result["no_repeat_ngram"]) else ""
    max_tokens = f" --max-tokens {count}" if (count := result.get("max_tokens")) else ""
    tokenized = " --tokenized" if result.get("tokenized") else ""
    return [f" --beam {result['beam']}", penalty, ngram, max_tokens, tokenized]
