"""The formats of stacks, and of memories that Hugging Face folders cannot represent."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import pytest

from famjax.config.schema import Config
from famjax.convert.folder import convert
from famjax.core.errors import UserError
from famjax.experiment.load import override
from famjax.export.export import export
from famjax.parallel import sharding
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


@pytest.mark.parametrize(
    "stack",
    [
        pytest.param(
            "stack=feedback model.feedback.cache=memory model.dropout.hidden=0.1",
            marks=pytest.mark.slow,
        ),
        pytest.param("stack=transformer", marks=pytest.mark.long),
        "stack=lstm",
        pytest.param("stack=rmt model.block_len=4 model.fam_len=2", marks=pytest.mark.long),
        pytest.param(
            "stack=autocompressor model.block_len=4 model.fam_len=2 data.toy.concatenate=false",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_formats_of_each_stack(stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(f"model.{stack}", tmp_path, monkeypatch)
    export_programs(run, tmp_path)
    refused = {"hf": "stablehlo or orbax", "peft": "stablehlo or orbax"}
    if stack.split()[0] in ("stack=feedback", "stack=transformer"):
        said = export(run, tmp_path / "hf", "hf")
        assert any(line.startswith("compared with transformers ") for line in said)
        lines: list[str] = []
        convert(tmp_path / "hf", tmp_path / "new", report=lines.append)
        assert any(line.endswith(f"; model.{stack.split()[0]}") for line in lines)
        assert not any("adds a memory" in line for line in lines)
        assert open_run(tmp_path / "new").config.model.stack in stack
        refused = {"peft": "hf, stablehlo or orbax"}
    for name, others in refused.items():
        with pytest.raises(UserError, match=f"take --format {others}") as caught:
            export(run, tmp_path / name, name)
        assert "\n" not in str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize(
    "given",
    [
        "model.mixer=fam model.block_len=4 model.fam_len=2 model.fam_position=between",
        "model.mixer=swa model.block_len=4 model.window=4",  # Transformer-XL
    ],
)
def test_programs_of_memories(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export_programs(run_of(given, tmp_path, monkeypatch), tmp_path)
