"""`famjax compare`: runs side by side, on the same documents."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from famjax.cli.compare import (
    _paired,
    _paired_examples,
    _paired_keys,
    _scores,
    shared_labels,
    short_names,
    text_table,
)
from famjax.cli.compare_segments import normalized_scores
from famjax.cli.main import main
from famjax.eval.examples import Example, Examples, digest, examples_name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two equal runs, both evaluated; of one result the figures are changed."""
    home = tmp_path_factory.mktemp("compare")
    (home / "text.txt").write_text(tiny.TEXT * 8)
    (home / "other.txt").write_text(tiny.TEXT * 5)
    for name in ("a", "b"):
        shutil.copytree(tiny.folder(), home / name, ignore=shutil.ignore_patterns("eval"))
        tasks = f"text:{home}/text.txt,{home}/other.txt,niah_single_1,passkey"
        sizes = ["--lengths", "700,900", "--examples", "3"]
        assert main(["eval", str(home / name), "--tasks", tasks, *sizes]) == 0
    (file,) = (home / "b" / "eval").glob("niah_single_1-*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line.get("length") == 700 and line.get("document") == 1:
            line["score"] = 1.0
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = home / "b" / "eval" / "report.json"
    saved = json.loads(report.read_text())
    (label,) = (label for label in saved["results"] if label.startswith(f"text:{home}"))
    for row in saved["results"][label]["result"]["by_document"]:
        row["nats"] += row["bytes"] * np.log(2) / 2
    saved["results"][label]["result"]["accuracy"] = 0.5
    report.write_text(json.dumps(saved))
    return [str(home / "a"), str(home / "b")]


@pytest.mark.long
def test_runs_are_compared(
    runs: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["compare", *runs, "--plot", str(tmp_path / "plot.png")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "+0.5000 +0.5000 to +0.5000" in out
    assert "loss by position" in out
    assert "700 0.0% 0.0% +33.3% (+0 to +100)" in out
    assert "900 0.0% 0.0% +0.0% (-71 to +71)" in out
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_only_the_same_questions_and_documents_are_paired() -> None:
    scores = {("", 0): {("a?", "x"): 1.0}, ("", 1): {("b?", "y"): 0.0}}
    same = {("", 0): {("a?", "x"): 0.0}, ("", 1): {("b?", "y"): 0.0}}
    assert _paired(scores, same).startswith("+50.0%")
    assert _paired(scores, {**same, ("", 0): {("a?", "z"): 0.0}}) == "other documents"
    # of a collection the mean is over its data sets: 1/2 and 1
    several = {("a", 0): {"q": 1.0}, ("a", 1): {"q": 0.0}, ("b", 2): {"q": 1.0}}
    none = {document: {"q": 0.0} for document in several}
    assert _paired(several, none).startswith("+75.0%")

    def result(file: str) -> dict[str, Any]:
        row = {"file": file, "line": 0, "bytes": 100, "nats": 70.0}
        gain = {"bits_per_byte": 0.1}
        return {
            "bits_per_byte": 1.0,
            "by_document": [row],
            "memory_gain": gain,
            "tokens_per_second": 1,
        }

    for other, told in (("a.txt", "+0.0000"), ("b.txt", "")):
        rows = text_table("t", ["r", "s"], [result("a.txt"), result(other)])._cells()
        # one document has a difference, and no interval
        assert rows[1][2:4] == [told, ""]


def test_full_attention_in_windows_is_compared_with_a_run_that_streams() -> None:
    whole, windows, halves = "text:F", "text:F --window 1024", "text:F --window 1024 --score 512"
    assert shared_labels([{whole: 0}, {windows: 0}]) == {whole: [whole, windows]}
    assert shared_labels([{windows: 0}, {halves: 0}]) == {whole: [windows, halves]}
    assert shared_labels([{whole: 0}, {"text:G --window 64": 0}]) == {}
    # equal readings, and the longest of each
    assert shared_labels([{windows: 0, whole: 0}, {"text:F --window 512": 0, windows: 0}]) == {
        windows: [windows, windows],
        whole: [whole, windows],
    }
    assert shared_labels([{whole: 0, windows: 0}] * 2) == {
        whole: [whole, whole],
        windows: [windows, windows],
    }


@pytest.mark.long
def test_a_run_in_windows_beside_one_that_streams(
    runs: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = shutil.copytree(tiny.folder(), tmp_path / "full", ignore=shutil.ignore_patterns("eval"))
    home = Path(runs[0]).parent
    text = f"{home}/text.txt,{home}/other.txt"
    for score in ([], ["--score", "32"]):
        options = ["--tasks", f"text:{text}", "--window", "64", *score]
        assert main(["eval", str(other), *options]) == 0
    results = json.loads((other / "eval" / "report.json").read_text())["results"]
    assert list(results) == [f"text:{text} --window 64", f"text:{text} --window 64 --score 32"]
    capsys.readouterr()
    assert main(["compare", runs[0], str(other), "--plot", str(tmp_path / "plot.png")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "full --window 64" in out
    # paired over documents, though one was read in windows
    assert " to " in out.split("full --window 64")[1].split("loss by position")[0]


def test_questions_in_files_are_the_same_under_any_tokenizer(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"task": "qasper", "files": "q.jsonl"}
    for run, tokens in (("a", 100), ("b", 60)):
        example = Example(0, 0, 0, tokens, None, "Who?", ["A"], "A", 1.0, False)
        times = {"tokens": 1, "read": 1.0, "answer": 1.0}
        file = tmp_path / run / "eval" / examples_name(settings)
        Examples(file, settings).add(((0, [0]), [example], times))
    result = {
        "examples": examples_name(settings),
        "settings": digest(settings),
        "documents": 1,
        "rows": [{"from": 1, "to": 2}],
    }
    scores = [_scores(tmp_path / run, result, 0) for run in "ab"]
    assert scores[0]
    assert _paired(*scores) == "+0.0% (-98 to +98)"


def test_examples_of_the_harness_are_paired_if_they_are_the_same() -> None:
    row = {"by_example": [1.0, 0.0], "documents": "x"}
    assert _paired_examples(row, row).startswith("+0.0000 (")
    assert _paired_examples(row, {**row, "documents": "y"}) == "other examples"
    old = {"by_example": [1.0, 0.0]}
    assert _paired_examples(old, row).startswith("+0.0000 (")
    assert _paired_examples(old, {"by_example": [1.0]}) == "other examples"


def test_names_are_as_short_as_tells_runs_apart() -> None:
    assert short_names([Path("runs/a"), Path("runs/b")]) == ["a", "b"]
    assert short_names([Path("x/a"), Path("y/a")]) == ["x/a", "y/a"]
    assert len(set(short_names([Path("a"), Path("a")]))) == 2


def test_mistakes_are_told(
    runs: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["compare", runs[0]]) == 2
    assert "name two runs or more" in capsys.readouterr().err
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "report.json").write_text(
        '{"step": 1, "results": {"vt": {"group": "long", "result": {}}}}'
    )
    assert main(["compare", runs[0], str(tmp_path)]) == 2
    assert "no task was evaluated on all runs" in capsys.readouterr().err
    for plot, told in (
        ("x.foo", "no format of figures"),
        (".", "is a folder"),
        ("q/x.png", "make"),
    ):
        assert main(["compare", *runs, "--plot", str(tmp_path / plot)]) == 2
        assert told in capsys.readouterr().err


def test_scores_are_drawn_by_memory_segments(
    runs: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plot = tmp_path / "segments.png"
    assert main(["compare", *runs, "--segments", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    shutil.copytree(runs[1], tmp_path / "folder")
    # full attention has no segments: a level line
    saved: list[Any] = []
    monkeypatch.setattr(
        "famjax.cli.compare_segments.save_figure", lambda figure, path: saved.append(figure) or path
    )
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    config["model"] |= {"mixer": "full", "capacity": 64}
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config))
    assert main(["compare", runs[0], str(tmp_path / "folder"), "--segments", str(plot)]) == 0
    labels = saved[0].axes[0].get_legend_handles_labels()[1]
    assert [label.split(",")[1] for label in labels] == [" mean of 1 task", " no segments"]
    (tmp_path / "folder" / "config.json").unlink()
    assert main(["compare", runs[0], str(tmp_path / "folder"), "--segments", str(plot)]) == 2
    assert "folder is not a run's folder" in capsys.readouterr().err


def test_passkeys_are_paired_by_document() -> None:
    row = {"examples": 4, "documents": "a", "by_document": [True, True, False, True]}
    other = {**row, "by_document": [True, False, False, False]}
    assert _paired_keys(row, other).startswith("+50.0% (")
    assert _paired_keys(row, {**other, "documents": "b"}) == "other documents"
    assert _paired_keys({"examples": 4}, {"examples": 4}) == "other documents"
    assert _paired_keys(None, row) == ""


def test_a_score_is_normalized_to_the_best_runs() -> None:
    def results(accuracy: float, score: float) -> dict[str, Any]:
        # a length that only one of the runs has does not count
        longer = {"length": 2048, "score": 0.0}
        rows = [{"length": 1024, "score": score}, *([longer] if score == 1 else [])]
        return {
            "text:a": {"group": "text", "result": {"accuracy": accuracy}},
            "vt": {"group": "long", "result": {"rows": rows}},
            "none": {"group": "questions", "result": {"score": 0.0}},
        }

    found = [results(0.5, 1.0), results(0.4, 0.25)]
    normalized = normalized_scores(found, ["text:a", "vt", "none"])
    assert normalized.keys() == {"text:a", "vt"}
    np.testing.assert_allclose(normalized["text:a"], [1, 0.8])
    np.testing.assert_allclose(normalized["vt"], [1, 0.25])
