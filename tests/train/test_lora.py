"""LoRA: initially the identity, only adapters are trained, merging keeps the function."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from flax import nnx
from small import compiled_once  # noqa: F401

from famjax.config.resolved import resolve_model
from famjax.config.schema import LoraConfig, ModelConfig
from famjax.core.errors import UserError
from famjax.experiment.load import load_config, override
from famjax.layers import lora
from famjax.layers.dropout import DropoutKey
from famjax.models.language_model import LanguageModel
from famjax.models.remap_params import merge_adapters, remap_params
from famjax.parallel.sharding import parameter_shardings, path_name
from famjax.train.checkpoint import Checkpoints
from famjax.train.loop import train
from famjax.train.partition import fingerprint, partition_trainable, with_dropout_keys
from famjax.train.program import make_program
from famjax.train.resolve import resolve
from famjax.train.run import initial_weights, open_run

TOKENS = np.random.default_rng(0).integers(0, 256, (2, 64))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Return a run with full attention."""
    folder = tmp_path_factory.mktemp("base")
    config = small.config(folder / "texts")
    more = ["train.steps=3", "model.mixer=full", "model.capacity=2048", "model.layers=2"]
    # one body is compiled for both layers
    more += ["model.scan_layers=true"]
    with small.shared_programs():
        train(override(config, more), folder / "base", quiet=True)
    return folder / "base"


def config_with_adapters(base, *more):
    """Return the config of a FAM model with adapters on that run."""
    given = [f"init={base}", "model.mixer=fam", "model.lora.rank=4", "train.steps=4"]
    return load_config(str(base / "config.json"), [*given, *more])


def adapter_config(base):
    return config_with_adapters(base, "optimizer.learning_rate=0.1", "model.lora.dropout=0.2")


@pytest.fixture(scope="module")
def adapter_run(base):
    """Return an uninterrupted run of `adapter_config` and its folder."""
    folder = base.parent / "adapted"
    with small.shared_programs():
        return train(adapter_config(base), folder, quiet=True), folder


def logits(model):
    return np.asarray(_forward(*nnx.split(model)))


@functools.partial(jax.jit, static_argnums=0)
def _forward(graph, state):
    model = nnx.merge(graph, state)
    return model(TOKENS, model.init_state(2))[0]


def params_by_name(model):
    params = nnx.state(model, nnx.Param)
    return {path_name(p): a for p, a in jax.tree_util.tree_flatten_with_path(params)[0]}


@pytest.mark.parametrize("on", ["*", "attention.[qv]", "mlp.down"])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_initial_adapters_do_not_change_a_bit(base, on, dtype):
    given = open_run(base)
    config = replace(given.config.model, dtype=dtype)
    plain = LanguageModel(config, rngs=nnx.Rngs(0))
    nnx.update(plain, nnx.state(given.model, nnx.Param))
    with_adapters = replace(config, lora=LoraConfig(rank=4, on=on))
    model = LanguageModel(with_adapters, rngs=nnx.Rngs(1))
    nnx.update(model, nnx.state(given.model, nnx.Param))
    assert (logits(model) == logits(plain)).all()
    places = {name.split("/")[-3] for name in params_by_name(model) if name.endswith("lora/a")}
    expected = {"*": {"q", "k", "v", "out", "gate", "up", "down"}, "attention.[qv]": {"q", "v"}}
    assert places == expected.get(on, {"down"})


def test_only_adapters_and_the_memory_are_trained(base, adapter_run):
    run, folder = adapter_run
    before = remap_params(
        nnx.state(open_run(base).model, nnx.Param),
        open_run(base).config.model,
        replace(run.config.model, lora=LoraConfig()),
    )
    frozen = {path_name(p): a for p, a in jax.tree_util.tree_flatten_with_path(before)[0]}
    for name, after in params_by_name(run.model).items():
        if name.endswith("lora/b"):
            assert np.abs(after).max() > 0
        elif name == "stack/prompt" or "memory_gate" in name:
            assert (np.asarray(after) != np.asarray(frozen[name])).any()
        elif not name.endswith("lora/a"):
            assert (np.asarray(after) == np.asarray(frozen[name])).all(), name
    # neither checkpoint nor optimizer stores frozen parameters
    saved = (folder / "checkpoints" / "000000004" / "tree.json").read_text()
    assert "kernel/value" not in saved
    assert "embedding" not in saved


def test_open_run_loads_adapters_with_their_base(adapter_run):
    run, folder = adapter_run
    assert (logits(open_run(folder).model) == logits(run.model)).all()


def test_merged_adapters_compute_the_same_function(adapter_run):
    run, _ = adapter_run
    params, config = merge_adapters(nnx.state(run.model, nnx.Param), run.config.model)
    merged = LanguageModel(config, rngs=nnx.Rngs(0))
    nnx.update(merged, params)
    assert "lora" not in "".join(params_by_name(merged))
    ours, theirs = logits(merged), logits(run.model)
    assert np.abs(ours - theirs).max() < 1e-5 * np.ptp(theirs)
    plain = open_run(run.config.init)
    assert np.abs(ours - logits(plain.model)).max() > 1e-2 * np.ptp(theirs)


@pytest.mark.slow
def test_adapters_trained_with_dropout_can_be_merged(base, tmp_path):
    more = ["model.dropout.residual=0.1", "train.steps=1", "optimizer.warmup_steps=0"]
    run = train(config_with_adapters(base, *more), tmp_path / "dropped", quiet=True)
    ours, theirs = logits(run.merge_adapters().model), logits(run.model)
    assert np.abs(ours - theirs).max() < 1e-5 * np.ptp(theirs)
    params, *_ = initial_weights(
        config_with_adapters(tmp_path / "dropped", *more), tmp_path / "next"
    )
    initial, trained = (np.asarray(a["embedding"][...]) for a in (params, nnx.state(run.model)))
    assert (initial == trained).all()


@pytest.mark.usefixtures("compiled_once")
def test_resume_is_bitwise_equal(base, adapter_run, tmp_path):
    """Equal bit for bit, with dropout."""
    whole, _ = adapter_run
    config = adapter_config(base)
    stopped = train(override(config, ["train.steps=2"]), tmp_path / "cut", quiet=True)
    again = train(config, tmp_path / "cut", quiet=True)
    found, before = params_by_name(again.model), params_by_name(stopped.model)
    for name, expected in params_by_name(whole.model).items():
        assert (np.asarray(found[name]) == np.asarray(expected)).all(), name
    assert any((np.asarray(found[name]) != np.asarray(before[name])).any() for name in found)


@pytest.mark.usefixtures("compiled_once")
def test_adapters_of_another_base_are_rejected(base, adapter_run, tmp_path):
    _, folder = adapter_run
    other = tmp_path / "other"
    config = open_run(base).config
    train(override(config, ["train.steps=2"]), other, quiet=True)  # of 3 steps
    moved = tmp_path / "adapters"
    moved.mkdir()
    (moved / "checkpoints").symlink_to(folder / "checkpoints")
    text = (folder / "config.json").read_text()
    (moved / "config.json").write_text(text.replace(str(base), str(other)))
    with pytest.raises(UserError, match="was trained on other weights than"):
        open_run(moved)
    (moved / "config.json").write_text(text.replace(str(base), str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match="nowhere: there is no such folder; if it was moved"):
        open_run(moved)
    # one that is refused when it would continue can still be opened
    refused = Path(shutil.copytree(folder, tmp_path / "refused"))
    with pytest.raises(UserError, match="was trained on other weights than"):
        train(replace(open_run(folder).config, init=str(other)), refused, quiet=True)
    assert open_run(refused).step == open_run(folder).step


@pytest.mark.long
def test_nested_adapters_open_on_any_mesh(adapter_run, tmp_path):
    """Trained on eight devices and opened on one."""
    _, folder = adapter_run
    config = load_config(
        str(folder / "config.json"), [f"init={folder}", "train.steps=2", "data.batch=4"]
    )
    config = replace(config, mesh=replace(config.mesh, data=1, fsdp=4, tensor=2))
    run = train(config, tmp_path / "second", quiet=True)
    again = open_run(tmp_path / "second")
    assert np.abs(logits(again.model) - logits(run.model)).max() < 1e-4
    assert again.base != open_run(folder).base


@pytest.mark.slow
def test_a_moved_base_is_found(base, tmp_path, monkeypatch):
    monkeypatch.chdir(base.parent)
    config = replace(config_with_adapters(Path("base")), data=open_run(base).config.data)
    train(override(config, ["train.steps=1"]), tmp_path / "run", quiet=True)
    monkeypatch.chdir(tmp_path)
    open_run("run")  # from another working directory
    (tmp_path / "moved").symlink_to(base)
    moved = replace(config_with_adapters(tmp_path / "moved"), data=config.data)
    train(override(moved, ["train.steps=2"]), tmp_path / "run", quiet=True)
    assert open_run("run").config.init == str(tmp_path / "moved")


def test_dropout_differs_between_accumulated_parts(base):
    _, _, frozen = partition_trainable(*_with_dropout(base))
    first, second = (
        with_dropout_keys(frozen, jax.random.fold_in(jax.random.key(0), i)) for i in (0, 1)
    )
    for a, b in zip(jax.tree.leaves(first[1]), jax.tree.leaves(second[1]), strict=True):
        assert (a != b).any()


def _with_dropout(base):
    config = config_with_adapters(base, "model.lora.dropout=0.5").model
    return config, LanguageModel(config, rngs=nnx.Rngs(0))


def test_dtype_and_remat_come_from_the_config(base):
    given = [f"init={base}", "data.files=x", "data.length=64"]
    config = load_config("fam_1b", [*given, "data.repeat_len=0"])
    assert (config.model.dtype, config.model.remat) == ("bfloat16", "attention")
    assert config.model.width == open_run(base).config.model.width


def test_the_base_can_be_stored_in_bfloat16(base):
    config = config_with_adapters(base, "model.lora.base=bfloat16", "model.dtype=bfloat16")
    state = make_program(resolve(config, None, jax.device_count()), np.ones(258, np.int32)).start()
    assert {str(a.dtype) for a in jax.tree.leaves(state.frozen[0])} == {"bfloat16"}
    assert {str(a.dtype) for a in jax.tree.leaves(state.params)} == {"float32"}
    trained = sum(a.size for a in jax.tree.leaves(state.params))
    moments = sum(a.size for a in jax.tree.leaves(state.opt_state))
    assert moments < 2.1 * trained


def test_weights_are_narrow_before_the_first_state_is_made(base, tmp_path):
    """Else a device would hold them in both dtypes, with no buffer to reuse."""
    config = config_with_adapters(base, "model.lora.base=bfloat16", "model.dtype=bfloat16")
    weights, name, _ = initial_weights(config, tmp_path)
    assert name == open_run(base).fingerprint()
    program = make_program(resolve(config, None, jax.device_count()), np.ones(258, np.int32))
    state = jax.eval_shape(program.start)
    frozen = {path_name(p[1:]) for p, _ in jax.tree_util.tree_leaves_with_path(state.frozen[:1])}
    dtypes = {path_name(p): a.dtype for p, a in jax.tree_util.tree_leaves_with_path(weights)}
    assert {str(dtypes[path]) for path in frozen} == {"bfloat16"}
    assert {str(dtypes[path]) for path in dtypes.keys() - frozen} == {"float32"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # donated buffers that are not usable
        program.start(jax.device_put(weights, parameter_shardings(program.mesh, weights)))


def test_dropout_has_its_rate_and_is_off_in_inference():
    config = LoraConfig(rank=3, alpha=3.0, dropout=0.25)
    layer = lora.Lora("...d,dc->...c", (1000, 5), 1000, config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = jnp.eye(1000)
    layer.b[...] = jnp.ones((3, 5))
    graph, weights, keys = nnx.split(layer, nnx.Param, DropoutKey)
    apply_dropout = []
    for seed in (0, 1):
        _, new = with_dropout_keys((weights, keys), jax.random.key(seed))
        y = nnx.merge(graph, weights, new)(x)
        apply_dropout.append(np.asarray(y[:, 0] == 0))
    assert abs(apply_dropout[0].mean() - 0.25) < 0.05
    assert (apply_dropout[0] != apply_dropout[1]).any()
    still = replace(config, dropout=0.0)
    plain = lora.Lora("...d,dc->...c", (1000, 5), 1000, still, dtype=jnp.float32, rngs=nnx.Rngs(0))
    plain.b[...] = jnp.ones((3, 5))
    kept = ~apply_dropout[1]
    assert np.allclose(np.asarray(y)[kept] * 0.75, np.asarray(plain(x))[kept], rtol=1e-5)


def test_scale_is_alpha_over_rank():
    assert lora.scale(resolve_model(ModelConfig(lora=LoraConfig(rank=16))).lora) == 1
    assert lora.scale(LoraConfig(rank=16, alpha=8)) == 0.5
    assert lora.scale(LoraConfig(rank=16, alpha=8, rs=True)) == 2


def test_fingerprint_depends_on_every_value_and_its_position():
    a = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
    found = {
        fingerprint({"a": a}),
        fingerprint({"b": a}),
        fingerprint({"a": a[::-1]}),
        fingerprint({"a": a.reshape(3, 2)}),
        fingerprint({"a": a.at[1, 1].add(1e-6)}),
        fingerprint({"a": a.astype(jnp.bfloat16)}),
    }
    assert len(found) == 6
    assert fingerprint({"a": a}) == fingerprint({"a": a + 0})


def test_remap_params_copies_every_weight_of_each_layer(base):
    old = open_run(base)
    new = replace(old.config.model, mixer="bswa,fam")
    params = remap_params(nnx.state(old.model, nnx.Param), old.config.model, new)
    full = nnx.state(old.model, nnx.Param)["stack"]["layers"][0]["mixer"]["qkv"]["q"]["kernel"]
    for i, layer in params["stack"]["layers"].items():
        mixer = layer["mixer"].get("window", layer["mixer"])
        assert (mixer["qkv"]["q"]["kernel"][...][0] == full[...][i]).all()
    back = remap_params(params, new, old.config.model)
    for a, b in zip(
        jax.tree.leaves(back), jax.tree.leaves(nnx.state(old.model, nnx.Param)), strict=True
    ):
        assert (a == b).all()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["model.width=32"], "model.width=32: the given weights have 16"),
        (["model.arch.qk_norm=true"], "model.arch.qk_norm=True: the given weights have"),
        (["model.mlp_width=64"], "model.mlp_width=64: the given weights have 32"),
    ],
)
def test_weights_of_other_sizes_are_rejected(base, tmp_path, more, said):
    with pytest.raises(UserError, match=said):
        train(config_with_adapters(base, *more), tmp_path / "run", quiet=True)


def test_adapters_need_weights(tmp_path):
    with pytest.raises(UserError, match="adapters need weights to adapt; give init="):
        train(load_config("text_fam", ["model.lora.rank=2"]), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["init=/nowhere/run"], "init=/nowhere/run: there is no such folder"),
        (["init=/"], "init=/: has no config.json; give the folder of a run"),
        (
            ["model.lora.rank=2", "model.lora.on=attention.x"],
            "'attention.x' names no projection;",
        ),
        (
            ["model.lora.rank=2", "model.lora.on=mlp.gate", "model.mlp=gelu"],
            "'mlp.gate' names no projection",
        ),
        (["model.lora.dropout=1"], "model.lora.dropout=1.0: must be at least 0 and less than 1"),
    ],
)
def test_invalid_adapters_are_rejected(more, said):
    with pytest.raises(UserError) as caught:
        load_config("text_fam", more)
    assert said in str(caught.value)


def test_without_adapters_nothing_is_frozen(base):
    run = open_run(base)
    _, params, frozen = partition_trainable(run.config.model, run.model)
    assert frozen == ()
    assert len(jax.tree.leaves(params)) == len(params_by_name(run.model))
    assert dataclasses.is_dataclass(run.config)


def test_checkpoints_store_adapters_only(base, adapter_run):
    _, folder = adapter_run

    def size(run):
        path = Checkpoints(run / "checkpoints").path(Checkpoints(run / "checkpoints").latest())
        return sum(f.stat().st_size for f in (path / "params").rglob("*") if f.is_file())

    assert size(folder) < size(base)
