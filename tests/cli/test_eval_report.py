"""What `famjax eval` keeps in a run's report.json."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny

from famjax.cli import eval_report
from famjax.cli.eval import Arguments, ignored_options
from famjax.cli.eval_output import result_tables
from famjax.cli.main import main
from famjax.cli.report import sample_examples
from famjax.cli.tables import Table


def save(folder: Path, step: int, files: str, weights: str | None = None) -> None:
    eval_report.save_result(folder, step, weights, "text", "text", {"files": files, "step": step})


def test_results_of_other_weights_are_kept_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def labels(name: str) -> list[str]:
        return list(json.loads((tmp_path / name).read_text())["results"])

    save(tmp_path, 2, "a")
    save(tmp_path, 2, "b")
    assert capsys.readouterr().err == ""
    save(tmp_path, 3, "c")
    assert "of step 2; they were moved to report-2.json" in capsys.readouterr().err
    assert (labels("report.json"), labels("report-2.json")) == (["text:c"], ["text:a", "text:b"])
    # those of step 2 again, with what there was
    save(tmp_path, 2, "d")
    assert labels("report.json") == ["text:a", "text:b", "text:d"]
    assert labels("report-3.json") == ["text:c"]
    # another model in the same folder is always at step 0
    save(tmp_path, 0, "a", "1234")
    save(tmp_path, 0, "b", "5678")
    assert labels("report.json") == ["text:b"]
    assert labels("report-0-1234.json") == ["text:a"]


def test_the_report_is_json_if_a_loss_is_very_large_or_nan(tmp_path: Path) -> None:
    """Python's own Infinity and NaN are no JSON; tables of the report have nan."""
    infinite = {"loss": 710.0, "accuracy": 0.0, "perplexity": math.inf, "bits_per_byte": 1024.3}
    nan = {"loss": math.nan, "accuracy": 0.0, "perplexity": math.nan, "bits_per_byte": math.nan}
    counts = {"documents": 1, "documents_left": 0, "tokens": 8, "bytes": 8, "state_bytes": 8}
    position = {"from": 0, "to": 8, "tokens": 8, "loss": math.nan, "loss_without_memory": math.nan}
    text = infinite | counts | {"files": "a", "window": None, "score": None, "words": 2}
    text |= {"tokens_per_second": 1.0, "word_perplexity": math.inf, "by_position": [position]}
    text |= {"without_memory": nan, "memory_gain": nan, "unigram": infinite, "uniform": infinite}
    text["ablations"] = {"memory": nan | {"gain": [math.nan, None, None]}}
    for label in ("a", "b"):  # the first is written again with the second
        eval_report.save_result(tmp_path, 2, None, "text", "text", text | {"files": label})
    saved = json.loads((tmp_path / eval_report.REPORT).read_text(), parse_constant=pytest.fail)
    assert saved["results"]["text:a"]["result"]["perplexity"] is None
    result = eval_report.read_report(tmp_path)["results"]["text:a"]["result"]
    assert (result["loss"], result["window"]) == (710.0, None)
    tables = [part.lines(None) for part in result_tables("text", result) if isinstance(part, Table)]
    lines = [" ".join(line.split()) for table in tables for line in table]
    assert "with memory 1024.3000 710.0000 nan 0.00%" in lines
    assert "the memory at its initial value +nan" in lines


def test_evaluations_at_once_lose_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = eval_report.read_report
    both = threading.Barrier(2)

    def read_slowly(folder: Path, *name: str) -> Any:
        found = read(folder, *name)
        # without a lock both have read before either writes
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return found

    monkeypatch.setattr(eval_report, "read_report", read_slowly)
    threads = [threading.Thread(target=save, args=(tmp_path, 2, files)) for files in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read(tmp_path)["results"].keys() == {"text:a", "text:b"}


def test_fewer_lengths_leave_the_others_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def long(lengths: list[int], score: float, settings: str = "x") -> dict[str, Any]:
        rows = [{"length": length, "score": score} for length in lengths]
        return {"files": "", "settings": settings, "rows": rows, "effective_length": {}}

    def saved(*results: dict[str, Any]) -> Any:
        for result in results:
            eval_report.save_result(tmp_path, 2, None, "long", "vt", result)
        return eval_report.read_report(tmp_path)["results"]["vt"]["result"]

    found = saved(long([512, 1024], 1.0), long([512, 256], 0.9))
    assert [(row["length"], row["score"]) for row in found["rows"]] == [
        (256, 0.9),
        (512, 0.9),
        (1024, 1.0),
    ]
    assert found["effective_length"] == {"ruler": 1024, "nolima": 1024}
    assert capsys.readouterr().err == ""
    # other examples are others
    assert [row["length"] for row in saved(long([512], 0.5, "y"))["rows"]] == [512]
    replaced = "vt: replaces an earlier evaluation with other settings (of 256, 512, 1,024 tokens)"
    assert replaced in capsys.readouterr().err


def test_rows_of_passkeys_are_joined_if_they_are_of_as_many_documents(tmp_path: Path) -> None:
    def saved(length: int, examples: int) -> list[int]:
        rows = [{"length": length, "examples": examples, "documents": "d"}]
        eval_report.save_result(tmp_path, 2, None, "passkey", "passkey", rows)
        found = eval_report.read_report(tmp_path)["results"]["passkey"]["result"]
        return [row["length"] for row in found]

    assert saved(256, 100) == [256]
    assert saved(512, 100) == [256, 512]
    assert saved(1024, 5) == [1024]


def test_few_episodes_do_not_replace_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def saved(*rows: tuple[int, int]) -> list[tuple[int, int]]:
        result = {"rows": [{"length": length, "examples": number} for length, number in rows]}
        eval_report.save_result(tmp_path, 2, None, "toy", "copy", result)
        found = eval_report.read_report(tmp_path)["results"]["copy"]["result"]["rows"]
        return [(row["length"], row["examples"]) for row in found]

    assert saved((60, 1000), (90, 10)) == [(60, 1000), (90, 10)]
    assert capsys.readouterr().err == ""
    assert saved((60, 5), (90, 1000), (30, 5)) == [(30, 5), (60, 1000), (90, 1000)]
    told = "copy: keeps the earlier evaluation with more episodes (of 60 steps)"
    assert told in capsys.readouterr().err


def test_a_trial_does_not_replace_an_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def saved(group: str, result: dict[str, Any]) -> Any:
        eval_report.save_result(tmp_path, 2, None, group, group, result)
        (found,) = (
            each["result"]
            for each in eval_report.read_report(tmp_path)["results"].values()
            if each["group"] == group
        )
        return found

    whole, trial = ({"rows": [{"examples": count}], "shots": None} for count in (10_042, 2))
    assert saved("lm_eval", whole) == saved("lm_eval", trial) == whole
    assert "keeps the earlier evaluation of 10,042 examples" in capsys.readouterr().err
    ablated = {"tokens": 7, "ablations": {"segments": {}}}
    assert saved("text", ablated) == saved("text", {"tokens": 7, "ablations": {}}) == ablated
    assert "which has --ablate segments" in capsys.readouterr().err
    assert saved("text", {"tokens": 8, "ablations": {}}) == {"tokens": 8, "ablations": {}}


def test_no_shots_are_not_those_of_the_task() -> None:
    labels = [
        eval_report.result_label("lm_eval", "lm_eval", {"files": "arc_easy", "shots": shots})
        for shots in (None, 0, 5)
    ]
    assert labels == [f"lm_eval:arc_easy{end}" for end in ("", " --shots 0", " --shots 5")]


def test_a_run_that_cannot_be_written_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_report.os, "access", lambda path, mode: False)
    assert eval_report.eval_folder(str(tmp_path)) is None
    (told,) = capsys.readouterr().err.splitlines()
    assert "cannot be written to; results are printed but not saved" in told


def test_examples_of_all_lengths_are_shown() -> None:
    examples = [
        {"length": length, "document": i} for length in (512, 1024, 4096) for i in range(10)
    ]
    shown = sample_examples(examples, 7)
    assert [(each["length"], each["document"]) for each in shown] == [
        *((512, i) for i in range(3)),
        *((1024, i) for i in range(2)),
        *((4096, i) for i in range(2)),
    ]
    assert sample_examples(examples, 100) == examples


def test_each_result_is_printed_when_it_is_there_and_kept_if_a_later_task_is_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(tiny.folder(), tmp_path / "run")
    (tmp_path / "a.txt").write_text("some text to read " * 9)
    tasks = f"text:{tmp_path}/a.txt,niah_single_1"

    def stop(run: Any, request: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("famjax.eval.long.evaluate", stop)
    assert main(["eval", str(folder), "--tasks", tasks, "--lengths", "1024"]) == 130
    out, err = capsys.readouterr()
    assert "bits per byte" in out
    kept = f"results of finished tasks are in {folder}/eval; "
    kept += "questions answered there are not asked again"
    assert err.splitlines()[-2:] == [kept, "famjax: stopped by Ctrl-C"]
    saved = json.loads((folder / "eval" / "report.json").read_text())["results"]
    assert any(name.startswith("text:") for name in saved)


def test_documents_of_all_tasks_are_checked_before_the_first_is_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("famjax.eval.long.evaluate_long", None)
    tasks = ["--tasks", "niah_single_1,cwe", "--lengths", "1024"]
    assert main(["eval", str(tiny.folder()), *tasks]) == 2
    assert re.search(
        r"^famjax: cwe: only \d+ words fit, too few for any to be common; at least 120 are needed, "
        r"in documents \d\.\d times as long\n\Z",
        capsys.readouterr().err,
    )
    (tmp_path / "qa.jsonl").write_text('{"passage": "a", "question": "", "answer": "b"}')
    tasks = ["--tasks", f"niah_single_1,narrativeqa:{tmp_path}/qa.jsonl", "--lengths", "1024"]
    assert main(["eval", str(tiny.folder()), *tasks]) == 2
    assert "qa.jsonl, line 1: the question is empty" in capsys.readouterr().err


def test_options_without_an_effect_on_a_task_are_told() -> None:
    arguments = Arguments("run", window=64, lengths="1024", chat=True)
    assert list(ignored_options(arguments, ["text", "passkey", "lm_eval", "text"])) == [
        "--lengths 1024: has no effect on text, lm_eval",
        "--window 64: has no effect on passkey, lm_eval",
        "--chat: has no effect on text, passkey",
    ]
