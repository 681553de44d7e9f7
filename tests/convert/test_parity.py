"""Logits of pretrained models equal those of transformers, computed live; so do exported ones."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from flax import nnx
from hugging_face import CASES, TOKENS, auto_class, logits, pretrained
from safetensors.numpy import load_file

from famjax import load_pretrained
from famjax.convert import save
from famjax.convert.families import FAMILIES, find_family, native_family, normalize_model
from famjax.convert.families.llama import LLAMA
from famjax.convert.load import read_hf_config
from famjax.core.types import Context
from famjax.models.seq2seq import Seq2Seq


def close(ours, theirs):
    apart = np.abs(np.asarray(ours) - theirs).max()
    assert apart < 1e-4 * (theirs.max() - theirs.min())


def read(model):
    """Return the logits of TOKENS."""
    graph, params = nnx.split(model)

    @jax.jit
    def call(params, tokens):
        model = nnx.merge(graph, params)
        source = None
        if isinstance(model, Seq2Seq):
            source = model.read_source(tokens[:, ::-1], jnp.ones_like(tokens))
        return model(tokens, model.init_state(len(tokens)), Context(source=source))[0]

    return call(params, jnp.asarray(TOKENS, jnp.int32))


# in quick runs, without the models that set the less common keys of config.json
some_cases = pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.long) if c.endswith("-keys") else c for c in CASES]
)


@some_cases
def test_logits_are_those_of_hugging_face(case):
    folder, expected = pretrained(case)
    _, model = load_pretrained(folder)
    close(read(model), expected)


def test_a_folder_without_a_head_has_no_bias_of_logits(tmp_path):
    folder, _ = pretrained("bart")
    model = auto_class("bart").from_pretrained(folder)
    model.final_logits_bias.zero_()
    model.model.save_pretrained(tmp_path)
    _, ours = load_pretrained(tmp_path)
    close(read(ours), logits(model))


def test_blocks_as_long_as_the_text_give_the_same_logits():
    folder, expected = pretrained("llama")
    _, model = load_pretrained(folder, mixer="bswa", block_len=16, memory_segments=3)
    close(read(model), expected)


def tensors(folder):
    held = {}
    for path in folder.glob("*.safetensors"):
        held |= load_file(path)
    return held


@some_cases
def test_export_restores_the_original_files(case, tmp_path, monkeypatch):
    folder, expected = pretrained(case)
    config, model = load_pretrained(folder)
    kind = native_family(config, read_hf_config(folder)["model_type"])
    assert kind is find_family(read_hf_config(folder))
    monkeypatch.setattr(save, "SHARD_BYTES", 100_000)
    save.save_tensors(model, config, kind.tensors(config), tmp_path, "float32")
    ids = {"pad_token_id": read_hf_config(folder).get("pad_token_id")}
    (tmp_path / "config.json").write_text(json.dumps(ids | kind.serialize(config)))
    before, after = tensors(folder), tensors(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert before.keys() == after.keys()
    for name, original in before.items():
        assert (original.shape, original.dtype) == (after[name].shape, after[name].dtype)
        assert (original == after[name]).all(), name
    auto = auto_class(read_hf_config(folder)["model_type"])
    again = auto.from_pretrained(tmp_path, attn_implementation="eager")
    assert np.array_equal(logits(again), expected)


@pytest.mark.parametrize("case", CASES)
def test_export_selects_a_family(case):
    hf = read_hf_config(pretrained(case)[0])
    config = find_family(hf).parse(hf)
    assert native_family(config) in FAMILIES.values()


@pytest.mark.parametrize("mixer", ["bswa", "bswa_sg", "fam", "full,fam"])
def test_no_family_has_memory(mixer):
    hf = read_hf_config(pretrained("qwen2")[0])
    config = replace(find_family(hf).parse(hf), mixer=mixer, layers=2)
    assert native_family(config) is None


def test_unused_fields_do_not_affect_the_family():
    config = find_family(hf := read_hf_config(pretrained("llama")[0])).parse(hf)
    assert (
        native_family(replace(config, fam_len=99, memory_segments=7, window=3, remat="layer"))
        is LLAMA
    )
    assert (
        native_family(replace(config, arch=replace(config.arch, rope_factor=3, rope_low=2)))
        is LLAMA
    )


def test_a_width_that_heads_do_not_divide_has_a_family_that_accepts_it():
    config = find_family(hf := read_hf_config(pretrained("llama")[0])).parse(hf)
    model = replace(config, width=66, head_dim=16)
    family = native_family(model, prefer="llama")
    transformers.AutoConfig.for_model(**family.serialize(normalize_model(model)))
    assert family is FAMILIES["mistral"]
    model = replace(model, arch=replace(model.arch, qkv_bias=True))
    assert native_family(model) is FAMILIES["qwen2"]
    config = find_family(hf := read_hf_config(pretrained("gpt2")[0])).parse(hf)
    assert native_family(replace(config, width=66, head_dim=16)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"mlp": "gelu"},
        {"norm": "layernorm"},
        {"mixer": "swa", "window": 64},  # as long as the text: Mistral would treat it as full
        {"arch": {"embed_scale": 2.0}},
        {"arch": {"qkv_bias": True, "qk_norm": True}},
        {"arch": {"norm_plus_one": True}},
        {"arch": {"attention_cap": 30.0}},
        {"arch": {"positions": "learned"}},
    ],
)
def test_unrepresentable_models_have_no_family(changes):
    config = find_family(hf := read_hf_config(pretrained("llama")[0])).parse(hf)
    arch = replace(config.arch, **changes.pop("arch", {}))
    assert native_family(replace(config, arch=arch, **changes)) is None
