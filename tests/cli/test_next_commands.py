"""Every command suggested after training works."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from small import LAYOUTS, SHAPE, compiled_once, texts  # noqa: F401

from famjax.cli.main import main
from famjax.config.schema import Config
from famjax.experiment.load import override, to_json

FULL = ["model.mixer=full", "model.capacity=128"]


def lines(folder: Path) -> str:
    path = folder / "lines.jsonl"
    rows = [{"inputs": f"what is {i}? ", "targets": f"it is {i}"} for i in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.files={path}"


@pytest.fixture
def suggestions(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    compiled_once: None,  # noqa: F811
):
    """Return a function that trains for two steps and returns the suggested commands."""
    monkeypatch.setattr("famjax.processes.runtime.setup", lambda: None)
    monkeypatch.chdir(tmp_path)

    def train(*overrides: str) -> list[str]:
        small = override(Config(), [*SHAPE, *LAYOUTS["lanes"], "train.steps=2", *overrides])
        (tmp_path / "small.json").write_text(to_json(small))
        assert main(["train", "small.json", "--run", "my runs/x"]) == 0
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("the run: my runs/x")
        return list(filter(None, line.partition("; next: ")[2].split(", ")))

    return train


def reads_text(run: Path) -> bool:
    return bool(json.loads((run / "config.json").read_text())["data"]["task"] == "text")


def run_command(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command on a few examples and return its output."""
    argv = shlex.split(command)
    assert argv[0] == "famjax"
    if argv[1] == "eval" and "text" not in command and not reads_text(Path(argv[2])):
        argv += ["--examples", "1"]
    if argv[1] == "generate":
        argv += ["--max-tokens", "2"]
    assert main(argv[1:]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.long
def test_suggestions_work_with_held_out_text(suggestions, tmp_path, capsys) -> None:
    evaluation, generation = suggestions(f"data.files={texts(tmp_path / 'texts', 60)}")
    assert evaluation == "famjax eval 'my runs/x'"
    assert generation == "famjax generate 'my runs/x' --prompt ..."
    assert "text:holdout" in run_command(evaluation, capsys)
    run_command(generation, capsys)


@pytest.mark.long
def test_suggestions_work_without_held_out_text(suggestions, tmp_path, capsys) -> None:
    files = f"data.files={texts(tmp_path / 'texts')}"
    generation, evaluation = suggestions(files, "data.holdout=0")
    run_command(generation, capsys)
    command, _, why = evaluation.partition(" (")
    assert why == "nothing was held out)"
    assert command == "famjax eval 'my runs/x' --tasks text:FILE"
    run_command(command.replace("FILE", "texts/0.txt"), capsys)


@pytest.mark.parametrize(
    "kind",
    [
        "one text",
        "too short",
        pytest.param("jsonl", marks=pytest.mark.slow),
        pytest.param("packed", marks=pytest.mark.slow),
        pytest.param("full", marks=pytest.mark.slow),
        pytest.param("passkey", marks=pytest.mark.slow),
        pytest.param("passkey full", marks=pytest.mark.slow),
        pytest.param("toy", marks=pytest.mark.slow),
        pytest.param("toy full", marks=pytest.mark.slow),
        pytest.param("toy full packed", marks=pytest.mark.slow),
    ],
)
def test_suggestions_work_for_every_kind_of_run(kind, suggestions, tmp_path, capsys) -> None:
    many = f"data.files={texts(tmp_path / 'texts', 60)}"
    (tmp_path / "short.txt").write_text("x")
    toy = ["data.task=reverse", "data.tokenizer=task", "data.toy.episodes=40", "data.toy.steps=10"]
    each = [*toy, "data.toy.concatenate=false"]
    evaluation, overrides = {
        "one text": ("", [f"data.files={texts(tmp_path / 'texts') / '5.txt'}"]),
        "too short": (None, [f"data.files={tmp_path / 'short.txt'}"]),
        "jsonl": ("", [lines(tmp_path)]),
        "packed": ("", [many, "data.layout=packed"]),
        "full": (" --window 128", [many, *FULL, "data.layout=packed"]),
        "passkey": ("", ["data.task=passkey"]),
        "passkey full": (
            " --lengths 256",
            ["data.task=passkey", *FULL, "model.capacity=512", "data.layout=packed"],
        ),
        "toy": ("", toy),
        "toy full": (" --lengths 10", [*each, *FULL]),
        "toy full packed": (None, [*toy, *FULL, "data.layout=packed"]),
    }[kind]
    commands = suggestions(*overrides)
    if evaluation is None:
        assert all(re.search("generate|text:FILE", command) for command in commands)
    else:
        assert commands[0] == f"famjax eval 'my runs/x'{evaluation}"
    for command in commands:
        if "FILE" not in command:
            run_command(command, capsys)
