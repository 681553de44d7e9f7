"""`famjax analyze`: its tables and plots, and a one-line error for each mistake."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny

from famjax.cli.main import main
from famjax.config.schema import LinearConfig

STUDENT = {"linear": LinearConfig(features=6), "layers": 4}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(tiny.TEXT * 2, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `open_run` return untrained runs for these folder names."""
    there = {
        "student": lambda: tiny.run_with("fam,linear", **STUDENT),
        "teacher": lambda: tiny.run_with("full", layers=4),
        "delta": lambda: tiny.run_with("delta"),
        "wide": lambda: tiny.run_with("full", layers=4, heads=4),
        "lstm": lambda: tiny.run_with("full", stack="lstm", block_len=1),
    }
    monkeypatch.setattr("famjax.convert.open.open_model", lambda folder: there[folder]())
    monkeypatch.setattr("famjax.processes.runtime.setup", lambda: None)


@pytest.mark.long
def test_tables_name_omitted_layers(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["analyze", "student", "--teacher", "teacher", "--tasks", f"text:{text}"]
    assert main([*argv, "--length", "32", "--examples", "2"]) == 0
    out = capsys.readouterr().out
    assert "student, step 2; teacher teacher, step 2" in out
    words = " ".join(out.split())
    assert "2 x 32 tokens" in words
    assert "maximum entropy 3.466 nats" in words
    assert "skipped: layers 0, 2, which also read a memory; --memory measures it" in words
    lines = [line.replace("│", " ").split() for line in out.splitlines()]
    numbers = {line[0]: len(line) for line in lines if line and line[0] in ("0", "1", "2", "3")}
    assert numbers == {"0": 2, "1": 6, "2": 2, "3": 6}


@pytest.mark.long
def test_json_has_every_head_and_the_plot_is_drawn(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = tmp_path / "heads.png"
    argv = ["analyze", "student", "--teacher", "teacher", "--tasks", f"text:{text}"]
    assert main([*argv, "--length", "32", "--json", "--plot", str(drawn)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["files"] == str(text)
    assert report["examples"] == len(tiny.TEXT.encode()) * 2 // 32
    assert [row["mixer"] for row in report["layers"]] == ["fam", "linear"] * 2
    assert report["layers"][0]["entropy"] is None
    for measure in ("entropy", "distance"):
        assert len(report["layers"][1][measure]["heads"]) == 2
        assert report[measure]["last"] > 0
    assert drawn.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("teacher --tasks passkey", "--tasks passkey: analyze reads text; write text:FILES"),
        ("teacher --tasks text:/no/such --length 8", "no such file"),
        ("teacher --length 512", "--length 512: the run has full attention of 64 tokens"),
        ("teacher --length 0", "--length 0: must be at least 1"),
        ("teacher --plot a.txt", "--plot a.txt: must end in .png, .svg or .pdf"),
        ("teacher --plot /no/such/a.png", "there is no folder /no/such"),
        ("teacher --techer x", "unknown option --techer; did you mean '--teacher'?"),
        ("student --teacher wide --length 8", "--teacher: model.heads=4, but the run's is 2"),
        (
            "delta --length 8",
            "the run has model.mixer=delta, whose layers also read a memory; measure that with "
            "--memory, or",
        ),
        ("lstm", "the run has model.stack=lstm, which is not supported"),
    ],
)
def test_mistakes_are_one_line_errors(
    argv: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # what the first call prints includes the training of a tiny run
        capsys.readouterr()
        assert main(["analyze", *argv.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


def test_a_run_without_held_out_text_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tiny.run_with("full", layers=4)
    config = replace(run.config, data=replace(run.config.data, task="passkey"))
    monkeypatch.setattr(
        "famjax.convert.open.open_model", lambda folder: replace(run, config=config)
    )
    assert main(["analyze", "teacher", "--length", "8"]) == 2
    assert "give text:FILES" in capsys.readouterr().err
