"""A run can resume with more or fewer rows."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from small import compiled_once, config  # noqa: F401

from famjax.core.errors import UserError
from famjax.experiment.load import override
from famjax.train.loop import train
from famjax.train.session import Session

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "task"),
    [("lanes", "text"), pytest.param("packed", "passkey", marks=pytest.mark.slow)],
)
def test_rows_can_be_added_and_removed(
    tmp_path: Path,
    layout: str,
    task: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = config(tmp_path / "texts", layout, task, "train.steps=5", "data.batch=4")
    train(small, tmp_path / "run", quiet=True)
    memory: list[list[np.ndarray]] = []
    describe = Session.describe

    def record_memory(self: Session) -> None:
        memory.append([np.asarray(a) for a in jax.tree.leaves(self.state.memory)])
        describe(self)

    monkeypatch.setattr(Session, "describe", record_memory)
    for rows, steps, said in ((4, 6, ""), (2, 7, "4 -> 2; 2 rows continue, 2 end"),
                              (3, 8, "2 -> 3; 2 rows continue, 1 start new doc")):  # fmt: skip
        more = override(small, [f"data.batch={rows}", f"train.steps={steps}"])
        capsys.readouterr()
        assert train(more, tmp_path / "run", quiet=True).step == steps
        assert said in capsys.readouterr().err
    if layout == "lanes":
        assert {a.shape[1] for a in memory[0]} == {4}
        assert {a.shape[1] for a in memory[1]} == {2}
        assert {a.shape[1] for a in memory[2]} == {3}
        assert any(a[:, :2].any() for a in memory[2])
        assert not any(a[:, 2:].any() for a in memory[2])


@pytest.mark.long
def test_a_warm_up_keeps_its_rows(tmp_path: Path) -> None:
    warm = ["train.bptt_start=32", "train.bptt_double_every=4", "data.batch=4", "train.steps=2"]
    small = config(tmp_path / "texts", "lanes", "text", *warm)
    train(small, tmp_path / "run", quiet=True)
    with pytest.raises(UserError, match=r"another config \(data\.batch: 4 -> 2\)"):
        train(override(small, ["data.batch=2"]), tmp_path / "run", quiet=True)
