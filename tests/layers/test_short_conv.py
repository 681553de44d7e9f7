"""The short convolution: given to trained models, trained, and what refuses it.

`contracts.harness` has its equations in its cases.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from flax import nnx

from famjax.cli.main import main
from famjax.config.schema import Config, ModelConfig
from famjax.convert.open import open_model
from famjax.core.errors import UserError
from famjax.experiment.load import load_config
from famjax.layers.short_conv import ShortConv
from famjax.models.language_model import LanguageModel
from famjax.models.remap_params import abstract_inference_model, remap_params
from famjax.models.seq2seq import make_model
from famjax.train.loop import train

MODEL = ModelConfig(vocab_size=11, layers=2, width=8, heads=2, mixer="bswa", block_len=4)
TOKENS = np.random.default_rng(0).integers(11, size=(2, 16)).astype(np.int32)
SMALL = [
    *("model.layers=2", "model.width=16", "model.heads=2", "model.mlp_width=32"),
    *("model.block_len=8", "model.memory_segments=1", "data.batch=2", "data.length=32"),
    *("train.steps=2", "optimizer.warmup_steps=0"),
]


def kernel(model: LanguageModel) -> np.ndarray:
    """Return W [k-1 d d]."""
    part = model.stack.short_conv
    assert isinstance(part, ShortConv)
    return np.asarray(part.kernel[...])


def read(model: LanguageModel) -> np.ndarray:
    return np.asarray(model(TOKENS, model.init_state(len(TOKENS)))[0])


def remapped(given: LanguageModel, old: ModelConfig, new: ModelConfig) -> LanguageModel:
    params = remap_params(nnx.state(given, nnx.Param), old, new)
    model: LanguageModel = nnx.merge(abstract_inference_model(new)[0], params)
    return model


def test_a_trained_model_gets_the_convolution() -> None:
    """It computes what it did before; further tokens are added to a convolution with weights 0."""
    plain = make_model(MODEL, rngs=nnx.Rngs(0))
    spans_three = replace(MODEL, short_conv=3)
    given = remapped(plain, MODEL, spans_three)
    np.testing.assert_array_equal(read(given), read(plain))
    part = given.stack.short_conv
    part.kernel[...] = np.random.default_rng(1).normal(size=part.kernel.shape)
    assert np.abs(read(given) - read(plain)).max() > 0.1
    longer = remapped(given, spans_three, replace(MODEL, short_conv=5))
    assert kernel(longer).shape == (4, 8, 8)
    np.testing.assert_allclose(read(longer), read(given), atol=1e-6)


@pytest.mark.parametrize("new", [0, 2])
def test_weights_are_not_lost(new: int) -> None:
    three = replace(MODEL, short_conv=3)
    model = make_model(three, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=rf"short_conv={new}: .* of 3 tokens, which cannot be"):
        remapped(model, three, replace(MODEL, short_conv=new))


def test_errors_name_the_key() -> None:
    with pytest.raises(UserError, match=r"model\.short_conv=1 spans each token alone"):
        load_config("text_bswa", ["model.short_conv=1"])
    with pytest.raises(UserError, match=r"model\.stack=rmt has no short convolution; set 0"):
        load_config("passkey", ["model.stack=rmt", "model.short_conv=4"])


def test_a_config_with_it_is_used_with_another_stack() -> None:
    assert load_config("passkey").model.short_conv == 4
    assert load_config("passkey", ["model.stack=rmt"]).model.short_conv == 0


def config(folder: Path, *more: str) -> Config:
    return load_config("text_bswa", [*SMALL, f"data.files={folder / 'train.txt'}", *more])


@pytest.mark.long
def test_it_is_trained_with_adapters_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.txt").write_text(tiny.TEXT * 40)
    train(config(tmp_path), tmp_path / "plain", quiet=True)
    given = load_config(
        "text_bswa",
        [
            *(key for key in SMALL if not key.startswith("model.")),
            *(f"init={tmp_path / 'plain'}", f"data.files={tmp_path / 'train.txt'}"),
            *("model.short_conv=3", "model.lora.rank=2"),
        ],
    )
    run = train(given, tmp_path / "tuned", quiet=True)
    trained = kernel(run.model)
    assert np.abs(trained).max(axis=(1, 2)).min() > 1e-4
    for form in ("hf", "orbax", "stablehlo"):
        # each format is compared with the run when it is written
        argv = ["export", str(tmp_path / "tuned"), str(tmp_path / form), "--format", form]
        assert main(argv) == 0
    folder = tmp_path / "hf"
    np.testing.assert_array_equal(kernel(open_model(str(folder)).model), trained)
    more = ["--to", "bswa", "model.short_conv=4"]
    assert main(["convert", str(folder), str(tmp_path / "more"), *more]) == 0
    found = kernel(open_model(str(tmp_path / "more")).model)
    np.testing.assert_array_equal(found[:2], trained)
    assert not found[2:].any()
    assert main(["export", str(tmp_path / "tuned"), str(tmp_path / "p"), "--format", "peft"]) == 2
    assert "--format peft: does not support model.short_conv=3" in capsys.readouterr().err
