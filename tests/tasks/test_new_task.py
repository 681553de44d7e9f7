"""A user-defined task takes one module and one registry line; then it can be trained on and
evaluated, its mistakes are rejected, and evaluation is suggested after training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from last_letter import LastLetter

from famjax.cli.main import main
from famjax.cli.next_commands import next_commands
from famjax.core.errors import UserError
from famjax.experiment.load import load_config
from famjax.pipeline import make_source, make_tokenizer
from famjax.tasks import TASKS
from famjax.train.loop import train

SMALL = [
    *("model.layers=1", "model.width=16", "model.heads=2", "model.mlp_width=32", "data.batch=2"),
    *("model.block_len=8", "model.fam_len=2", "data.length=32", "train.steps=2"),
    "data.task=last_letter",
]


@pytest.fixture(autouse=True)
def register_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the registry line."""
    monkeypatch.setitem(TASKS, "last_letter", LastLetter())


@pytest.mark.long
def test_a_new_task_trains_and_is_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config("text_fam", SMALL)
    train(config, tmp_path, quiet=True)
    assert main(["eval", str(tmp_path), "--examples", "4", "--json"]) == 0
    ((result,),) = (json.loads(capsys.readouterr().out)["last_letter"],)
    assert result["rows"][0]["examples"] == 4
    assert 0 <= result["rows"][0]["accuracy"] <= 1
    assert main(["eval", str(tmp_path), "--tasks", "last_letter", "--examples", "4"]) == 0
    shown = capsys.readouterr().out
    assert "last_letter" in shown
    assert "guessing" in shown
    assert "0.25" in shown

    source = make_source(config, make_tokenizer(config.data))
    said = next_commands(config, source, tmp_path)
    assert said.startswith(f"famjax eval {tmp_path},")


def test_mistakes_are_one_line_errors() -> None:
    with pytest.raises(UserError, match="letters are no text; set 0"):
        load_config("text_fam", [*SMALL, "data.layout=packed", "data.repeat_len=4"])
    with pytest.raises(UserError, match=r"holdout: has no effect with data\.task=last_letter"):
        load_config("text_fam", [*SMALL, "data.holdout=9"])
    with pytest.raises(UserError, match="did you mean 'last_letter'"):
        load_config("text_fam", ["data.task=last_leter"])
    with pytest.raises(UserError, match="has no vocabulary of its own"):
        load_config("text_fam", [*SMALL, "data.tokenizer=task"])
