"""Runs of a few steps of a tiny model, and comparisons of runs.

Programs are compiled once for all runs whose programs are the same, and for only one of the eight
devices.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from famjax.config.schema import Config, DataConfig, MeshConfig, PasskeyConfig, ProfileConfig
from famjax.experiment.load import override
from famjax.parallel import sharding
from famjax.train import resume, session
from famjax.train.checkpoint import Checkpoints
from famjax.train.metrics import read_metrics
from famjax.train.program import TrainProgram
from famjax.train.resolve import resolve
from famjax.train.session import Session
from famjax.train.state import to_tree
from famjax.train.warmup import row_length_at, with_row_length

SHAPE = [
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.kv_heads=1",
    "model.mlp_width=32",
    "model.block_len=8",
    "model.fam_len=2",
    "model.scan_layers=false",
    "data.batch=2",
    "data.length=64",
    "data.passkey.digits=3",
    "data.passkey.min_length=300",
    "data.passkey.start_length=300",
    "data.passkey.max_length=2000",
    "data.passkey.threshold=0",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=2",
    "train.log_every=4",
    "train.checkpoint_every=3",
]
# for a command on text or a toy task, which rejects keys of other tasks
COMMAND = [given for given in SHAPE if not given.startswith("data.passkey.")]
LAYOUTS = {
    "lanes": ["data.layout=lanes"],
    "packed": [
        *("data.layout=packed", "train.rsp=0.7", "train.rsp_ramp=3", "data.repeat_len=4"),
        "train.rpo=true",
    ],
}
# fields of metrics.jsonl that measure time
PARTS = ("data_seconds", "host_seconds", "device_seconds")
TIMES = (
    *("tokens_per_second", "model_flops_utilization", "data_wait", "step_seconds", *PARTS),
    "train_seconds",
)


def texts(folder: Path, count: int = 6) -> Path:
    """Write documents of different lengths and return their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        (folder / f"{i}.txt").write_text(f"document {i} says {chr(97 + i)} " * (5 + 9 * i))
    return folder


def config(folder: Path, layout: str = "lanes", task: str = "text", *more: str) -> Config:
    """Return a small config for the texts of a folder, or for passkeys with a curriculum."""
    files = [f"data.files={texts(folder)}"] if task == "text" else []
    return override(Config(), [*SHAPE, *LAYOUTS[layout], f"data.task={task}", *files, *more])


@functools.cache
def _program(config: Config) -> TrainProgram:
    return _make_program(config, _token_bytes[-1])


_make_program, _token_bytes = session.make_program, [np.zeros(0)]


def make_program(
    config: Config, token_bytes: np.ndarray, attention_span: tuple[int, ...] = ()
) -> TrainProgram:
    """Like `famjax.train.program.make_program`, with the program of an earlier run if possible."""
    config = resolve(config, None, 1)
    data = replace(
        DataConfig(),
        layout=config.data.layout,
        batch=config.data.batch,
        length=config.data.length,
        passkey=PasskeyConfig(),
    )
    train = replace(config.train, log_every=1, checkpoint_every=1, keep=1)
    if config.optimizer.schedule == "constant":
        train = replace(train, steps=1)
    _token_bytes.append(token_bytes)
    config = replace(config, name="-", init="-" if config.init else "")
    return _program(replace(config, data=data, train=train, profile=ProfileConfig()))


@contextmanager
def shared_programs() -> Iterator[None]:
    """Let `train` use programs from `make_program` here, for one device."""
    original = sharding.make_mesh

    def make_mesh(config: MeshConfig, devices: Any = None) -> Mesh:
        return original(config, devices or jax.devices()[:1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "make_mesh", make_mesh)
        for module in (session, resume):
            patch.setattr(module, "make_program", make_program)
        yield


@pytest.fixture
def compiled_once() -> Iterator[None]:
    """Apply `shared_programs` to a test; module fixtures use it directly."""
    with shared_programs():
        yield


def final(run: Path, config: Config) -> tuple[Any, Any, list[dict[str, Any]]]:
    """Return the final results of a run: bits of every array, JSON metadata, rows."""
    config = replace(config, model=replace(config.model, vocab_size=258))

    def template(step: int) -> Any:
        now = with_row_length(config, row_length_at(config, step))
        return to_tree(jax.eval_shape(make_program(now, np.ones(258, np.float32)).start))

    step, tree, extra = Checkpoints(run / "checkpoints").restore(template, report=pytest.fail)
    bits = {
        jax.tree_util.keystr(path): (str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes())
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    untimed = {k: v for k, v in extra.items() if k not in TIMES}
    return step, (bits, json.dumps(untimed)), rows(run)


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics without timings."""
    found = read_metrics(run / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in TIMES} for row in found]


def assert_same(run: Path, other: Path, config: Config) -> None:
    """Check that two runs ended bitwise equal."""
    (step, (bits, extra), table), (step_, (bits_, extra_), table_) = (
        final(folder, config) for folder in (run, other)
    )
    assert step == step_
    assert [name for name in bits if bits[name] != bits_[name]] == []
    assert bits.keys() == bits_.keys()
    assert extra == extra_
    assert table == table_


class Crash(BaseException):
    """Simulates a kill: nothing in the loop may handle it."""


def crash_at(monkeypatch: pytest.MonkeyPatch, count: int) -> Callable[[], None]:
    """Make the loop crash when it starts step number `count`; return a function that undoes it."""
    left, run_step = [count], Session.run_step

    def crash(self: Session, inspect: bool) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise Crash
        return run_step(self, inspect)

    monkeypatch.setattr(Session, "run_step", crash)
    return lambda: monkeypatch.setattr(Session, "run_step", run_step)
