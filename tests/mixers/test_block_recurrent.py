"""`model.mixer=block_recurrent` in the program: conversion, adapters, exports, analysis."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from flax import nnx

from famjax.cli.main import main
from famjax.config.resolved import resolve_model
from famjax.config.schema import Config, ModelConfig
from famjax.convert.open import open_model
from famjax.core.errors import UserError
from famjax.experiment.load import load_config
from famjax.export.export import export
from famjax.layers.recurrent_cell import RecurrentCell, count_params
from famjax.train import flops
from famjax.train.loop import train

pytestmark = pytest.mark.usefixtures("one_device")
SMALL = [
    *("model.layers=2", "model.width=16", "model.heads=2", "model.mlp_width=32"),
    *("model.block_len=8", "model.memory_segments=1", "model.fam_len=3"),
    *("data.batch=2", "data.length=32", "train.steps=2", "optimizer.warmup_steps=0"),
]
SHAPE = ModelConfig(
    vocab_size=10, layers=1, width=8, heads=2, kv_heads=1, mlp_width=16, block_len=4, fam_len=3
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of a window, and the training text."""
    folder = tmp_path_factory.mktemp("block_recurrent")
    (folder / "train.txt").write_text(tiny.TEXT * 40)
    window = ("model.mixer=bswa", "model.smeared_keys=false")
    given = [given for given in SMALL if "fam_len" not in given]
    train(load_config("text_fam", [*given, *window, *files(folder)]), folder / "window", quiet=True)
    adapted = config(folder, f"init={folder / 'window'}", "model.lora.rank=2")
    train(adapted, folder / "adapted", quiet=True)
    return folder


def files(folder: Path) -> list[str]:
    return [f"data.files={folder / 'train.txt'}"]


def config(folder: Path, *more: str) -> Config:
    mixer = ("model.mixer=bswa,block_recurrent", "model.smeared_keys=false")
    return load_config("text_fam", [*SMALL, *mixer, *files(folder), *more])


def logits(run: Path) -> np.ndarray:
    model = open_model(str(run)).model
    return tiny.logits(model, np.random.default_rng(0).integers(9, size=(1, 32)))


@pytest.mark.long
def test_a_given_window_begins_as_it_was(folder: Path, tmp_path: Path) -> None:
    command = ["convert", str(folder / "window"), str(tmp_path / "new")]
    assert main([*command, "--to", "block_recurrent", "model.fam_len=3"]) == 0
    np.testing.assert_allclose(logits(tmp_path / "new"), logits(folder / "window"), atol=1e-5)


@pytest.mark.long
def test_states_are_trained_beside_adapters(folder: Path) -> None:
    model = open_model(str(folder / "adapted")).model
    cell = model.stack.layers[1].mixer.recurrent_cell
    # it began at 0
    assert np.abs(cell.token_out.kernel[...]).max() > 1e-4


@pytest.mark.long
def test_it_is_exported_in_the_formats_that_have_the_layer(folder: Path, tmp_path: Path) -> None:
    assert export(folder / "adapted", tmp_path / "stablehlo", "stablehlo")
    with pytest.raises(UserError, match="does not support a block-recurrent state; take --format"):
        export(folder / "adapted", tmp_path / "hf", "hf")


@pytest.mark.long
def test_its_memory_is_measured_and_taken_away(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, text = str(folder / "adapted"), f"text:{folder / 'train.txt'}"
    assert main(["eval", run, "--tasks", text, "--ablate", "memory"]) == 0
    assert "memory" in capsys.readouterr().out
    assert main(["analyze", run, "--memory", "--tasks", text, "--length", "64"]) == 0


@pytest.mark.parametrize("gate", ["fixed", "lstm"])
def test_parameters_and_flops_are_those_of_the_cell(gate: str) -> None:
    shape = resolve_model(
        ModelConfig(**{**vars(SHAPE), "recurrent_gate": gate, "mixer": "block_recurrent"})
    )
    cell = nnx.state(RecurrentCell(shape, rngs=nnx.Rngs(0)), nnx.Param)
    assert sum(x.size for x in jax.tree.leaves(cell)) == count_params(shape)
    window = resolve_model(ModelConfig(**{**vars(SHAPE), "mixer": "bswa"}))
    # d = 8, h e = 8, g e = 4, f = 3, w = 4
    read = 2 * 2 * 8 * 8 + 4 * 8 * 3
    matrices = 1 if gate == "fixed" else 3
    update = 2 * 8 * (2 * 8 + 2 * 4 + matrices * 2 * 8) + 4 * 8 * (3 + 4)
    added = flops.forward_flops(shape) - flops.forward_flops(window)
    assert added == pytest.approx(read + 3 / 4 * update)
