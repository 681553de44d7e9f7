"""The formats of stacks, and of memories that Hugging Face folders cannot represent."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import pytest
from memories import MEMORIES

from famjax.config.schema import Config
from famjax.convert.folder import convert
from famjax.core.errors import UserError
from famjax.experiment.load import override
from famjax.export.export import export
from famjax.mixers import MIXERS
from famjax.parallel import sharding
from famjax.stacks import STACKS
from famjax.train.loop import train
from famjax.train.run import open_run

SHAPE = [
    *("model.block_len=1", "model.layers=1", "model.width=16", "model.heads=2"),
    *("model.feedback.span=16", "data.task=blocked_walk", "data.tokenizer=task"),
    *("data.toy.episodes=8", "data.toy.steps=20", "data.batch=2", "data.length=16"),
    *("train.steps=1", "optimizer.warmup_steps=0"),
]


def run_of(given: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Train for a step on one device, and return the run."""
    make_mesh = functools.partial(sharding.make_mesh, devices=jax.devices()[:1])
    monkeypatch.setattr(sharding, "make_mesh", make_mesh)
    train(override(Config(), [*SHAPE, *given.split()]), folder / "run", quiet=True)
    return folder / "run"


def export_programs(run: Path, folder: Path) -> None:
    # each format is loaded and compared before it is moved into place
    for name in ("orbax", "stablehlo"):
        assert export(run, folder / name, name)
        assert (folder / name).is_dir()


SEGMENTS = "model.block_len=4 model.fam_len=2"
KEYS = {
    "feedback": "model.feedback.cache=memory model.dropout.hidden=0.1",
    "transformer": "",
    "lstm": "",
    "rmt": SEGMENTS,
    "autocompressor": f"{SEGMENTS} data.toy.concatenate=false",
}
SLOW, QUICK = ("feedback", "autocompressor"), "lstm"


@pytest.mark.parametrize(
    "stack",
    [
        pytest.param(
            name,
            marks=pytest.mark.slow if name in SLOW else () if name == QUICK else pytest.mark.long,
        )
        for name in STACKS
        if name != "residual"
    ],
)
def test_formats_of_each_stack(stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(f"model.stack={stack} {KEYS[stack]}", tmp_path, monkeypatch)
    export_programs(run, tmp_path)
    refused = {"hf": "stablehlo or orbax", "peft": "stablehlo or orbax"}
    if stack in ("feedback", "transformer"):
        said = export(run, tmp_path / "hf", "hf")
        assert any(line.startswith("compared with transformers ") for line in said)
        lines: list[str] = []
        convert(tmp_path / "hf", tmp_path / "new", report=lines.append)
        assert any(line.endswith(f"; model.stack={stack}") for line in lines)
        assert not any("adds a memory" in line for line in lines)
        assert open_run(tmp_path / "new").config.model.stack == stack
        refused = {"peft": "hf, stablehlo or orbax"}
    for name, others in refused.items():
        with pytest.raises(UserError, match=f"take --format {others}") as caught:
            export(run, tmp_path / name, name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in MIXERS else pytest.mark.slow)
        for name in MEMORIES
        if name not in STACKS
    ],
)
def test_programs_of_memories(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # a cache of full attention does not continue from episode to episode
    given = f"{SEGMENTS} {MEMORIES[name]} data.toy.concatenate=false"
    export_programs(run_of(given, tmp_path, monkeypatch), tmp_path)
