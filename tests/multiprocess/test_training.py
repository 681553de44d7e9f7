"""Two and four real processes train as one does; killed or stopped, they go on as if never."""

from __future__ import annotations

import functools
import json
import re
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from small import config, rows
from spawn import ended, start_all, trained

from famjax.experiment.load import from_json, override, to_json
from famjax.parallel import sharding
from famjax.train.checkpoint import Checkpoints
from famjax.train.loop import train
from famjax.train.manifest import TREE

SMALL = ["data.batch=4", "data.length=32", "train.log_every=2", "train.checkpoint_every=4"]
DIES = """
import os, signal
from famjax.train.session import Session
run_step, left = Session.run_step, [{steps}]
def dies(self, inspect):
    left[0] -= 1
    if left[0] < 0:
        self.checkpoints.wait()  # until which there is nothing to go on from
        os.kill(os.getpid(), signal.{signal})
        left[0] = 10**6
    return run_step(self, inspect)
Session.run_step = dies
"""


def written(home: Path, layout: str, *overrides: str) -> Path:
    """Write the config of a few steps, of texts in lanes or packed."""
    path = home / f"{layout}.json"
    small = override(config(home / "texts", layout), [*SMALL, "train.steps=12", *overrides])
    path.write_text(to_json(small))
    return path


def here(path: Path, run: Path, devices: int, *overrides: str) -> None:
    """Train in this process, on so many devices."""
    with pytest.MonkeyPatch.context() as patch:
        make_mesh = functools.partial(sharding.make_mesh, devices=jax.devices()[:devices])
        patch.setattr(sharding, "make_mesh", make_mesh)
        train(override(from_json(path.read_text()), overrides), run, quiet=True)


def last(run: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return all arrays of the last checkpoint, and what stands beside."""
    checkpoints = Checkpoints(run / "checkpoints")
    index = json.loads((checkpoints.path(checkpoints.latest() or 0) / TREE).read_text())
    template = {
        key: {name: jax.ShapeDtypeStruct(*about) for name, about in leaves.items()}
        for key, leaves in index.items()
    }
    _, tree, extra = checkpoints.restore(template, report=pytest.fail)
    flat = {f"{key}/{name}": np.asarray(a) for key in tree for name, a in tree[key].items()}
    return flat, extra


def assert_close(run: Path, other: Path, tolerance: float) -> None:
    """Equal but for the order of sums; cursors of lanes exactly."""
    (tree, extra), (tree_, extra_) = last(run), last(other)
    assert tree.keys() == tree_.keys()
    for name, a in tree.items():
        atol = tolerance * np.abs(tree_[name].astype(np.float64)).max(initial=1e-6)
        np.testing.assert_allclose(a, tree_[name], rtol=0, atol=atol, err_msg=name)
    assert extra["data"] == extra_["data"]
    for one, two in zip(rows(run), rows(other), strict=True):
        assert one == pytest.approx(two, rel=tolerance)


def assert_same(run: Path, other: Path) -> None:
    """Equal bit for bit."""
    (tree, extra), (tree_, extra_) = last(run), last(other)
    assert {k: v.tobytes() for k, v in tree.items()} == {k: v.tobytes() for k, v in tree_.items()}
    assert extra == extra_
    assert rows(run) == rows(other)


def assert_gone(done: list[tuple[int, str]], victim: int, step: int) -> None:
    """One was killed, and each of the others tells so in its last line."""
    assert done[victim][0] == -signal.SIGKILL
    for status, said in done[:victim] + done[victim + 1 :]:
        assert status == 75, said
        assert said.splitlines()[-1] == (
            f"famjax: process {victim} of {len(done)} is lost; run the same command again on all "
            f"and it continues from step {step}"
        )
        assert "stack trace" not in said
        assert "Traceback" not in said


def test_two_processes_train_as_one_and_go_on_when_one_was_killed(tmp_path: Path) -> None:
    """FAM in lanes, with carried memory, on 2 x 2 devices."""
    path, once, again = written(tmp_path, "lanes"), tmp_path / "once", tmp_path / "again"
    (_, first), (_, second) = trained(path, once, 2, 2)
    assert first.startswith("waiting for 2 processes at 127.0.0.1:")
    assert second == ""  # process 0 tells of the run
    here(path, tmp_path / "one", 4)
    assert_close(once, tmp_path / "one", 1e-4)

    begun = start_all(
        path, again, 2, 2, heartbeat=4, more={1: DIES.format(steps=6, signal="SIGKILL")}
    )
    assert_gone(ended(begun), victim=1, step=4)
    trained(path, again, 2, 2)
    assert_same(once, again)


@pytest.mark.slow
def test_the_first_was_killed(tmp_path: Path) -> None:
    """Packed rows; with process 0 goes the service that would tell of the others."""
    path, run = written(tmp_path, "packed", "data.length=64"), tmp_path / "run"
    begun = start_all(path, run, 2, 2, more={0: DIES.format(steps=6, signal="SIGKILL")})
    assert_gone(ended(begun), victim=0, step=4)
    trained(path, run, 2, 2)
    here(path, tmp_path / "one", 4)
    assert_close(run, tmp_path / "one", 1e-3)


def test_elastic(tmp_path: Path) -> None:
    """One device, eight in three axes, four processes that a signal to one stops, one device: as
    one device all along."""
    path = written(tmp_path, "lanes", "data.batch=8")
    run, once = tmp_path / "run", tmp_path / "once"
    here(path, run, 1, "train.steps=3")
    here(path, run, 8, "train.steps=6", "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
    more = ["train.steps=20000", "mesh.fsdp=2", "mesh.tensor=2"]
    done = ended(start_all(path, run, 4, 1, *more, more={2: DIES.format(steps=2, signal="SIGINT")}))
    said = re.search(r"famjax: stopped by SIGTERM at step (\d+), saved$", done[0][1].strip())
    assert said, done
    assert [error for _, error in done[1:]] == ["", "", ""]
    assert [status for status, _ in done] == [143, 143, 130, 143]
    step = int(said[1])
    assert Checkpoints(run / "checkpoints").latest() == step
    end = f"train.steps={step + 2}"
    here(path, run, 1, end)
    here(path, once, 1, end)
    (tree, extra), (tree_, extra_) = last(run), last(once)
    # steps and rounding add up: how many steps there are depends on how soon the signal is heard
    for name, a in tree.items():
        if "totals" not in name:  # since the last log, and there were more of them
            atol = 2e-3 * np.abs(tree_[name].astype(np.float64)).max(initial=1e-6)
            np.testing.assert_allclose(a, tree_[name], rtol=0, atol=atol, err_msg=name)
    assert extra["data"] == extra_["data"]
