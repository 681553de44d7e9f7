"""Runs of two and four processes equal those of one, also after processes are killed or stopped."""

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
from small import TIMES, config, rows
from spawn import start_all, train_in_processes, wait_all

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


def write_config(home: Path, layout: str, *overrides: str) -> Path:
    """Write a config of a few steps, with text in lanes or packed."""
    path = home / f"{layout}.json"
    small = override(config(home / "texts", layout), [*SMALL, "train.steps=12", *overrides])
    path.write_text(to_json(small))
    return path


def train_in_process(path: Path, run: Path, devices: int, *overrides: str) -> None:
    """Train in this process with this many devices."""
    with pytest.MonkeyPatch.context() as patch:
        make_mesh = functools.partial(sharding.make_mesh, devices=jax.devices()[:devices])
        patch.setattr(sharding, "make_mesh", make_mesh)
        train(override(from_json(path.read_text()), overrides), run, quiet=True)


def read_checkpoint(run: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return all arrays and the JSON metadata of the last checkpoint, without timings."""
    checkpoints = Checkpoints(run / "checkpoints")
    index = json.loads((checkpoints.path(checkpoints.latest() or 0) / TREE).read_text())
    template = {
        key: {name: jax.ShapeDtypeStruct(*about) for name, about in leaves.items()}
        for key, leaves in index.items()
    }
    _, tree, extra = checkpoints.restore(template, report=pytest.fail)
    flat = {f"{key}/{name}": np.asarray(a) for key in tree for name, a in tree[key].items()}
    return flat, {k: v for k, v in extra.items() if k not in TIMES}


def assert_close(run: Path, other: Path, tolerance: float) -> None:
    """Check equality up to the order of sums; cursors of lanes exactly."""
    (tree, extra), (tree_, extra_) = read_checkpoint(run), read_checkpoint(other)
    assert tree.keys() == tree_.keys()
    for name, a in tree.items():
        atol = tolerance * np.abs(tree_[name].astype(np.float64)).max(initial=1e-6)
        np.testing.assert_allclose(a, tree_[name], rtol=0, atol=atol, err_msg=name)
    assert extra["data"] == extra_["data"]
    for one, two in zip(rows(run), rows(other), strict=True):
        assert one == pytest.approx(two, rel=tolerance)


def assert_same(run: Path, other: Path) -> None:
    """Check bitwise equality."""
    (tree, extra), (tree_, extra_) = read_checkpoint(run), read_checkpoint(other)
    assert {k: v.tobytes() for k, v in tree.items()} == {k: v.tobytes() for k, v in tree_.items()}
    assert extra == extra_
    assert rows(run) == rows(other)


def assert_gone(done: list[tuple[int, str]], victim: int, step: int) -> None:
    """Check that one process was killed, and that the last line of each other one says so."""
    assert done[victim][0] == -signal.SIGKILL
    for status, said in done[:victim] + done[victim + 1 :]:
        assert status == 75, said
        assert said.splitlines()[-1] == (
            f"famjax: process {victim} of {len(done)} is lost; run the same command again on all "
            f"and it continues from step {step}"
        )
        assert "stack trace" not in said
        assert "Traceback" not in said


@pytest.mark.long
def test_two_processes_equal_one_and_resume_after_a_kill(tmp_path: Path) -> None:
    """FAM in lanes, with carried memory, on 2 x 2 devices."""
    path, reference, resumed = (
        write_config(tmp_path, "lanes"),
        tmp_path / "once",
        tmp_path / "again",
    )
    (_, first), (_, second) = train_in_processes(path, reference, 2, 2)
    assert first.startswith("waiting for 2 processes at 127.0.0.1:")
    assert second == ""  # only process 0 reports progress
    train_in_process(path, tmp_path / "one", 4)
    assert_close(reference, tmp_path / "one", 1e-4)

    processes = start_all(
        path, resumed, 2, 2, heartbeat=4, more={1: DIES.format(steps=6, signal="SIGKILL")}
    )
    assert_gone(wait_all(processes), victim=1, step=4)
    train_in_processes(path, resumed, 2, 2)
    assert_same(reference, resumed)


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 2])
def test_tasks_are_evaluated_as_by_one_process(devices: int, tmp_path: Path) -> None:
    """On parameters that are sharded over both processes; the best checkpoint is kept."""
    text = tmp_path / "held_out.txt"
    text.write_text("some words to read, and some more of them. " * 20)
    tasks = [f"eval.tasks=text:{text},niah_single_1", "eval.lengths=600", "eval.examples=1"]
    keys = ["eval.every=2", *tasks, "eval.best=text", "mesh.fsdp=2"]
    path = write_config(tmp_path, "lanes", *keys, "train.steps=4")
    (_, said), _ = train_in_processes(path, tmp_path / "two", 2, devices)
    assert "the best so far, is kept in" in said
    train_in_process(path, tmp_path / "one", 2 * devices)
    (*_, last), (*_, expected) = rows(tmp_path / "two"), rows(tmp_path / "one")
    assert {"text", "niah_single_1_600"} <= last.keys()
    assert last == pytest.approx(expected, rel=1e-4)
    assert Checkpoints(tmp_path / "two" / "best" / "checkpoints").latest() == 4


@pytest.mark.slow
def test_resume_after_process_zero_was_killed(tmp_path: Path) -> None:
    """Packed rows; killing process 0 also ends the coordination service."""
    path, run = write_config(tmp_path, "packed", "data.length=64"), tmp_path / "run"
    processes = start_all(path, run, 2, 2, more={0: DIES.format(steps=6, signal="SIGKILL")})
    assert_gone(wait_all(processes), victim=0, step=4)
    train_in_processes(path, run, 2, 2)
    train_in_process(path, tmp_path / "one", 4)
    assert_close(run, tmp_path / "one", 1e-3)


@pytest.mark.long
def test_resume_with_other_numbers_of_devices_and_processes(tmp_path: Path) -> None:
    """Train on one device, on eight in three axes, in four processes until one receives a signal,
    and on one device again; the result equals a run on one device."""
    path = write_config(tmp_path, "lanes", "data.batch=8")
    run, reference = tmp_path / "run", tmp_path / "once"
    train_in_process(path, run, 1, "train.steps=3")
    train_in_process(path, run, 8, "train.steps=6", "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
    more = ["train.steps=20000", "mesh.fsdp=2", "mesh.tensor=2"]
    done = wait_all(
        start_all(path, run, 4, 1, *more, more={2: DIES.format(steps=2, signal="SIGINT")})
    )
    said = re.search(r"famjax: stopped by SIGTERM at step (\d+), saved$", done[0][1].strip())
    assert said, done
    assert [error for _, error in done[1:]] == ["", "", ""]
    assert [status for status, _ in done] == [143, 143, 130, 143]
    step = int(said[1])
    assert Checkpoints(run / "checkpoints").latest() == step
    end = f"train.steps={step + 2}"
    train_in_process(path, run, 1, end)
    train_in_process(path, reference, 1, end)
    (tree, extra), (tree_, extra_) = read_checkpoint(run), read_checkpoint(reference)
    # the number of steps until the signal is handled varies, and rounding errors accumulate
    for name, a in tree.items():
        if "totals" not in name:  # summed since the last log, which differs
            atol = 2e-3 * np.abs(tree_[name].astype(np.float64)).max(initial=1e-6)
            np.testing.assert_allclose(a, tree_[name], rtol=0, atol=atol, err_msg=name)
    assert extra["data"] == extra_["data"]
