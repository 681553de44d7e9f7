"""Every tensor of a Hugging Face folder is loaded; anything wrong with it is a one-line error."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from famjax import load_pretrained
from famjax.config.schema import LoraConfig, MeshConfig
from famjax.convert.families import find_family
from famjax.core.errors import UserError
from famjax.parallel import sharding

LLAMA = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "tie_word_embeddings": True,
}


def names_and_shapes():
    d, c, g = 8, 16, 4
    shapes = {"model.embed_tokens.weight": (11, d), "model.norm.weight": (d,)}
    for i in range(2):
        shapes |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (d,),
                "post_attention_layernorm": (d,),
                "self_attn.q_proj": (d, d),
                "self_attn.k_proj": (g, d),
                "self_attn.v_proj": (g, d),
                "self_attn.o_proj": (d, d),
                "mlp.gate_proj": (c, d),
                "mlp.up_proj": (c, d),
                "mlp.down_proj": (d, c),
            }.items()
        }
    return shapes


@pytest.fixture
def folder(tmp_path):
    """Return a complete checkpoint in two files."""
    rng = np.random.default_rng(0)
    tensors = {n: rng.normal(size=s).astype(np.float32) for n, s in names_and_shapes().items()}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    names = sorted(tensors)
    for i, part in enumerate((names[:7], names[7:])):
        save_file({n: tensors[n] for n in part}, tmp_path / f"model-{i}.safetensors")
    return tmp_path


def change(folder, **tensors):
    """Rewrite the second file with tensors changed, added or removed (None)."""
    from safetensors.numpy import load_file

    path = folder / "model-1.safetensors"
    held = load_file(path) | tensors
    save_file({n: a for n, a in held.items() if a is not None}, path)


def error_of(folder) -> str:
    with pytest.raises(UserError) as caught:
        load_pretrained(folder)
    return str(caught.value)


def test_every_tensor_is_loaded(folder):
    config, model = load_pretrained(folder)
    assert (config.layers, config.kv_heads, config.tied) == (2, 1, True)
    tensors = {}
    from safetensors.numpy import load_file

    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    layer = model.stack.layers[0]
    for i in range(2):
        there = tensors[f"model.layers.{i}.self_attn.k_proj.weight"]
        ours = np.asarray(layer.mixer.qkv.k.kernel[...][i])
        assert (ours.reshape(8, 4) == there.T).all()
        there = tensors[f"model.layers.{i}.self_attn.o_proj.weight"]
        assert (np.asarray(layer.mixer.qkv.out.kernel[...][i]).reshape(8, 8) == there.T).all()
    logits, _ = model(jnp.zeros((1, 4), jnp.int32), model.init_state(1))
    assert np.isfinite(logits).all()


def test_converting_to_fam_keeps_weights_and_initializes_the_prompt_from_tokens(folder):
    _, full = load_pretrained(folder)
    config, fam = load_pretrained(folder, mixer="bswa,fam", block_len=4, fam_len=3)
    for i, layer in enumerate(fam.stack.layers):
        qkv = layer.mixer.qkv
        expected = full.stack.layers[0].mixer.qkv
        for ours, theirs in ((qkv.q, expected.q), (qkv.out, expected.out)):
            assert (ours.kernel[...][0] == theirs.kernel[...][i]).all()
    rows = np.asarray(fam.embedding[...])
    for token in np.asarray(fam.stack.prompt[...]):
        assert (token == rows).all(-1).any()  # embed_scale is 1
    logits, _ = fam(jnp.zeros((1, 8), jnp.int32), fam.init_state(1))
    assert np.isfinite(logits).all()
    assert config.fam_len == 3


def test_a_missing_tensor_is_an_error(folder):
    change(folder, **{"model.layers.1.mlp.up_proj.weight": None})
    assert error_of(folder).startswith(
        "the checkpoint lacks 1 tensor: model.layers.1.mlp.up_proj.weight (did you mean"
    )


def test_an_unexpected_tensor_is_an_error(folder):
    change(folder, **{"model.layers.1.self_attn.k_proj.bias": np.zeros(4, np.float32)})
    assert "has unexpected tensors: 1 tensor: model.layers.1.self_attn.k_proj.bias" in error_of(
        folder
    )


def test_a_wrong_shape_is_an_error(folder):
    change(folder, **{"model.layers.1.mlp.up_proj.weight": np.zeros((16, 9), np.float32)})
    assert "model.layers.1.mlp.up_proj.weight has shape (16, 9)" in error_of(folder)


def test_non_finite_values_are_an_error(folder):
    change(folder, **{"model.layers.1.mlp.up_proj.weight": np.full((16, 8), np.nan, np.float32)})
    assert "model.layers.1.mlp.up_proj.weight has values that are not finite" in error_of(folder)


@pytest.mark.parametrize("keep", [0, 5, 200, -4])
def test_a_truncated_file_is_an_error(folder, keep):
    path = folder / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert error_of(folder).startswith(f"{path}: damaged (")


def test_a_wrong_header_size_is_an_error(folder):
    path = folder / "model-1.safetensors"
    path.write_bytes((2**40).to_bytes(8, "little") + path.read_bytes()[8:])
    assert error_of(folder).startswith(f"{path}: damaged (")


def test_a_missing_file_is_an_error(folder):
    index = folder / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"a": "model-0.safetensors", "b": "model-2.safetensors"}})
    )
    assert error_of(folder).startswith(
        f"{folder / 'model-2.safetensors'} is missing, but {index.name}"
    )
    index.write_text("{}")
    assert error_of(folder).startswith(f"{index}: damaged (")


def test_a_file_beside_the_index_of_others_is_an_error(folder):
    index = folder / "model.safetensors.index.json"
    parts = dict(zip("ab", ["model-0.safetensors", "model-1.safetensors"], strict=True))
    index.write_text(json.dumps({"weight_map": parts}))
    load_pretrained(folder)
    # transformers leaves one of them when it saves a model to the folder of another
    (folder / "model.safetensors").write_bytes((folder / "model-0.safetensors").read_bytes())
    assert error_of(folder).startswith(
        f"{folder}: has model.safetensors and {index.name}, which does not list it; they may be"
    )


@pytest.mark.parametrize(
    "name",
    [
        "../model-0.safetensors",
        "/etc/x.safetensors",
        "sub/model-0.safetensors",
        "./model-0.safetensors",
        "..",
        ".",
        "",
        "a\0.safetensors",
        "..\\model-0.safetensors",
    ],
)
def test_an_index_cannot_open_files_outside_the_folder(folder, name, monkeypatch):
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-0.safetensors", "b": name}}))
    monkeypatch.setattr("safetensors.safe_open", lambda *_, **__: pytest.fail("opened"))
    said = error_of(folder)
    assert said.startswith(f"{index}: names the file {name!r} outside its folder")
    assert "\n" not in said


def test_adapters_in_a_folder_are_an_error(folder):
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    assert error_of(folder).startswith(f"{folder / 'adapter_config.json'}: the folder has adapters")


def test_links_of_the_hub_cache_are_followed(folder, tmp_path_factory):
    blobs = tmp_path_factory.mktemp("blobs")
    (folder / "model-0.safetensors").rename(blobs / "0a1b")
    (folder / "model-0.safetensors").symlink_to(blobs / "0a1b")
    load_pretrained(folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_converted_exactly(folder, dtype):
    from safetensors.flax import save_file

    name = "model.layers.1.mlp.up_proj.weight"
    short = jnp.asarray(np.random.default_rng(1).normal(size=(16, 8)), dtype)
    change(folder, **{name: None})
    save_file({name: short}, folder / "model-2.safetensors")
    _, model = load_pretrained(folder)
    kernel = model.stack.layers[0].mlp.up.kernel[...][1]
    assert kernel.dtype == jnp.float32
    assert (kernel == short.T.astype(jnp.float32)).all()


def test_pickles_are_rejected(folder):
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert "no *.safetensors" in error_of(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert "pickles, which run code when they are loaded" in error_of(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "has no config.json; give a Hugging Face model's folder"),
        ("{", "config.json: damaged ("),
        ("{}", "model_type=None is not supported"),
        ('{"model_type": "lama"}', "model_type='lama' is not supported; did you mean 'llama'?"),
        ('{"model_type": "llama"}', "config.json: has no 'vocab_size'"),
    ],
)
def test_an_invalid_config_is_an_error(folder, text, said):
    path = folder / "config.json"
    path.unlink()
    if text is not None:
        path.write_text(text)
    assert said in error_of(folder)


def test_unsupported_rope_types_are_rejected():
    hf = LLAMA | {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}
    with pytest.raises(UserError, match="rope_type='yarn' is not supported"):
        find_family(hf).parse(hf)


def test_every_parameter_is_sharded_by_the_mesh(folder):
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=2, tensor=2), jax.devices()[:4])
    _, whole = load_pretrained(folder, mixer="bswa,fam", block_len=4, fam_len=2)
    _, model = load_pretrained(folder, mesh, mixer="bswa,fam", block_len=4, fam_len=2)
    params, expected = (nnx.state(m, nnx.Param) for m in (model, whole))
    places = sharding.parameter_shardings(mesh, params)
    spread = 0
    for a, b, place in zip(*map(jax.tree.leaves, (params, expected, places)), strict=True):
        assert a.sharding.is_equivalent_to(place, a.ndim)
        assert (np.asarray(a) == np.asarray(b)).all()
        spread += not a.is_fully_replicated
    assert spread > 10


# damaged or unusual folders


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_scaling": "x"}, "a value of an unexpected type"),
        ({"model_type": ["llama"]}, "model_type=['llama'] is not supported"),
        ({"hidden_act": ["silu"]}, "a value of an unexpected type"),
        ({"num_hidden_layers": 0}, "model.layers=0"),
        (
            {"num_hidden_layers": 0, "model_type": "qwen2", "layer_types": []},
            "model.layers=0",
        ),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported here (known: silu)"),
        ({"model": {}, "optimizer": {}}, "is a famjax run; famjax train CONFIG init="),
    ],
)
def test_a_contradicting_config_is_an_error(folder, changes, said):
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    assert said in error_of(folder)


@pytest.mark.parametrize("index", ["[]", '{"weight_map": {"a": 5}}'])
def test_an_invalid_index_is_an_error(folder, index):
    (folder / "model.safetensors.index.json").write_text(index)
    assert "index.json: damaged (" in error_of(folder)


def test_integer_weights_are_rejected(folder):
    name = "model.layers.1.mlp.up_proj.weight"
    change(folder, **{name: np.zeros((16, 8), np.int8)})
    assert f"{name} has dtype I8; quantized weights are not supported" in error_of(folder)


def test_a_tied_head_must_be_the_embedding(folder):
    from safetensors.numpy import load_file

    table = load_file(folder / "model-0.safetensors")["model.embed_tokens.weight"]
    change(folder, **{"lm_head.weight": table})
    load_pretrained(folder)
    change(folder, **{"lm_head.weight": table + 1})
    assert "lm_head.weight differs from the embedding, to which config.json ties it" in error_of(
        folder
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mixr": "fam"}, "a model's config has no 'mixr'; did you mean 'mixer'?"),
        ({"mixer": "delte"}, "unknown mixer 'delte'; did you mean 'delta'?"),
        ({"width": 16}, "model.width=16: the given weights have 8"),
        ({"lora": LoraConfig(rank=2)}, "adapters need training"),
    ],
)
def test_invalid_changes_are_rejected(folder, changes, said):
    with pytest.raises(UserError) as caught:
        load_pretrained(folder, **changes)
    assert said in str(caught.value)
