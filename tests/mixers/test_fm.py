"""`model.mixer=fm` and `model.fam_update=static`, which the paper rejected, in the program."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from famjax import load_pretrained
from famjax.cli.main import main
from famjax.config.resolved import resolve_model
from famjax.config.schema import Config, DropoutConfig, ModelConfig
from famjax.convert.open import open_model
from famjax.core.errors import UserError
from famjax.core.types import Context
from famjax.experiment.load import load_config
from famjax.export.export import export
from famjax.stacks.residual import ResidualStack
from famjax.train.loop import train

pytestmark = pytest.mark.usefixtures("one_device")
SMALL = [
    *("model.layers=2", "model.width=16", "model.heads=2", "model.mlp_width=32"),
    *("model.block_len=8", "model.memory_segments=1"),
    # one body is compiled for both layers
    "model.scan_layers=true",
    *("data.batch=2", "data.length=32", "train.steps=2", "optimizer.warmup_steps=0"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of each variant, and their training text."""
    folder = tmp_path_factory.mktemp("rejected")
    (folder / "train.txt").write_text(tiny.TEXT * 40)
    train(config(folder, "model.mixer=fm"), folder / "fm", quiet=True)
    static = ("model.fam_update=static", "model.fam_len=3")
    train(config(folder, *static), folder / "static", quiet=True)
    return folder


def config(folder: Path, *more: str) -> Config:
    return load_config("text_fam", [*SMALL, f"data.files={folder / 'train.txt'}", *more])


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.long
def test_segments_are_exported_in_the_formats_that_have_the_layer(
    folder: Path, tmp_path: Path
) -> None:
    for name in ("orbax", "stablehlo"):
        # each format is compared with the run when it is written
        assert export(folder / "fm", tmp_path / name, name)
    with pytest.raises(UserError, match="does not support feedback memory segments; take --format"):
        export(folder / "fm", tmp_path / "hf", "hf")


@pytest.mark.long
def test_static_summary_tokens_are_exported_to_pytorch(folder: Path, tmp_path: Path) -> None:
    assert export(folder / "static", tmp_path / "hf", "hf")
    _, model = load_pretrained(tmp_path / "hf")
    assert model.stack.reads_prompt


@pytest.mark.slow
def test_static_summary_tokens_are_exported_as_programs(folder: Path, tmp_path: Path) -> None:
    assert export(folder / "static", tmp_path / "stablehlo", "stablehlo")


@pytest.mark.long
def test_a_trained_window_becomes_one_of_outputs_and_back(folder: Path, tmp_path: Path) -> None:
    for run, to in (("fm", "bswa"), ("bswa", "fm")):
        source = folder / "fm" if run == "fm" else tmp_path / run
        assert main(["convert", str(source), str(tmp_path / to), "--to", to]) == 0
    expected = parameters(folder / "fm")
    for path, a in parameters(tmp_path / "fm").items():
        np.testing.assert_array_equal(a, expected[path])


def parameters(run: Path) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(open_model(str(run)).model, nnx.Param))
    return {jax.tree_util.keystr(path): np.asarray(a) for path, a in leaves}


@pytest.mark.long
def test_the_memory_of_segments_is_not_one_beside_the_window(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"text:{folder / 'train.txt'}"
    assert main(["analyze", str(folder / "fm"), "--memory", "--tasks", text]) == 2
    assert "fm has no memory in its layers" in last_line(capsys)
    assert main(["eval", str(folder / "fm"), "--tasks", text, "--ablate", "memory"]) == 2
    assert "the model has no memory beside its window" in last_line(capsys)


@pytest.mark.long
def test_the_prompt_is_trained_in_documents_that_began_earlier() -> None:
    """Static summary tokens are those of the current parameters, not of those of its start."""
    shape = ModelConfig(width=16, heads=2, block_len=4, fam_len=2, layers=2, fam_update="static")
    stack = ResidualStack(resolve_model(shape), rngs=nnx.Rngs(0))
    graph, params = nnx.split(stack)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 12, 16)), jnp.float32)
    _, state = stack(x, stack.init_state(1), Context())

    @jax.jit
    @jax.grad
    def gradient(params: nnx.State) -> jax.Array:
        y, _ = nnx.merge(graph, params)(x, state, Context())
        return jnp.square(y).sum()

    assert np.abs(gradient(params)["prompt"][...]).max() > 1e-3


def test_dropout_of_each_block_is_its_own() -> None:
    """Equal blocks without memory or positions have equal outputs but for dropout."""
    shape = ModelConfig(
        width=16,
        heads=2,
        block_len=4,
        layers=1,
        mixer="fm",
        memory_segments=1,
        dropout=DropoutConfig(hidden=0.5),
    )
    stack = ResidualStack(resolve_model(shape), rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, 16)), jnp.float32)
    reset = jnp.tile(jnp.arange(4) == 0, (1, 3))
    y, _ = stack(jnp.tile(x, (1, 3, 1)), stack.init_state(1), Context(reset))
    first, *others = np.split(np.asarray(y), 3, 1)
    assert all(np.abs(other - first).max() > 1e-3 for other in others)
