"""`famjax convert`: a Hugging Face folder becomes a verified run, or nothing is written."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file

from famjax import load_pretrained
from famjax.cli.main import main
from famjax.config.derived import layer_mixers
from famjax.config.schema import ArchConfig, ModelConfig
from famjax.convert import selfcheck
from famjax.convert.surgery import describe_window, parse_layers, replace_attention
from famjax.core import optional
from famjax.core.errors import UserError
from famjax.experiment.load import load_config
from famjax.models.remap_checks import check_compatible
from famjax.train.loop import train
from famjax.train.run import open_run
from famjax.train.run_folder import read_run_config

TOKENS = np.random.default_rng(0).integers(0, 258, (1, 32))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return a tiny random Llama with a byte tokenizer, in Hugging Face format."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=256,
        eos_token_id=257,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    token_to_bytes = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {character: i for i, character in enumerate(sorted(token_to_bytes))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@pytest.fixture
def copy(llama, tmp_path):
    """Return a copy of the folder that may be damaged."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in llama.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def logits(model, tokens=TOKENS):
    return np.asarray(model(jnp.asarray(tokens), model.init_state(len(tokens)))[0])


def error_line(capsys, *argv):
    assert main(["convert", *map(str, argv)]) == 2
    return capsys.readouterr().err.splitlines()[-1].removeprefix("famjax: ")


@pytest.mark.long
def test_a_converted_model_is_a_run_and_can_be_trained(llama, tmp_path, capsys):
    target = tmp_path / "fam"
    sizes = ["model.block_len=8", "model.fam_len=2", "model.memory_segments=2"]
    assert main(["convert", str(llama), str(target), "--to", "fam", *sizes]) == 0
    said = capsys.readouterr()
    assert "Hugging Face's to" in said.err
    assert "a token sees 17 to 24 tokens directly (before: all of 64)\n" in said.err
    assert f"famjax train finetune init={target}" in said.out
    run = open_run(target)
    assert run.config.model.mixer == "fam"
    assert (run.config.model.block_len, run.config.model.memory_segments) == (8, 2)
    _, whole = load_pretrained(llama)
    there = nnx.state(whole, nnx.Param)["stack"]["layers"][0]["mixer"]["qkv"]["q"]["kernel"]
    ours = nnx.state(run.model, nnx.Param)["stack"]["layers"][0]["mixer"]["window"]["qkv"]
    assert (ours["q"]["kernel"][...] == there[...]).all()
    assert run.tokenizer.decode(run.tokenizer.encode("été")) == "été"
    assert (target / "hf_config.json").read_text() == (llama / "config.json").read_text()

    text = tmp_path / "text.txt"
    text.write_text("some text to learn " * 60)
    small = [
        "data.length=64",
        "data.batch=2",
        "train.steps=1",
        "data.holdout=0",
        "model.remat=none",
    ]
    more = ["data.repeat_len=0", "train.steps=1"]
    given = [f"init={target}", f"data.files={text}", *small, *more]
    config = load_config("finetune", given)
    assert config.model == replace(run.config.model, lora=config.model.lora)
    trained = train(config, tmp_path / "tuned", quiet=True)
    assert trained.tokenizer.vocab_size == 258


@pytest.mark.long
def test_a_long_window_gives_the_logits_of_the_source(llama, tmp_path):
    target = tmp_path / "bswa"
    sizes = ["model.block_len=8", "model.memory_segments=3"]
    assert main(["convert", str(llama), str(target), "--to", "bswa", *sizes]) == 0
    _, whole = load_pretrained(llama)
    expected = logits(whole)
    assert np.abs(logits(open_run(target).model) - expected).max() < 1e-5 * np.ptp(expected)


@pytest.mark.parametrize(
    ("old", "new", "given", "said"),
    [
        (
            {"mixer": "full", "capacity": 131072},
            {"mixer": "delta"},
            [],
            "delta: blocks of 128, memory segments 1, a memory of 256 x 64 a head: a token sees "
            "129 to 256 tokens directly (before: all of 131,072); model.block_len=512 would change "
            "it",
        ),
        (
            {"mixer": "swa,full", "window": 9, "capacity": 64},
            {"mixer": "fam", "block_len": 8, "memory_segments": 0},
            ["model.block_len"],
            "fam: blocks of 8, memory segments 0, feedback memory of 16 tokens: a token sees 1 "
            "to 8 tokens directly (before: 9 or all of 64)",
        ),
        (
            {"mixer": "full"},
            {"mixer": "full,swa"},
            [],
            "swa: window 128: a token sees 128 tokens directly (before: all of 4,096); "
            "model.window=512 would change it",
        ),
        (
            {"mixer": "swa"},
            {},
            [],
            "attention unchanged; --to delta, --to fam or model.ngram_memory=8 adds a memory",
        ),
        ({"mixer": "swa"}, {"ngram_memory": 2}, [], ""),
        ({"mixer": "delta"}, {"mixer": "fam"}, [], ""),
        ({"mixer": "delta"}, {}, [], ""),
        ({"mixer": "full"}, {"mixer": "linear"}, [], ""),
    ],
)
def test_conversion_says_what_a_token_sees(old, new, given, said):
    before = ModelConfig(vocab_size=9, **old)
    assert "\n".join(describe_window(before, replace(before, **new), given)) == said


def test_a_failed_conversion_leaves_no_files(llama, copy, tmp_path, capsys):
    target = tmp_path / "out"
    weights = copy / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: a for key, a in tensors.items() if key != name}, weights)
    assert f"lacks 1 tensor: {name}" in error_line(capsys, copy, target)
    save_file(tensors | {name: tensors[name] * np.nan}, weights)
    assert "not finite" in error_line(capsys, copy, target)
    assert list(tmp_path.iterdir()) == [copy]
    target.mkdir()
    assert "exists already; give another folder" in error_line(capsys, llama, target)
    assert not list(target.iterdir())


def test_a_failed_write_leaves_no_files(llama, tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("famjax.convert.folder.write_model", full)
    assert "No space left on device" in error_line(capsys, llama, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_model_with_other_logits_is_rejected(llama, tmp_path, capsys, monkeypatch):
    def other(*args, **kwargs):
        model = load_weights(*args, **kwargs)
        scale = model.norm.scale
        scale[...] = scale[...] * 1.01
        return model

    from famjax.convert.folder import load_weights

    monkeypatch.setattr("famjax.convert.folder.load_weights", other)
    assert "the logits differ from Hugging Face's by" in error_line(capsys, llama, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def mistral(llama, tmp_path_factory):
    """Return a tiny random Mistral whose window exceeds the shortest text of the self-check."""
    folder = tmp_path_factory.mktemp("mistral")
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        sliding_window=100,
    )
    model = transformers.MistralForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((llama / name).read_bytes())
    return folder


def test_the_self_check_covers_tokens_past_the_window(mistral, tmp_path, capsys, monkeypatch):
    assert main(["convert", str(mistral), str(tmp_path / "right")]) == 0
    assert "of their range (float32, 160 tokens)" in capsys.readouterr().err

    def wrong(hf, folder):
        return replace(parse_model(hf, folder), window=99)

    from famjax.convert.folder import parse_model

    monkeypatch.setattr("famjax.convert.folder.parse_model", wrong)
    said = error_line(capsys, mistral, tmp_path / "wrong")
    assert "the logits differ from Hugging Face's by" in said
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize(
    ("model", "length", "said"),
    [
        ({"mixer": "full", "capacity": 2048}, 128, "128 tokens"),
        ({"mixer": "full", "capacity": 60}, 60, "60 tokens"),
        ({"mixer": "swa,full", "window": 1024, "capacity": 9000}, 1088, "1,088 tokens"),
        ({"mixer": "swa", "window": 4096}, 4160, "4,160 tokens"),
        (
            {"mixer": "swa", "window": 5000},
            4160,
            "4,160 tokens, not more than the window of 5,000",
        ),
        (
            {"mixer": "swa,full", "window": 512, "capacity": 512},
            512,
            "512 tokens, not more than the window of 512",
        ),
    ],
)
def test_length_of_the_self_check(model, length, said):
    config = ModelConfig(vocab_size=99, **model)
    assert selfcheck.compared_tokens(config) == length
    assert selfcheck.describe(config) == said


def test_a_missing_source_framework_is_reported(llama, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(optional.importlib.util, "find_spec", lambda name: None)
    assert main(["convert", str(llama), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert "not compared with Hugging Face's code: torch and transformers not installed; " in said
    assert "pip install torch transformers\n" in said


@pytest.mark.parametrize(("key", "value"), [("head_dim", 0), ("hidden_act", None)])
def test_errors_of_transformers_are_one_line(copy, tmp_path, capsys, key, value):
    config = json.loads((copy / "config.json").read_text()) | {key: value}
    (copy / "config.json").write_text(json.dumps(config))
    assert main(["convert", str(copy), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"famjax: {copy}: transformers cannot read it (")
    assert not (tmp_path / "out").exists()


def test_deviation_of_constant_logits():
    zeros = np.zeros((2, 3), np.float32)
    assert selfcheck.deviation(zeros, zeros).relative == 0
    assert selfcheck.deviation(zeros + 1, zeros).relative > 1


def test_the_self_check_is_skipped_without_memory(monkeypatch):
    huge = ModelConfig(vocab_size=10**9)
    assert "a second copy of the model needs" in selfcheck.skip_reason(huge)
    # a model that fits, if the file cache is given back
    monkeypatch.setattr(selfcheck, "available_bytes", lambda: 10**9)
    assert selfcheck.skip_reason(ModelConfig(vocab_size=99)) == ""
    monkeypatch.setattr(selfcheck, "available_bytes", lambda: None)
    assert selfcheck.skip_reason(ModelConfig(vocab_size=99)) == ""


@pytest.mark.parametrize(
    "given",
    [
        ["--to", "bswa", "model.ngram_memory=8"],
        ["--to", "keep", "model.ngram_memory=2"],
        ["--to", "delta", "model.smeared_keys=true"],
    ],
    ids=" ".join,
)
def test_the_self_check_leaves_out_the_parts_that_were_added(llama, tmp_path, capsys, given):
    sizes = [] if "keep" in given else ["model.block_len=16"]
    assert main(["convert", str(llama), str(tmp_path / "out"), *given, *sizes]) == 0
    assert "equal Hugging Face's to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--to", "fma"], "fma"),
        (["--to", "fam", "--layers", "9"], "--layers 9: '9' is not a layer of 4"),
        (["--layers", "1"], "--layers 1: selects layers for --to; give --to as well"),
        (["--to", "fam", "model.width=64"], "model.width=64: the given weights have 32"),
        (
            ["data.batch=3"],
            "data.batch=3: only model.* can be set here; give the rest to famjax train",
        ),
        *(
            ([given], f"{given}: is set in famjax train: famjax train ... init=")
            for given in (
                "model.dropout.residual=0.1",
                "model.remat=block",
                "model.feedback.sweeps=2",
            )
        ),
        (
            ["model.lora.rank=8"],
            "model.lora.rank=8: adapters are added by famjax train: famjax train ... init=",
        ),
        (["model.arch.qk_norm=true"], "model.arch.qk_norm=True: the given weights"),
        (["--tokenizer", "nowhere"], "data.tokenizer=nowhere: No such file"),
        (["--to", "bswa", "model.block_len=0"], "model.block_len=0: must be at least 1"),
    ],
)
def test_mistakes_are_one_line_errors(llama, tmp_path, capsys, more, said):
    assert said in error_line(capsys, llama, tmp_path / "out", *more)
    assert not list(tmp_path.iterdir())


def test_a_block_is_as_long_as_it_was_given(copy, tmp_path, capsys):
    """Also in a model whose other layers have full attention, which limits the rows."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    given = ["--to", "bswa", "--layers", "0"]
    assert main(["convert", str(copy), str(tmp_path / "out"), *given, "model.block_len=2048"]) == 0
    config = read_run_config(tmp_path / "out")
    assert (config.model.block_len, config.data.length) == (2048, 2048)
    said = error_line(capsys, copy, tmp_path / "more", *given, "model.block_len=4097")
    assert "model.block_len=4097: the model holds 4096 tokens" in said


def test_a_tokenizer_larger_than_the_embedding_is_rejected(copy, tmp_path, capsys):
    tokenizer = tokenizers.Tokenizer.from_file(str(copy / "tokenizer.json"))
    tokenizer.add_tokens(["more", "and more", "than", "there are rows"])
    tokenizer.save(str(copy / "tokenizer.json"))
    said = error_line(capsys, copy, tmp_path / "out")
    assert said.startswith("model.vocab_size=260: tokenizer ")
    assert "has 262 tokens" in said


# selection of layers

GEMMA = ModelConfig(layers=6, mixer="swa,swa,full", vocab_size=9)
MISTRAL = ModelConfig(layers=4, mixer="swa", vocab_size=9)


@pytest.mark.parametrize(
    ("model", "layers", "expected"),
    [
        (GEMMA, "", "swa,swa,fam,swa,swa,fam"),
        (GEMMA, "0", "fam,swa,full,swa,swa,full"),
        (MISTRAL, "", "fam,fam,fam,fam"),
        (MISTRAL, "1::2", "swa,fam,swa,fam"),
        (MISTRAL, "-1:,0", "fam,swa,swa,fam"),
    ],
)
def test_layers_are_selected_by_pattern(model, layers, expected):
    assert ",".join(layer_mixers(replace_attention(model, "fam", layers))) == expected


def test_layers_with_another_rope_base_are_rejected():
    gemma = replace(GEMMA, arch=ArchConfig(local_rope_base=1e4), rope_base=1e6)
    check_compatible(gemma, replace_attention(gemma, "fam"))
    for new in (replace_attention(gemma, "fam", "0"), replace_attention(gemma, "swa")):
        with pytest.raises(UserError, match="have RoPE base 10000 and the others 1e"):
            check_compatible(gemma, new)


def test_a_tokenizer_with_other_ids_is_rejected(llama, copy, tmp_path, capsys):
    said = "but '!' in the tokenizer of "
    assert said in error_line(capsys, llama, tmp_path / "out", "--tokenizer", "bytes")
    (copy / "chat_template.jinja").write_text("{{ messages[0].content }}")
    given = ["--tokenizer", str(copy)]
    assert main(["convert", str(llama), str(tmp_path / "run"), *given]) == 0
    assert open_run(tmp_path / "run").tokenizer.chat_template
    line = error_line(capsys, tmp_path / "run", tmp_path / "out", "--tokenizer", "bytes")
    assert line.startswith("--tokenizer bytes: id 0 is '\\x00', but '!' in the tokenizer of ")
    assert not (tmp_path / "out").exists()
    # famjax cannot read the folder's own
    (copy / "tokenizer.json").write_text("{}")
    assert main(["convert", str(copy), str(tmp_path / "out"), "--tokenizer", "bytes"]) == 0


def test_a_folder_without_a_tokenizer_is_reported(copy, tmp_path, capsys):
    (copy / "tokenizer.json").unlink()
    assert "has no tokenizer.json and no tokenizer.model" in error_line(
        capsys, copy, tmp_path / "out"
    )
    assert main(["convert", str(copy), str(tmp_path / "out"), "--tokenizer", "bytes"]) == 0


def test_unused_tokens_may_exceed_the_embedding(copy, tmp_path):
    tokenizer = tokenizers.Tokenizer.from_file(str(copy / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>", "<more>", "<than rows>"])
    tokenizer.save(str(copy / "tokenizer.json"))
    assert main(["convert", str(copy), str(tmp_path / "out")]) == 0
    run = open_run(tmp_path / "out")
    assert (run.tokenizer.vocab_size, run.config.model.vocab_size) == (261, 260)


def test_folders_of_the_wrong_kind_are_rejected(llama, tmp_path, capsys):
    assert main(["eval", str(llama)]) == 2
    assert "text:holdout: the run is at step 0" in capsys.readouterr().err
    assert main(["convert", str(llama), str(tmp_path / "run")]) == 0
    with pytest.raises(UserError, match="is a famjax run; famjax train"):
        load_pretrained(tmp_path / "run")


def test_an_existing_folder_is_not_changed(llama, tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine").write_text("x")
    assert main(["convert", str(llama), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out.partial" / "mine").read_text() == "x"
    mode = (tmp_path / "out.partial").stat().st_mode
    assert (tmp_path / "out").stat().st_mode == mode


def test_a_model_must_fit_one_device(llama, tmp_path, monkeypatch):
    used = []
    for module in ("convert.load", "train.run"):
        monkeypatch.setattr(
            f"famjax.{module}.check_model_fits", lambda model, devices, *only: used.append(devices)
        )
    assert main(["convert", str(llama), str(tmp_path / "out")]) == 0
    open_run(tmp_path / "out")
    assert used == [1, 1]


def test_patterns_are_shortened():
    assert replace_attention(GEMMA, "fam").mixer == "swa,swa,fam"
    assert replace_attention(MISTRAL, "fam", "::2").mixer == "fam,swa"
    assert replace_attention(MISTRAL, "keep") == MISTRAL


@pytest.mark.parametrize("text", ["x", "4", "-5", "1:2:3:4", "5:", "1,", "1.5"])
def test_invalid_layers_are_rejected(text):
    with pytest.raises(UserError, match="--layers"):
        parse_layers(text, 4)


@pytest.mark.long
def test_conversion_keeps_the_number_of_parameters(llama, tmp_path):
    target = tmp_path / "hybrid"
    assert main(["convert", str(llama), str(target), "--to", "bswa", "--layers", "::2"]) == 0
    hybrid = open_run(target)
    assert hybrid.config.model.mixer == "bswa,full"
    _, whole = load_pretrained(llama)
    total = sum(a.size for a in jax.tree.leaves(nnx.state(whole, nnx.Param)))
    assert sum(a.size for a in jax.tree.leaves(nnx.state(hybrid.model, nnx.Param))) == total
