"""A run and a memory file of famjax 0.1.0, written before names changed: both still load.

The files in tests/fixtures/run_0.1 were made by the commit before the renaming:

    famjax train text_fam model.layers=2 model.width=8 model.heads=2 model.mlp_width=16 \\
        model.block_len=8 model.fam_len=2 data.batch=2 data.length=32 data.files=texts \\
        data.layout=lanes train.steps=4 train.log_every=2 train.checkpoint_every=2 train.keep=1 \\
        optimizer.warmup_steps=2 --run run
    famjax generate run --read texts/0.txt --state-out old.memory

The loss of step 6 is what that commit printed after resuming the run.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from famjax.cli.main import main
from famjax.eval.state_file import load_state
from famjax.train.metrics import read_metrics
from famjax.train.run import open_run

HOME = Path(__file__).resolve().parents[1] / "fixtures" / "run_0.1"


@pytest.fixture(autouse=True)
def fixture_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the fixture and make it the working directory."""
    copy = Path(shutil.copytree(HOME, tmp_path / "home"))
    monkeypatch.chdir(copy)
    return copy


@pytest.mark.long
def test_a_run_of_version_0_1_resumes() -> None:
    assert main(["train", "run/config.json", "train.steps=6", "--run", "run"]) == 0
    rows = read_metrics(Path("run/metrics.jsonl"))
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert rows[-1]["loss"] == pytest.approx(5.773683071136475, rel=1e-4)
    assert rows[-1]["tokens"] == 384


def test_a_memory_of_version_0_1_loads(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "run", "--state-in", "old.memory", "--prompt", "document"]
    assert main([*argv, "--max-tokens", "4", "--temperature", "0"]) == 0
    capsys.readouterr()
    run = open_run("run")
    # the key is newer: the update is the paper's
    assert run.config.model.fam_update == "sum"
    assert load_state("old.memory", run) is not None
