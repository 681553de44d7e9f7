"""Every config key of transformers is converted, has no effect, or is rejected by name."""

import copy
import dataclasses
import inspect
import json
from typing import Any, get_type_hints

import pytest
import transformers
from hugging_face import CASES, LINEAR, SHAPE, pretrained
from transformers.modeling_rope_utils import RopeParameters

from famjax import load_pretrained
from famjax.cli.main import main
from famjax.config.schema import ModelConfig
from famjax.convert.families import FAMILIES, find_family, native_family
from famjax.convert.families.common import ROPE_HARMLESS, ROPE_USED
from famjax.convert.families.keys import HARMLESS, UNSUPPORTED, Required, find_unknown_keys
from famjax.convert.load import read_hf_config
from famjax.core.errors import UserError
from famjax.export.pytorch.configuration_famjax import FamjaxConfig

CLASSES = {
    name: FamjaxConfig if name == "famjax" else transformers.CONFIG_MAPPING[name]
    for name in FAMILIES
}
GENERATION = transformers.GenerationConfig._get_default_generation_params()
each = pytest.mark.parametrize("name", FAMILIES)
theirs = pytest.mark.parametrize("name", [name for name in FAMILIES if name != "famjax"])


def attributes(kind):
    """Return every attribute that a config.json could set and transformers could read."""
    found = {field.name for field in dataclasses.fields(kind)} | set(GENERATION)
    found |= {*vars(kind()), *kind().to_dict(), *kind.attribute_map}
    for name in dir(kind):
        held = inspect.getattr_static(kind, name)
        method = callable(held) or isinstance(held, (staticmethod, classmethod))
        if not method and not name.startswith("__"):
            found.add(name)
    return found


def small_config(name, **changes):
    """Return the config.json of a small model."""
    if name == "famjax":
        return FAMILIES[name].serialize(find_family(hf := small_config("llama")).model(hf))
    case = next(case for case, (kind, _) in CASES.items() if kind == name)
    return read_hf_config(pretrained(case)[0]) | changes


@each
def test_every_key_of_transformers_is_known(name):
    keys = FAMILIES[name].keys
    known = {*keys.used, *keys.unsupported, *keys.harmless, *keys.aliases, *UNSUPPORTED, *HARMLESS}
    new = sorted(attributes(CLASSES[name]) - known)
    assert not new, f"{name}: transformers {transformers.__version__} has {', '.join(new)}"


def test_every_rope_key_of_transformers_is_known():
    known = {*ROPE_HARMLESS, *(key for keys in ROPE_USED.values() for key in keys)}
    known |= {"rope_theta", "rope_type", "partial_rotary_factor", "mrope_section"}
    new = sorted(get_type_hints(RopeParameters).keys() - known)
    assert not new, f"transformers {transformers.__version__}: rope_parameters has {', '.join(new)}"


@theirs
def test_defaults_equal_those_of_transformers(name):
    fields = {field.name: field.default for field in dataclasses.fields(CLASSES[name])}
    for key, default in FAMILIES[name].keys.used.items():
        if key in fields and not isinstance(default, Required):
            assert default == fields[key], key


@theirs
def test_every_converted_key_has_a_parity_case(name):
    """tests/convert/test_parity.py compares logits with these values."""
    older = {"rope_scaling", "rope_theta", "rotary_pct", "rotary_emb_base"}
    older |= {"rope_local_base_freq", "sliding_window_pattern"}
    one_value = set() if name in ("gpt_neox", "gpt2") else {"hidden_act", "hidden_activation"}
    folders = [pretrained(case)[0] for case, (kind, _) in CASES.items() if kind == name]
    for key, default in FAMILIES[name].keys.used.items():
        if key not in older | one_value:
            values = [read_hf_config(folder).get(key, default) for folder in folders]
            assert any(value != default for value in values), key


OTHERS = {
    "quantization_config": {"quant_method": "gptq", "bits": 4},
    "auto_map": {"AutoModelForCausalLM": "modeling_x.XForCausalLM"},
    "per_layer_config": {"1": {"num_attention_heads": 2}},
    "is_causal": False,
    "pruned_heads": {"1": [2]},
    "partial_rotary_factor": 0.5,
    "layer_types": ["full_attention", "chunked_attention", "full_attention"],
    "hidden_activation": "relu",
    "scale_attn_weights": False,
}


@theirs
def test_unsupported_keys_are_rejected_by_name(name):
    found = FAMILIES[name]
    for key in (UNSUPPORTED | dict(found.keys.unsupported)).keys() - found.keys.used.keys():
        value = OTHERS.get(key, 7 if key.endswith(("size", "window", "dim")) else True)
        if value is True and True in (UNSUPPORTED | dict(found.keys.unsupported))[key].neutral:
            value = False
        with pytest.raises(UserError) as caught:
            found.model(small_config(name, **{key: value}))
        said = str(caught.value)
        assert said.startswith(f"config.json: {key}=")
        assert "\n" not in said
        assert f"for {name}: " in said
        for neutral in (UNSUPPORTED | dict(found.keys.unsupported))[key].neutral:
            found.model(small_config(name, **{key: neutral}))


def test_a_bidirectional_gemma_is_rejected(tmp_path, capsys):
    folder = tmp_path / "gemma"
    folder.mkdir()
    source = pretrained("gemma-3")[0]
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    hf = read_hf_config(folder) | {"use_bidirectional_attention": True}
    (folder / "config.json").write_text(json.dumps(hf))
    assert main(["convert", str(folder), str(tmp_path / "out"), "--tokenizer", "bytes"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == (
        "famjax: config.json: use_bidirectional_attention=True is not supported for gemma3_text: "
        "attention is causal here"
    )
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="use_bidirectional_attention=True"):
        load_pretrained(folder)


def test_unknown_keys_are_reported(tmp_path, capsys):
    folder = tmp_path / "llama"
    folder.mkdir()
    for path in pretrained("llama")[0].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    hf = read_hf_config(folder) | {"new_gate": 2, "other": None, "off": False, "more": [1]}
    (folder / "config.json").write_text(json.dumps(hf))
    with pytest.warns(UserWarning, match="json: more, new_gate: unknown to famjax, ignored"):
        load_pretrained(folder)
    arguments = ["--tokenizer", "bytes", "--to", "keep"]
    main(["convert", str(folder), str(tmp_path / "out"), *arguments])
    assert "config.json: more, new_gate: unknown to famjax" in capsys.readouterr().err


@each
def test_exported_configs_have_known_keys_only(name):
    assert not find_unknown_keys(small_config(name), FAMILIES[name].keys)


def test_aliases_of_keys_are_accepted():
    hf = small_config("gpt2")
    assert FAMILIES["gpt2"].model(hf | {"num_hidden_layers": 2}).layers == 2
    assert transformers.GPT2Config(**hf | {"num_hidden_layers": 2}).n_layer == 2
    del hf["n_layer"]
    with pytest.raises(UserError, match="has no 'n_layer'"):
        load_of(hf)


def load_of(hf):
    from pathlib import Path

    from famjax.convert.load import parse_model

    return parse_model(hf, Path("folder"))


# windows


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window=0: must be at least 1"),
        ("mistral", {"layer_types": ["sliding_attention"] * 3}, "layer_types="),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "no sliding_window; set it"),
        ("qwen3", {"layer_types": ["full_attention"]}, "has 1 layers, num_hidden_layers=3"),
        ("gemma2", {"layer_types": ["conv"] * 3}, "layer_types has 'conv'"),
        ("gemma2", {"sliding_window": None}, "sliding layers but no sliding_window"),
    ],
)
def test_invalid_windows_are_rejected(name, changes, said):
    with pytest.raises(UserError) as caught:
        FAMILIES[name].model(small_config(name, **changes))
    assert said in str(caught.value)


def test_defaults_of_windows():
    hf = small_config("mistral", sliding_window=16, layer_types=["sliding_attention"] * 3)
    assert FAMILIES["mistral"].model(hf).mixer == "swa"
    assert FAMILIES["mistral"].model(hf).block_len == 16
    hf = small_config("mistral", max_position_embeddings=9000)
    del hf["sliding_window"]
    windowed = FAMILIES["mistral"].model(hf)
    # a short text takes a block, not a window
    assert (windowed.window, windowed.block_len) == (4096, 512)
    hf = small_config("gemma3_text", num_hidden_layers=7)
    del hf["layer_types"]
    assert FAMILIES["gemma3_text"].model(hf).mixer == "swa,swa,swa,swa,swa,full,swa"
    hf = hf | {"sliding_window_pattern": 2}
    assert FAMILIES["gemma3_text"].model(hf).mixer.startswith("swa,full,swa")
    hf = small_config("qwen2", use_sliding_window=True, sliding_window=None)
    assert FAMILIES["qwen2"].model(hf | {"layer_types": None}).mixer == "full"


# rotary positions

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED = {"type": "linear", "factor": 2.0}


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma", "gpt_neox", "gemma3_text"])
@pytest.mark.parametrize(
    "said",
    [
        {},
        {"rope_theta": 77.0},
        {"rope_scaling": SCALED},
        {"rope_scaling": SCALED, "rope_theta": 77.0},
        {"rope_scaling": SCALED, "rope_parameters": LINEAR | {"rope_theta": 55.0}},
        {"rope_scaling": LLAMA3 | {"rope_theta": 33.0}},
        {"rope_parameters": {"rope_theta": 33.0, "factor": 3.0}},
        {"rotary_emb_base": 99.0, "rotary_pct": 0.5},
        {"rope_local_base_freq": 44.0, "rope_theta": 77.0},
        {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_theta": 9.0}}},
        {"rope_parameters": {"full_attention": LLAMA3}, "rope_theta": 5.0},
    ],
)
def test_rope_parameters_equal_transformers(name, said):
    hf = small_config(name)
    del hf["rope_parameters"]
    hf |= said
    given = said.get("rope_parameters")
    # transformers raises an error for the former and ignores the latter
    if given and ("full_attention" in given) != (name == "gemma3_text"):
        overruled = "rope_scaling" in said and name != "gemma3_text"
        if not overruled:
            with pytest.raises(UserError, match=r"config.json: rope_parameters\."):
                FAMILIES[name].model(hf)
            return
    ours = FAMILIES[name].model(hf)
    found = CLASSES[name](**copy.deepcopy(hf)).rope_parameters
    if name == "gemma3_text":
        assert ours.arch.local_rope_base == found["sliding_attention"]["rope_theta"]
        found = found["full_attention"]
    kind = found["rope_type"]
    assert ours.rope_base == found["rope_theta"]
    assert ours.arch.rope_scaling == ("none" if kind == "default" else kind)
    if kind != "default":
        assert ours.arch.rope_factor == found["factor"]
    if kind == "llama3":
        assert ours.arch.rope_length == found["original_max_position_embeddings"]
    if name == "gpt_neox":
        assert ours.arch.rotary_fraction == found["partial_rotary_factor"]


@pytest.mark.parametrize(
    ("name", "rope", "said"),
    [
        ("llama", {"rope_type": "yarn", "factor": 2.0}, "rope_type='yarn' is not supported"),
        ("llama", {"mrope_section": [2, 3, 3]}, "rope_parameters.mrope_section=[2, 3, 3] is not"),
        ("llama", {"partial_rotary_factor": 0.5}, "rope_parameters.partial_rotary_factor=0.5"),
        ("qwen2", {"full_attention": {"rope_theta": 1.0}}, "rope_parameters.full_attention="),
        ("gemma3_text", {"rope_theta": 1.0}, "rope_parameters.rope_theta is not a layer type"),
        (
            "gemma3_text",
            {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
            "rope_parameters.sliding_attention: sliding layers support only rope_type=default",
        ),
    ],
)
def test_invalid_rope_parameters_are_rejected(name, rope, said):
    with pytest.raises(UserError) as caught:
        FAMILIES[name].model(small_config(name, rope_parameters=rope))
    assert said in str(caught.value)


# config.json files from the hub

HUB = {
    "SmolLM2-135M": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576,
        "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
        "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama",
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False,
        "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True,
        "vocab_size": 49152,
    },
    "Mistral-7B-v0.1": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896,
        "initializer_range": 0.02, "intermediate_size": 4864, "max_position_embeddings": 32768,
        "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True,
        "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "gemma-2b": {
        "architectures": ["GemmaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 2, "eos_token_id": 1, "head_dim": 256, "hidden_act": "gelu",
        "hidden_activation": None, "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 16384, "max_position_embeddings": 8192, "model_type": "gemma",
        "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1,
        "pad_token_id": 0, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000.0,
        "torch_dtype": "bfloat16", "transformers_version": "4.38.0.dev0", "use_cache": True,
        "vocab_size": 256000,
    },
    "gemma-2-2b": {
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid",
        "eos_token_id": 1, "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216,
        "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
        "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
        "sliding_window": 4096, "torch_dtype": "float32", "transformers_version": "4.42.4",
        "use_cache": True, "vocab_size": 256000,
    },
    "gemma-3-1b-pt": {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid",
        "eos_token_id": 1, "final_logit_softcapping": None, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
        "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
    },
    "pythia-70m": {
        "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0,
        "hidden_act": "gelu", "hidden_size": 512, "initializer_range": 0.02,
        "intermediate_size": 2048, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
        "model_type": "gpt_neox", "num_attention_heads": 8, "num_hidden_layers": 6,
        "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
        "torch_dtype": "float16", "transformers_version": "4.24.0", "use_cache": True,
        "use_parallel_residual": True, "vocab_size": 50304,
    },
    "gpt2": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
        "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    },
}  # fmt: skip


@pytest.mark.parametrize("model", HUB)
def test_configs_from_the_hub_load_without_warnings(model):
    hf = HUB[model]
    found = find_family(hf).model(hf)
    assert not find_unknown_keys(hf, find_family(hf).keys)
    # as transformers writes it with all defaults
    whole = json.loads(CLASSES[hf["model_type"]](**hf).to_json_string(use_diff=False))
    assert find_family(hf).model(whole) == found
    assert not find_unknown_keys(whole, find_family(hf).keys)


def test_a_folder_resaved_by_transformers_is_recognized(tmp_path):
    config = transformers.LlamaConfig(**SHAPE)
    config.save_pretrained(tmp_path)
    hf = read_hf_config(tmp_path)
    assert not find_unknown_keys(hf, FAMILIES["llama"].keys)


@pytest.mark.parametrize("stack", ["feedback", "transformer", "lstm"])
def test_no_family_has_a_stack_without_mixers(stack: Any) -> None:
    assert native_family(ModelConfig(vocab_size=9, stack=stack)) is None
