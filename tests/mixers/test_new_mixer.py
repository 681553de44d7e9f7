"""A user-defined mixer takes one module and one registry line; then training, resuming,
evaluation, plans and exports work, and formats that cannot represent it are rejected."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from decayed_mean import DecayedMeanSpec
from flax import nnx

from famjax.cli.main import main
from famjax.config.resolved import resolve_model, sizes
from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.core.types import Context
from famjax.experiment.load import load_config, to_json
from famjax.experiment.size import count_params, state_bytes
from famjax.layers.mlp import FeedForward
from famjax.mixers import MIXERS, make_mixer
from famjax.parallel.sharding import path_name
from famjax.plan import worker
from famjax.train.flops import forward_flops
from famjax.train.loop import train
from famjax.train.run import abstract_model

pytestmark = pytest.mark.usefixtures("one_device")
NAME = "decayed_mean"
SHAPE = replace(tiny.SHAPE, mixer=NAME, kv_heads=1)
SMALL = [
    *("model.layers=2", "model.width=16", "model.heads=2", "model.mlp_width=32"),
    *("model.mixer=decayed_mean", "data.batch=2", "data.length=64", "train.steps=2"),
]

SHORT = ["data.files=x.txt", "data.length=64", "data.repeat_len=0", "train.steps=1"]


@pytest.fixture(autouse=True)
def register_mixer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the registry line."""
    monkeypatch.setitem(MIXERS, NAME, DecayedMeanSpec())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    text = tmp_path / "train.txt"
    text.write_text(tiny.TEXT * 40)
    train(small(text), tmp_path / "run", quiet=True)
    return tmp_path / "run"


def small(text: Path, *more: str) -> Config:
    return load_config("text_fam", [*SMALL, f"data.files={text}", *more])


def oracle(mixer: Any, x: np.ndarray, reset: np.ndarray) -> np.ndarray:
    """Return the layer's output before the feed-forward, token by token in float64."""
    _, _, v = (np.asarray(a, np.float64) for a in mixer.qkv.project(jnp.asarray(x)))
    a = 1 / (1 + np.exp(-np.asarray(mixer.decay[...], np.float64)))
    y = np.zeros_like(v)
    for row in range(len(x)):
        s, z = np.zeros(v.shape[2:]), np.zeros(v.shape[2])
        for t in range(x.shape[1]):
            if reset[row, t]:
                s, z = s * 0, z * 0
            s, z = a[:, None] * s + v[row, t], a * z + 1
            y[row, t] = s / z[:, None]
    heads = np.repeat(y, SHAPE.heads // v.shape[2], 2)
    return np.asarray(mixer.qkv.output_projection(jnp.asarray(heads), jnp.asarray(x)))


def test_a_new_mixer_equals_its_oracle_and_steps_equal_calls() -> None:
    shape = resolve_model(SHAPE)
    mixer = make_mixer(NAME, shape, rngs=nnx.Rngs(0))
    mlp = FeedForward(shape, rngs=nnx.Rngs(1))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 12, SHAPE.width)).astype(np.float32)
    reset = rng.random((2, 12)) < 0.2
    state = mixer.init_state(2)
    whole, end = mixer(x, state, Context(reset=jnp.asarray(reset)), mlp)
    np.testing.assert_allclose(whole, oracle(mixer, x, reset), atol=1e-5)
    for t in range(12):
        y, state = mixer.step(
            x[:, t : t + 1], state, Context(reset=jnp.asarray(reset[:, [t]])), mlp
        )
        np.testing.assert_allclose(y[:, 0], whole[:, t], atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state, end)


def test_sizes_and_flops_come_from_the_spec() -> None:
    model = tiny.model(NAME, kv_heads=1)
    params = sum(a.size for a in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert count_params(SHAPE).weights == params
    held = jax.tree.leaves(jax.eval_shape(lambda: model.init_state(1)))
    assert state_bytes(SHAPE) == sum(a.size * a.dtype.itemsize for a in held)
    d, h, g, e, hidden = sizes(SHAPE)
    layer = d * (2 * h * e + 2 * g * e + 3 * hidden)  # swiglu
    assert forward_flops(SHAPE) == 2 * (SHAPE.layers * layer + d * SHAPE.vocab_size)


@pytest.mark.long
def test_a_new_mixer_trains_resumes_and_is_evaluated(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = small(run.parent / "train.txt", "train.steps=3")
    assert train(longer, run, quiet=True).step == 3
    assert main(["eval", str(run), "--tasks", "text:holdout", "--json"]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["text"][0]["bits_per_byte"] < 10
    assert main(["generate", str(run), "--prompt", "the cat", "--max-tokens", "4"]) == 0


@pytest.mark.long
def test_a_plan_counts_its_arrays(run: Path) -> None:
    mesh = ["mesh.data=2", "mesh.tensor=2", "mesh.sequence=2", "data.layout=packed"]
    config = small(run.parent / "train.txt", *mesh, "model.kv_heads=2", "model.vocab_size=258")
    request = {"config": to_json(config), "topology": "cpu:8", "compile": False}
    found = worker.answer(request)
    (decay,) = (a for a in found["shardings"] if a["name"].endswith("mixer/decay"))
    assert decay["mesh"] == [None, "tensor"]


@pytest.mark.long
def test_formats_that_cannot_represent_it_are_rejected(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for form in ("hf", "peft"):
        assert main(["export", str(run), str(tmp_path / form), "--format", form]) == 2
        assert capsys.readouterr().err.splitlines()[-1] == (
            f"famjax: --format {form}: does not support a decayed mean; take --format orbax or "
            "stablehlo"
        )
    assert main(["export", str(run), str(tmp_path / "orbax"), "--format", "orbax"]) == 0


def test_its_check_is_applied_and_keys_of_other_mixers_are_rejected() -> None:
    with pytest.raises(UserError, match="a decayed mean has no scores"):
        load_config("text_fam", ["model.mixer=decayed_mean", "model.arch.qk_norm=true"])
    with pytest.raises(
        UserError, match=r"model\.fam_len: has no effect with model\.mixer=decayed_"
    ):
        load_config("text_fam", ["model.mixer=decayed_mean", "model.fam_len=4"])
    load_config("text_fam", ["model.mixer=decayed_mean", "model.window=8"])  # a key of bswa
    with pytest.raises(UserError, match="did you mean 'decayed_mean'"):
        load_config("text_fam", ["model.mixer=decaid_mean"])


def test_a_new_mixer_replaces_attention_in_a_trained_model(tmp_path: Path) -> None:
    from famjax.convert.folder import convert

    config = convert(tiny.folder(), tmp_path / "out", NAME, layers="1")
    assert config.model.mixer == "fam,decayed_mean"
    adapted = load_config("finetune", [f"init={tmp_path / 'out'}", "train.rpo=false", *SHORT])
    _, trained, frozen = abstract_model(adapted.model)
    assert frozen
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(trained)]
    assert "stack/layers/1/mixer/decay" in names
    assert not any(name.endswith("qkv/q/kernel") for name in names)
