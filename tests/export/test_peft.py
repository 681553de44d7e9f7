"""Adapters exported for peft: equal logits for every layout of a family's projections."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import hugging_face
import jax
import numpy as np
import pytest
import tiny
from flax import nnx

from famjax.config.schema import Config, DropoutConfig, LoraConfig
from famjax.convert.load import load_pretrained
from famjax.core import optional
from famjax.core.errors import UserError
from famjax.experiment.load import to_json
from famjax.export import peft
from famjax.export.source import ExportSource
from famjax.layers.lora import Adapter
from famjax.models.language_model import LanguageModel
from famjax.train.partition import inference_config
from famjax.train.run import Run
from famjax.train.run_folder import CHECKPOINTS, CONFIG, SOURCE


def source_with_adapters(case: str, **lora) -> ExportSource:
    """Return a pretrained model with non-trivial adapters."""
    folder, _ = hugging_face.pretrained(case)
    config, plain = load_pretrained(folder)
    of_training = DropoutConfig(residual=0.1)
    config = replace(config, lora=LoraConfig(**{"rank": 3, **lora}), dropout=of_training)
    model = LanguageModel(inference_config(config), rngs=nnx.Rngs(0))
    nnx.update(model, nnx.state(plain, nnx.Param))
    rng = np.random.default_rng(0)
    adapters = nnx.state(model, Adapter)
    drawn = jax.tree.map(lambda a: a + 0.2 * rng.normal(size=a.shape).astype(np.float32), adapters)
    nnx.update(model, drawn)
    return ExportSource(Run(Config(model=config), tiny.run().tokenizer, model, 7), Path("run"))


@pytest.mark.parametrize(
    ("case", "lora"),
    [
        ("llama", {"alpha": 5.0}),
        ("gpt-neox", {"alpha": 5.0, "rs": True}),
        pytest.param("gpt2", {"on": "attention.[qv],mlp.*"}, marks=pytest.mark.long),
        pytest.param("gemma-3", {"on": "attention.out", "dropout": 0.5}, marks=pytest.mark.long),
    ],
)
def test_peft_has_the_same_logits(case, lora, tmp_path):
    source = source_with_adapters(case, **lora)
    first, said = peft.write(source, tmp_path)
    assert first.startswith("compared with the adapters read back: their updates differ by ")
    assert said.startswith("compared with peft ")
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    assert about["r"] == 3
    if case == "gpt2":
        assert about["rank_pattern"] == {"attn.c_attn": 9}
        assert about["target_modules"] == ["attn.c_attn", "mlp.c_fc", "mlp.c_proj"]


def test_the_base_has_the_attention_of_the_run(tmp_path):
    init = tmp_path / "base"
    (init / CHECKPOINTS / f"{0:09d}").mkdir(parents=True)
    (init / SOURCE).write_bytes((hugging_face.pretrained("llama")[0] / "config.json").read_bytes())
    source = source_with_adapters("llama")
    config = replace(source.run.config, init=str(init))
    plain = replace(config.model, lora=LoraConfig(), dropout=DropoutConfig())
    windows = replace(plain, mixer="swa", window=8)

    def base(converted, model):
        (init / CONFIG).write_text(to_json(replace(config, init="", model=converted)))
        tuned = replace(model, lora=LoraConfig(rank=3))
        run = replace(source.run, config=replace(config, model=tuned))
        return peft._describe_base(replace(source, run=run), model)

    exported = f"what `famjax export {init} BASE --format hf` writes"
    assert base(plain, plain) == f"the model that famjax convert read, or {exported}"
    # converted to windows, which the Hugging Face model does not have
    assert base(windows, windows) == exported
    # trained with windows, which the converted model does not have
    assert base(plain, windows) == (
        f"`famjax convert {init} NEW model.mixer=swa model.window=8`, then "
        "`famjax export NEW BASE --format hf`"
    )


def test_wrong_adapters_are_detected(tmp_path, monkeypatch):
    def other(source, tensors):
        weights, about = adapters(source, tensors)
        return weights, about | {"lora_alpha": about["lora_alpha"] * 2}

    adapters = peft.adapter_files
    monkeypatch.setattr(peft, "adapter_files", other)
    with pytest.raises(UserError, match="logits differ by"):
        peft.write(source_with_adapters("llama"), tmp_path)


def test_without_peft_adapters_are_read_back(tmp_path, monkeypatch):
    def other(source, tensors):
        weights, about = adapters(source, tensors)
        return {name: a * 1.01 for name, a in weights.items()}, about

    adapters = peft.adapter_files
    monkeypatch.setattr(optional.importlib.util, "find_spec", lambda name: None)
    said = peft.write(source_with_adapters("gpt2"), tmp_path)
    assert said[1] == (
        "not compared with peft: torch, transformers and peft not installed; "
        "pip install torch transformers peft"
    )
    monkeypatch.setattr(peft, "adapter_files", other)
    with pytest.raises(UserError, match="the updates of the adapters read back differ"):
        peft.write(source_with_adapters("gpt2"), tmp_path)


@pytest.mark.long
def test_unsupported_adapters_are_rejected(tmp_path):
    with pytest.raises(UserError, match="has no adapters; take --format hf"):
        peft.write(source_with_adapters("llama", rank=0), tmp_path)
    source = source_with_adapters("llama")
    config = replace(source.run.config, model=replace(source.model, mixer="fam"))
    with pytest.raises(UserError, match=r"none of which has model\.mixer=fam"):
        peft.write(replace(source, run=replace(source.run, config=config)), tmp_path)
