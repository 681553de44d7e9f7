"""Transformer to RNN (T2R): converted layers, other weights unchanged, training and stepping."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
import small
import torch
import transformers
from flax import nnx

from famjax.cli.main import main
from famjax.config.derived import layer_mixers
from famjax.config.schema import ArchConfig, EncoderConfig, LinearConfig, LoraConfig, ModelConfig
from famjax.convert.surgery import replace_attention
from famjax.core.errors import UserError
from famjax.experiment.load import load_config
from famjax.export import export as exporting
from famjax.models.fold_feature_maps import (
    fold_feature_maps,
    folding_notes,
    why_not_foldable,
)
from famjax.models.language_model import LanguageModel
from famjax.models.remap_checks import check_compatible
from famjax.models.remap_params import canonical_name, remap_params
from famjax.parallel import sharding
from famjax.train.checkpoint import Checkpoints
from famjax.train.loop import train
from famjax.train.run import initial_weights, open_run

TOKENS = np.random.default_rng(0).integers(0, 258, (2, 32))


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("t2r")


@pytest.fixture(scope="module")
def llama(work_dir):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=258,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(work_dir / "llama")
    return work_dir / "llama"


@pytest.fixture(scope="module")
def gpt2(work_dir):
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=258, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(work_dir / "gpt2")
    return work_dir / "gpt2"


@pytest.fixture(scope="module")
def hybrid_folder(llama):
    """Return a converted Llama whose top layer of four is unchanged."""
    return convert(llama, "hybrid", "--keep-every", "4", "--feature-size", "6")


@pytest.fixture(scope="module")
def text(work_dir):
    """Return the options for the training data."""
    files = small.texts(work_dir / "texts")
    return [f"data.files={files}", "data.length=16", "data.batch=2", "data.holdout=0"]


def convert(source, name, *more):
    target = source.parent / name
    given = ["--to", "t2r", "--tokenizer", "bytes", "model.block_len=8", *more]
    assert main(["convert", str(source), str(target), *given]) == 0
    return target


def train_from(init, text, name, *more):
    """Train two steps from a folder, on one of the eight devices."""
    few = ["train.steps=2", "optimizer.warmup_steps=0", "train.log_every=2"]
    config = load_config("text_fam", [f"init={init}", *text, *few, *more])
    with pytest.MonkeyPatch.context() as patch:
        one = functools.partial(sharding.make_mesh, devices=jax.devices()[:1])
        patch.setattr(sharding, "make_mesh", one)
        return train(config, init.parent / name, quiet=True)


def error_line(capsys, *argv):
    capsys.readouterr()
    assert main(["convert", *map(str, argv)]) == 2
    return capsys.readouterr().err.splitlines()[-1].removeprefix("famjax: ")


def weights(model):
    """Return each layer's parameters by name and index, and all others."""
    names = len(model.stack.layers)
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model, nnx.Param)):
        name, place = canonical_name(path)
        if place is None:
            found[name, None] = np.asarray(leaf)
            continue
        for i, layer in enumerate(np.asarray(leaf)):
            found[name, place + i * names] = layer
    return found


def logits(model, tokens=TOKENS):
    graph, params = nnx.split(model)

    @jax.jit
    def read(params, tokens):
        model = nnx.merge(graph, params)
        return model(tokens, model.init_state(len(tokens)))[0]

    return np.asarray(read(params, tokens))


def step_logits(model, tokens):
    """Return logits computed token by token."""
    graph, params = nnx.split(model)

    @jax.jit
    def step(params, state, token):
        return nnx.merge(graph, params).step(token, state)

    state, said = model.init_state(len(tokens)), []
    for i in range(tokens.shape[1]):
        found, state = step(params, state, tokens[:, i : i + 1])
        said.append(np.asarray(found))
    return np.concatenate(said, 1)


def assert_near(ours, theirs, share=1e-5):
    return np.abs(ours - theirs).max() < share * np.ptp(theirs)


# conversion


def test_converting_a_llama_keeps_every_weight(llama, hybrid_folder, work_dir):
    model = open_run(hybrid_folder).config.model
    assert model.mixer == "linear,linear,linear,full"
    assert model.linear.features == 6
    assert main(["convert", str(llama), str(work_dir / "kept"), "--tokenizer", "bytes"]) == 0
    before, after = (
        weights(open_run(work_dir / "kept").model),
        weights(open_run(hybrid_folder).model),
    )
    new = after.keys() - before.keys()
    assert not before.keys() - after.keys()
    assert all((after[name] == before[name]).all() for name in before)
    assert {name for name, _ in new} == {"layer.mixer.map.kernel", "layer.mixer.map.bias"}
    assert {layer for _, layer in new} == {0, 1, 2}
    kernels = [after["layer.mixer.map.kernel", i] for i in range(3)]
    assert kernels[0].shape == (2, 4, 6)
    assert len({kernel.tobytes() for kernel in kernels}) == 3


def test_suggested_commands_work(llama, work_dir, text, capsys):
    capsys.readouterr()
    target = convert(llama, "next", "--keep-every", "2")
    said = capsys.readouterr().out.partition("next: famjax train finetune ")[2].split()
    assert said[:2] == [f"init={target}", "train.rpo=false"]
    config = load_config("finetune", [*said[:-1], *text, "data.repeat_len=0"])
    assert config.model.linear.features == 32


def test_initial_maps_depend_only_on_their_layer(llama, hybrid_folder, work_dir):
    whole = convert(llama, "whole", "model.linear.features=6")
    assert open_run(whole).config.model.mixer == "linear"
    first, second = weights(open_run(hybrid_folder).model), weights(open_run(whole).model)
    for name in first:
        assert (first[name] == second[name]).all(), name


@pytest.mark.long
def test_the_source_may_be_a_run(lora, work_dir):
    tuned_run = open_run(lora)
    again = convert(lora, "again", "--layers", "3")
    run = open_run(again)
    assert run.config.model.mixer == "linear"
    assert (run.config.model.lora.rank, run.config.init, run.step) == (0, "", 0)
    assert (again / "hf_config.json").exists()
    expected = weights(tuned_run.merge_adapters().model)
    found = weights(run.model)
    assert all((found[name] == expected[name]).all() for name in expected)
    assert {name for name in found if name not in expected} == {
        ("layer.mixer.map.kernel", 3),
        ("layer.mixer.map.bias", 3),
    }


@pytest.mark.long
def test_training_from_a_folder_converts_in_the_same_way(llama, work_dir, text):
    main(["convert", str(llama), str(work_dir / "teacher"), "--tokenizer", "bytes"])
    mixer = ["model.mixer=linear,bswa,full,fam", "model.block_len=16", "model.linear.features=6"]
    config = load_config("text_fam", [f"init={work_dir / 'teacher'}", *text, *mixer])
    params, *_ = initial_weights(config, work_dir / "none")
    student = LanguageModel(config.model, rngs=nnx.Rngs(1))
    nnx.update(student, params)
    teacher = open_run(work_dir / "teacher")
    before, after = weights(teacher.model), weights(student)
    assert all((after[name] == before[name]).all() for name in before)
    assert {name for name, _ in after.keys() - before.keys()} == {
        "stack.prompt",
        "layer.mixer.map.kernel",
        "layer.mixer.map.bias",
        "layer.mixer.memory_gate.weight",
        "layer.mixer.memory_gate.bias",
    }
    back = remap_params(params, config.model, teacher.config.model)
    for ours, theirs in zip(
        jax.tree.leaves(back), jax.tree.leaves(nnx.state(teacher.model, nnx.Param)), strict=True
    ):
        assert (ours == theirs).all()


# training


@pytest.fixture(scope="module")
def lora(hybrid_folder, text, work_dir):
    train_from(hybrid_folder, text, "lora", "model.lora.rank=2", "optimizer.learning_rate=0.1")
    return work_dir / "lora"


@pytest.fixture(scope="module")
def rnn(gpt2):
    """Return a GPT-2 with a linear layer and a full one."""
    return convert(gpt2, "gpt2-rnn", "--keep-every", "2", "--feature-size", "4")


@pytest.fixture(scope="module")
def tuned_run(rnn, text):
    return train_from(rnn, text, "gpt2-tuned")


def changed_names(before, after):
    return {name for name, _ in before if not (before[name, _] == after[name, _]).all()}


MAPS = {"layer.mixer.map.kernel", "layer.mixer.map.bias"}


@pytest.mark.slow
def test_all_weights_are_trained_and_steps_equal_calls(rnn, tuned_run):
    before = weights(open_run(rnn).model)
    # softmax is invariant to key biases
    still = {"layer.mixer.qkv.k.bias"}
    assert changed_names(before, weights(tuned_run.model)) | still == {name for name, _ in before}
    assert assert_near(step_logits(tuned_run.model, TOKENS), logits(tuned_run.model))


@pytest.mark.long
@pytest.mark.parametrize("only", ["maps", pytest.param("not_maps", marks=pytest.mark.slow)])
def test_frozen_parameters_do_not_change(rnn, text, only):
    name, given = f"gpt2-{only}", [f"train.only={only}"]
    run = train_from(rnn, text, name, *given, "train.steps=1", "train.checkpoint_every=1")
    run = train_from(rnn, text, name, *given)  # and continues
    before, after = weights(open_run(rnn).model), weights(run.model)
    moved = changed_names(before, after)
    assert moved == MAPS if only == "maps" else not moved & MAPS and len(moved) > 10
    opened = weights(open_run(rnn.parent / name).model)
    assert all((opened[key] == after[key]).all() for key in after)
    folder = Checkpoints(rnn.parent / name / "checkpoints").path(2)
    saved = (folder / "tree.json").read_text()
    assert ("map" in saved) == (only == "maps")
    assert ("embedding" in saved) == (only != "maps")


@pytest.mark.long
def test_maps_are_trained_together_with_adapters(hybrid_folder, lora):
    before, after = weights(open_run(hybrid_folder).model), weights(open_run(lora).model)
    assert changed_names(before, after) == MAPS
    assert any(name.endswith("lora.b") for name, _ in after)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["model.mixer=full"], "train.only=maps: model.mixer=full has no feature maps; give"),
        (["model.linear.map=elu"], "train.only=maps: model.linear.map=elu has no weights; take"),
        (["model.lora.rank=2"], "train.only=maps does not train adapters, model.lora.rank="),
    ],
)
def test_invalid_freezing_is_rejected(more, said):
    with pytest.raises(UserError) as caught:
        load_config("text_fam", ["model.mixer=linear", "train.only=maps", *more])
    assert str(caught.value).startswith(said)


def test_frozen_parameters_need_a_source(tmp_path):
    config = load_config("text_fam", ["model.mixer=linear", "train.only=not_maps"])
    with pytest.raises(UserError, match=r"train\.only=not_maps: what is not trained is taken from"):
        train(config, tmp_path / "run", quiet=True)
    assert not list(tmp_path.iterdir())


# feature maps folded into the projections

SMALL = ModelConfig(
    vocab_size=258,
    layers=2,
    width=16,
    heads=4,
    kv_heads=2,
    mlp_width=16,
    mixer="linear,full",
    capacity=64,
    linear=LinearConfig(features=4, rope=False),
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "scale"),
    [
        ("relu", 9.0),
        pytest.param("cos", 0.0, marks=pytest.mark.long),
        *(pytest.param(kind, 0.0, marks=pytest.mark.slow) for kind in ("learned_elu", "tanh")),
    ],
)
def test_folded_maps_compute_the_same_function(kind, scale):
    arch = ArchConfig(qkv_bias=True, query_scale=scale)
    config = replace(SMALL, linear=replace(SMALL.linear, map=kind), arch=arch)
    assert why_not_foldable(config) == {"causal": ""}
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    key = jax.random.key(0)
    params = jax.tree.map(
        lambda a: a + 0.1 * jax.random.normal(key, a.shape), nnx.state(model, nnx.Param)
    )
    nnx.update(model, params)
    folded = fold_feature_maps(model, config)
    names = {name for name, _ in weights(folded)}
    assert not names & MAPS
    assert weights(folded)["layer.mixer.qkv.q.kernel", 0].shape == (16, 4, 4)
    assert weights(folded)["layer.mixer.qkv.q.kernel", 1].shape == (16, 4, 4)
    assert assert_near(logits(folded), logits(model))
    assert assert_near(step_logits(folded, TOKENS[:, :8]), logits(model)[:, :8])
    ours, theirs = (jax.eval_shape(lambda m=m: m.init_state(2)) for m in (folded, model))
    assert ours == theirs
    # the model itself is unchanged
    assert {name for name, _ in weights(model)} >= MAPS


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"linear": LinearConfig(features=4)},
            "rotated before the map; train with model.linear.rope",
        ),
        ({"arch": ArchConfig(qk_norm=True)}, "normalized before the map (model.arch.qk_norm=true)"),
        (
            {"linear": LinearConfig("elu", rope=False)},
            "model.linear.map=elu is not a function of W",
        ),
        ({"lora": LoraConfig(rank=1)}, "the adapters are not merged"),
        ({"linear": LinearConfig(features=64, rope=False)}, "the projections would grow"),
    ],
)
def test_unfoldable_maps_have_a_reason(change, said):
    assert said in why_not_foldable(replace(SMALL, **change))["causal"]
    still = replace(SMALL, linear=LinearConfig(features=4), arch=NOT_ROTATED)
    assert why_not_foldable(still) == {"causal": ""}
    assert why_not_foldable(replace(SMALL, mixer="full")) == {}


def test_maps_of_causal_and_of_cross_attention_are_judged_apart():
    cross = EncoderConfig(layers=1, cross="linear", features=2)
    # rotations are of causal attention alone
    rotated = why_not_foldable(replace(SMALL, linear=LinearConfig(features=4), encoder=cross))
    assert "rotated" in rotated["causal"]
    assert rotated["cross"] == ""
    assert why_not_foldable(replace(SMALL, mixer="full", encoder=cross)) == {"cross": ""}
    large = why_not_foldable(replace(SMALL, encoder=replace(cross, features=64)))
    grows = "the projections would grow, model.encoder.features=64 for heads of 4"
    assert large == {"causal": "", "cross": grows}
    assert folding_notes(replace(SMALL, encoder=replace(cross, features=64))) == [
        f"feature maps of cross attention are not folded into the projections: {grows}"
    ]


NOT_ROTATED = ArchConfig(rotary_fraction=0.0)


@pytest.mark.slow
def test_a_trained_gpt2_is_folded_for_inference(rnn, tuned_run, capsys, tmp_path):
    used = tuned_run.with_folded_maps()
    assert not {name for name, _ in weights(used.model)} & MAPS
    assert assert_near(logits(used.model), logits(tuned_run.model))
    folder = str(rnn.parent / "gpt2-tuned")
    capsys.readouterr()
    assert main(["generate", folder, "--prompt", "a", "--max-tokens", "3"]) == 0
    said = exporting.export(folder, tmp_path / "out", "stablehlo")
    assert said[0].startswith("compared with feature maps folded into the projections: logits")
    assert exporting.export(folder, tmp_path / "run", "orbax")
    assert {name for name, _ in weights(open_run(tmp_path / "run").model)} >= MAPS


@pytest.mark.long
def test_adapters_are_merged_before_maps_are_folded(lora):
    run = open_run(lora)
    assert run.with_folded_maps() is run  # a Llama's are rotated
    config = replace(SMALL, lora=LoraConfig(rank=2))
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    params = jax.tree.map(lambda a: a + 0.1, nnx.state(model, nnx.Param))
    nnx.update(model, params)
    given = replace(run, model=model, config=replace(run.config, model=config))
    used = given.with_folded_maps()
    assert not any("lora" in name for name, _ in weights(used.model))
    assert assert_near(logits(used.model), logits(model))


# invalid conversions


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--feature-size", "0"], "--feature-size 0: must be at least 1"),
        (["model.linear.features=0"], "model.linear.features=0: must be at least 1"),
        (
            ["--feature-size", "8", "model.linear.features=8"],
            "--feature-size 8 and model.linear.features=8: are the same; give one of them",
        ),
        (
            ["--feature-size", "8", "model.linear.map=elu"],
            "model.linear.features: has no effect with model.linear.map=elu",
        ),
        (["--keep-every", "5"], "--keep-every 5: must be from 2 to the model's 4 layers"),
        (["--keep-every", "1"], "--keep-every 1: must be from 2 to the model's 4 layers"),
        (["--keep-every", "2", "--layers", "0"], "--layers 0 and --keep-every 2: both select"),
        (["--layers", "4"], "--layers 4: '4' is not a layer of 4"),
        (["model.fam_len=x"], "model.fam_len=x: must be a whole number"),
        (["model.linear.map=rleu"], "did you mean 'relu'"),
    ],
)
def test_mistakes_are_one_line_errors(llama, tmp_path, capsys, more, said):
    given = ["--to", "t2r", "--tokenizer", "bytes", "model.block_len=8", *more]
    assert said in error_line(capsys, llama, tmp_path / "out", *given)
    assert not list(tmp_path.iterdir())


def test_flags_without_their_layers_are_rejected(llama, tmp_path, capsys):
    out = tmp_path / "out"
    given = ["--to", "bswa", "--tokenizer", "bytes"]
    said = error_line(capsys, llama, out, *given, "--feature-size", "8")
    assert said == "--feature-size 8: is for linear attention only; add --to t2r"
    said = error_line(capsys, llama, out, *given, "model.linear.rope=false")
    assert said.startswith("model.linear.rope: has no effect with model.mixer=bswa")
    said = error_line(capsys, llama, out, "--tokenizer", "bytes", "--keep-every", "2")
    assert said == "--keep-every 2: selects layers for --to; give --to as well"


def test_learned_maps_are_not_lost(hybrid_folder, tmp_path, capsys):
    said = error_line(capsys, hybrid_folder, tmp_path / "out", "model.linear.map=tanh")
    assert said.startswith("model.linear.map=tanh: the given feature maps have relu")
    said = error_line(capsys, hybrid_folder, tmp_path / "out", "--to", "t2r", "--feature-size", "9")
    assert said.startswith("model.linear.features=9: the given feature maps have 6")


GEMMA2 = ModelConfig(
    layers=4, mixer="swa,full", vocab_size=9, arch=ArchConfig(attention_cap=50.0, qk_norm=True)
)


def test_local_layers_with_another_rope_base_are_rejected():
    gemma = replace(GEMMA2, arch=ArchConfig(local_rope_base=1e4), rope_base=1e6)
    check_compatible(gemma, replace_attention(gemma, "t2r"))
    whole = replace_attention(gemma, "t2r", ":")
    with pytest.raises(UserError, match="layer 0 changes from swa to linear") as caught:
        check_compatible(gemma, whole)
    assert "or set model.linear.rope=false" in str(caught.value)
    check_compatible(gemma, replace(whole, linear=LinearConfig(rope=False)))


def test_a_cap_of_scores_is_dropped_with_its_layers():
    swapped = replace_attention(GEMMA2, "t2r")
    check_compatible(GEMMA2, swapped)
    assert swapped.mixer == "swa,linear"


def test_other_stacks_are_rejected():
    with pytest.raises(UserError, match=r"--to t2r: model\.stack=lstm has no mixers"):
        replace_attention(ModelConfig(stack="lstm", block_len=1), "t2r")


@pytest.mark.parametrize(
    ("layers", "every", "expected"),
    [(8, 4, "LLLfLLLf"), (6, 4, "LfLLLf"), (5, 2, "fLfLf"), (4, 4, "LLLf")],
)
def test_every_nth_layer_from_the_top_is_unchanged(layers, every, expected):
    model = replace_attention(ModelConfig(layers=layers, mixer="full"), "t2r", keep_every=every)
    short = {"linear": "L", "full": "f"}
    assert "".join(short[name] for name in layer_mixers(model)) == expected
