"""Where blocks and their feedback memory attend to."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from famjax.cli.analyze_attention import measure_attention_maps
from famjax.cli.main import main
from famjax.core.errors import UserError
from famjax.core.types import Context
from famjax.eval.attention_maps import gradient_by_block, measure_attention
from famjax.layers.mlp import FeedForward
from famjax.mixers.fam import Fam
from famjax.stacks import memory_measures

W, F = 8, 2


@pytest.fixture(scope="module")
def text() -> np.ndarray:
    return np.random.default_rng(0).integers(97, 122, size=4 * W + 3).astype(np.int32)


@pytest.mark.parametrize("segments", [0, pytest.param(2, marks=pytest.mark.long)])
def test_weights_of_fam_by_kind_of_key(segments: int, text: np.ndarray) -> None:
    run = tiny.run_with("fam", seed=1, memory_segments=segments, fam_update="gated")
    layers = measure_attention(run, text, quiet=True)
    assert [layer.mixer for layer in layers] == ["fam", "fam"]
    stack = run.model.stack
    # of the last block, from the state before it
    _, state = tiny.read(run.model, text[None, : 3 * W], run.model.init_state(1))
    x = run.model.embed(text[None, 3 * W : 4 * W])
    mass = jax.jit(lambda x, state: memory_measures.attention_mass(stack, x, state, Context()))(
        x, state
    )
    for i, layer in enumerate(layers):
        weights = layer.weights
        heads = run.config.model.heads
        assert weights.segments.shape == (heads, W, segments * W)
        assert weights.memory.shape == (heads, W, F)
        assert weights.block.shape == (heads, W, W)
        parts = (weights.segments, weights.memory, weights.block)
        np.testing.assert_allclose(sum(part.sum(-1) for part in parts), 1, atol=1e-6)
        assert not np.triu(weights.block[0], 1).any()
        np.testing.assert_allclose(weights.memory.sum(-1).mean(), mass[i], atol=1e-6)
        np.testing.assert_allclose(layer.mass.sum(-1), 1, atol=1e-6)
        assert layer.memory_mass is not None
        np.testing.assert_allclose(layer.memory_mass.sum(-1), 1, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("update", ["sum", "static"])
def test_weights_of_the_memory_are_those_of_its_update(text: np.ndarray, update: str) -> None:
    run = tiny.run_with("fam", seed=1, memory_segments=0, fam_update=update)
    layer = nnx.merge(*_first(run.model.stack.layers[0]))
    mixer, mlp = layer.mixer, layer.mlp
    assert isinstance(mixer, Fam)
    assert isinstance(mlp, FeedForward)
    state = jax.tree.map(lambda a: a[0], run.model.init_state(1)[0])
    # not the prompt, which is what a static query is of
    state = mixer.replace_memory(state, state.fam[..., ::-1])
    x = run.model.embed(text[None, :W])
    assert run.model.stack.prompt is not None
    weights = mixer.block_weights(x, state, Context(prompt=run.model.stack.prompt[...]), mlp)
    assert weights.from_memory is not None
    inputs = mixer.window.project_blocks(x, state.window, Context())
    keys, values = inputs.seen_k[:, 0], inputs.v[:, 0]
    projected = mixer.project(state.fam, state.updates)
    # in the first block
    residual = jnp.zeros_like(state.fam) if state.summary is None else state.summary
    expected = mixer.update_memory(
        state.fam, projected, state.updates, keys, values, mlp, summary=state.summary
    )
    seen = jnp.concatenate([projected[2], values], 1)
    attended = jnp.einsum("bhfs,bshe->bfhe", weights.from_memory, seen)
    found = mlp(mixer.qkv.output_projection(attended, residual), residual)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def _first(layer: Any) -> tuple[Any, Any]:
    graph, params = nnx.split(layer)
    return graph, jax.tree.map(lambda a: a[0], params)


@pytest.mark.long
def test_a_window_and_a_mixture(text: np.ndarray) -> None:
    (layer, *_) = measure_attention(tiny.run_with("bswa", memory_segments=1), text, quiet=True)
    assert layer.memory_mass is None
    assert layer.mass[:, 1].sum() == 0
    assert layer.mass[:, 0].min() > 0
    mixed = measure_attention(tiny.run_with("full,fam"), text, quiet=True)
    assert [(each.number, each.mixer) for each in mixed] == [(1, "fam")]
    (outputs, *_) = measure_attention(tiny.run_with("fm", memory_segments=1), text, quiet=True)
    assert outputs.memory_mass is None
    assert outputs.mass[:, 0].min() > 0
    delta = measure_attention(tiny.run_with("delta", memory_segments=1), text, quiet=True)
    assert [each.mixer for each in delta] == ["delta", "delta"]


@pytest.mark.long
def test_the_gradient_reaches_as_far_as_the_receptive_field(text: np.ndarray) -> None:
    window = tiny.run_with("bswa", seed=1, memory_segments=1)
    own = gradient_by_block(window, text)
    # two layers of one segment each
    assert (own[:3] > 0).all()
    assert (own[3:] == 0).all()
    # only the block's own queries and values have one
    stopped = gradient_by_block(window, text, stop_gradient=True)
    assert stopped[0] > 0
    assert (stopped[1:] == 0).all()
    np.testing.assert_array_equal(
        gradient_by_block(tiny.run_with("bswa_sg", seed=1, memory_segments=1), text)[1:], 0
    )
    for run in (
        tiny.run_with("fam", seed=1, memory_segments=0),
        tiny.run_with("fm", seed=1, memory_segments=1),
    ):
        assert (gradient_by_block(run, text) > 0).all()
    stopped = gradient_by_block(run, text, stop_gradient=True)
    assert (stopped > 0).tolist() == [True] + [False] * (len(stopped) - 1)


@pytest.mark.long
def test_the_gradient_is_the_change_of_the_loss(text: np.ndarray) -> None:
    run = tiny.run_with("fam", seed=2, memory_segments=1)
    found = gradient_by_block(run, text)
    x = run.model.embed(text[None, : 4 * W])

    @jax.jit
    @jax.grad
    def gradient(x: Any) -> Any:
        y, _ = run.model.stack(x, run.model.init_state(1), Context())
        return run.model.losses(y, text[None, 1 : 4 * W + 1])[0][0, 3 * W :].mean()

    grad = np.asarray(gradient(x))[0].reshape(4, -1)
    np.testing.assert_allclose(found, np.linalg.norm(grad, axis=1)[::-1], rtol=1e-4)


def test_mistakes(text: np.ndarray) -> None:
    with pytest.raises(UserError, match="less than a block of 8"):
        measure_attention(tiny.run_with("fam"), text[:7])
    with pytest.raises(UserError, match="full has no blocks"):
        measure_attention(tiny.run_with("full"), text)
    with pytest.raises(UserError, match="--layers 0: is no layer with blocks; the run has 1"):
        measure_attention(tiny.run_with("full,fam"), text, needed=[0, 1], quiet=True)


@pytest.mark.long
def test_only_maps_that_are_drawn_leave_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(tiny.TEXT * 10)
    sizes: list[int] = []
    fetch = jax.device_get

    def counted(tree: Any) -> Any:
        sizes.append(sum(leaf.size for leaf in jax.tree.leaves(tree)))
        return fetch(tree)

    monkeypatch.setattr(jax, "device_get", counted)
    measure = partial(measure_attention_maps, str(tiny.folder()), str(tmp_path / "a.txt"), 64)
    found = measure(max_layers=0)
    # of each block 2 layers, 2 heads, 3 and 2 kinds of keys
    assert sizes == [2 * 2 * 5] * 8
    assert not any("map" in layer for layer in found["layers"])
    sizes.clear()
    assert "map" in measure(layers=[1])["layers"][1]
    assert sum(size > 2 * 2 * 5 for size in sizes) == 1


@pytest.mark.long
def test_a_command_shows_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(tiny.folder(), tmp_path / "run")
    (tmp_path / "a.txt").write_text(tiny.TEXT * 10)
    plot = tmp_path / "maps.png"
    line = ["analyze", str(folder), "--attention", "--tasks", f"text:{tmp_path / 'a.txt'}"]
    assert main([*line, "--length", "64", "--plot", str(plot)]) == 0
    assert "most on memory" in " ".join(capsys.readouterr().out.split())
    assert plot.stat().st_size > 10_000
    assert main([*line, "--layers", "1", "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert [(layer["layer"], "map" in layer) for layer in layers] == [(0, False), (1, True)]
    assert np.shape(layers[1]["map"])[:2] == (2, W)
    assert main([*line, "--layers", "1"]) == 2
    assert "--layers 1: chooses maps; give --plot FILE or --json" in capsys.readouterr().err
    assert main([*line, "--layers", "x", "--json"]) == 2
    assert "--layers x: write the numbers of layers" in capsys.readouterr().err
    assert main([*line[:2], "--layers", "1"]) == 2
    assert "--layers 1: is for --attention" in capsys.readouterr().err
    assert main([*line, "--memory"]) == 2
    assert "--memory and --attention: give one of them" in capsys.readouterr().err
    assert main([*line, "--teacher", str(folder)]) == 2
    assert "--attention measures one run" in capsys.readouterr().err
