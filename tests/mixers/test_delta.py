"""`model.mixer=delta` in training, adapters, conversion and exports."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from jax.test_util import check_grads

from famjax import load_pretrained
from famjax.cli.main import main
from famjax.config.resolved import resolve_model
from famjax.config.schema import ArchConfig, Config, ModelConfig
from famjax.convert.open import open_model
from famjax.core.errors import UserError
from famjax.core.remat import remat_with_policy
from famjax.core.types import Context
from famjax.eval.state_file import load_state, save_state
from famjax.eval.streaming import StreamState
from famjax.experiment.load import load_config
from famjax.layers.delta_memory import DeltaMemory, write
from famjax.mixers import delta
from famjax.mixers.delta import DeltaAttention, DeltaState
from famjax.parallel.sharding import path_name
from famjax.stacks import memory_measures
from famjax.train.checkpoint import Checkpoints
from famjax.train.loop import train
from famjax.train.manifest import write_manifest
from famjax.train.metrics import read_metrics
from famjax.train.run import Run, open_run

pytestmark = pytest.mark.usefixtures("one_device")
SMALL = [
    *("model.layers=2", "model.width=16", "model.heads=2", "model.mlp_width=32"),
    *("model.block_len=8", "model.memory_segments=1", "model.mixer=delta"),
    # one body is compiled for both layers
    "model.scan_layers=true",
    *("data.batch=2", "data.length=32", "train.steps=2", "optimizer.warmup_steps=0"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run and its training text."""
    folder = tmp_path_factory.mktemp("delta")
    (folder / "train.txt").write_text(tiny.TEXT * 40)
    train(config(folder, "model.smeared_keys=true"), folder / "delta", quiet=True)
    return folder


def config(folder: Path, *more: str) -> Config:
    return load_config("text_bswa", [*SMALL, f"data.files={folder / 'train.txt'}", *more])


def memories(run: Run) -> dict[str, np.ndarray]:
    named = named_parameters(run.model)
    return {name: a for name, a in named.items() if "delta_memory" in name}


def named_parameters(module: nnx.Module) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(module, nnx.Param))
    return {path_name(path): np.asarray(leaf) for path, leaf in leaves}


def test_all_its_parameters_are_trained(folder: Path) -> None:
    found = memories(open_run(folder / "delta"))
    fresh = named_parameters(DeltaMemory(resolve_model(config(folder).model)))
    assert {name.partition("delta_memory/")[2] for name in found} == fresh.keys()
    for name, a in found.items():
        assert (a != fresh[name.partition("delta_memory/")[2]]).all(), name


def test_rows_of_metrics_have_the_memory(folder: Path) -> None:
    for row in read_metrics(folder / "delta" / "metrics.jsonl"):
        assert row["memory_norm"] > 0
        assert 0 < row["memory_share"] < 1
        assert 0 <= row["memory_rate"] < 1
        assert 0 <= row["memory_closed"] <= 1
        assert not {"state_norm", "fam_attention"} & row.keys()


def mixed_report(valid: int, filler: int = 0) -> Any:
    """Return the report of a row with so many tokens, of a model with FAM and delta layers; its
    memories, and its layers' shares.

    Of the two key heads of its delta layers the second never writes.
    """
    graph, params = nnx.split(tiny.model("fam,bswa,delta", layers=6, kv_heads=2))
    biases = jnp.asarray([1.0, -50.0])
    params = jax.tree_util.tree_map_with_path(
        lambda path, a: jnp.broadcast_to(biases, a.shape) if "rate_bias" in str(path) else a, params
    )
    model = nnx.merge(graph, params)
    tokens = np.random.default_rng(0).integers(258, size=(1, 24))
    tokens[:, valid:] = filler
    is_valid = jnp.asarray(np.arange(24) < valid)[None]
    ctx = Context(reset=jnp.asarray(np.arange(24) == 0)[None], valid=is_valid)
    found = _report(*nnx.split(model), jnp.asarray(tokens), ctx)
    return jax.tree.map(np.asarray, found)


@functools.partial(jax.jit, static_argnums=0)
def _report(graph: Any, params: Any, tokens: Any, ctx: Context) -> Any:
    model = nnx.merge(graph, params)
    x, state, stack = model.embed(tokens), model.init_state(1), model.stack
    # and what it is measured from
    memories = stack.memories(stack(x, state, ctx)[1])
    share = memory_measures.attention_mass(stack, x, state, ctx)
    return stack.memory_metrics(x, state, ctx), memories, share


@pytest.mark.long
def test_each_kind_of_memory_is_reported_apart() -> None:
    found, memories, mass = mixed_report(24)
    names = {"memory_norm", "memory_share", "memory_rate", "memory_closed"}
    assert found.keys() == {"state_norm", "fam_attention", *names}
    for name, memory in zip(("state_norm", "memory_norm"), memories, strict=True):
        assert found[name] == pytest.approx(np.sqrt((memory**2).mean()), rel=1e-5)
    for name, first in (("fam_attention", 0), ("memory_share", 2)):
        assert found[name] == pytest.approx(mass[first::3].mean(), rel=1e-5)
    assert found["memory_closed"] == 0.5
    # of one head: the threshold of 0.1 is subtracted from sigmoid(1)
    assert found["memory_rate"] == pytest.approx((0.7311 - 0.1) / 0.9 / 2, rel=1e-3)


@pytest.mark.long
def test_a_report_leaves_out_padding() -> None:
    found, other = (mixed_report(12, filler)[0] for filler in (0, 7))
    for name in ("memory_norm", "memory_share", "memory_rate", "memory_closed"):
        assert found[name] == pytest.approx(other[name], rel=1e-6), name
    for name, value in mixed_report(0)[0].items():
        assert np.isfinite(value), name


def test_a_layer_that_reads_nothing_has_no_share() -> None:
    """Not 0 / 0."""
    model = tiny.model("delta")
    x = jnp.zeros((1, 16, 16))
    share = memory_measures.attention_mass(model.stack, x, model.init_state(1), Context())
    assert (share == 0).all()


@pytest.mark.long
def test_exports_have_equal_logits(folder: Path, tmp_path: Path) -> None:
    for form in ("hf", "orbax", "stablehlo"):
        # each format is compared with the run when it is written
        assert main(["export", str(folder / "delta"), str(tmp_path / form), "--format", form]) == 0
    after = memories(open_model(str(tmp_path / "hf")))
    for name, a in memories(open_run(folder / "delta")).items():
        np.testing.assert_array_equal(a, after[name])


def test_a_run_of_another_rate_is_not_loaded_as_another_function(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parameters have the same shapes."""
    assert main(["convert", str(folder / "delta"), str(tmp_path / "copy"), "--to", "keep"]) == 0
    (step,) = Checkpoints(folder / "delta" / "checkpoints").steps()
    monkeypatch.setattr(
        "famjax.layers.delta_memory.CONSTANTS", {"delta_memory.rate_scale": 10.0, "new": 1.0}
    )
    said = r"rate_scale 5\.0 -> 10\.0, new None -> 1\.0\); open it with that version"
    for run in (folder / "delta", tmp_path / "copy"):
        with pytest.raises(UserError, match=said):
            open_run(run)
    # nor resumed
    with pytest.raises(UserError, match=f"{step:09d}: is of another version of famjax"):
        train(config(folder, "model.smeared_keys=true", "train.steps=3"), folder / "delta")


def test_a_run_without_recorded_constants_is_loaded(folder: Path, tmp_path: Path) -> None:
    """As those from before they were recorded."""
    run = Path(shutil.copytree(folder / "delta", tmp_path / "old"))
    (path,) = run.glob("checkpoints/*/extra.json")
    extra = json.loads(path.read_text())
    assert extra.pop("constants")
    path.write_text(json.dumps(extra))
    write_manifest(path.parent)
    assert open_run(run).step == 2


def test_a_memory_of_another_rate_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(folder / "delta")
    save_state(tmp_path / "x", StreamState(run.model.init_state(1), 0), run)
    assert load_state(tmp_path / "x", run).tokens == 0
    monkeypatch.setattr("famjax.layers.delta_memory.CONSTANTS", {"delta_memory.rate_scale": 10.0})
    with pytest.raises(UserError, match="belongs to another model"):
        load_state(tmp_path / "x", run)


@pytest.mark.long
def test_a_window_is_given_a_memory_that_adapters_train_with_it(
    folder: Path, tmp_path: Path
) -> None:
    bswa = ["model.mixer=bswa", f"data.files={folder / 'train.txt'}"]
    train(load_config("text_bswa", [*SMALL, *bswa]), tmp_path / "bswa", quiet=True)
    arguments = ["convert", str(tmp_path / "bswa"), str(tmp_path / "new"), "--to", "delta"]
    assert main([*arguments, "model.delta_order=1"]) == 0
    new = open_run(tmp_path / "new")
    shape = [key for key in SMALL if not key.startswith("model.")]
    lora = [f"init={tmp_path / 'new'}", "model.lora.rank=2", f"data.files={folder / 'train.txt'}"]
    adapted = train(load_config("text_bswa", [*shape, *lora]), tmp_path / "lora", quiet=True)
    assert adapted.config.model.delta_order == 1
    before = memories(new)
    for name, a in memories(adapted).items():
        assert (a != before[name]).any(), name


def test_a_fam_becomes_a_delta_memory_and_the_other_way(folder: Path, tmp_path: Path) -> None:
    assert main(["export", str(folder / "delta"), str(tmp_path / "hf")]) == 0
    _, mixed = load_pretrained(tmp_path / "hf", mixer="delta,fam", fam_len=3)
    trained = open_run(folder / "delta").model.stack.layers[0].mixer.delta_memory
    kept = mixed.stack.layers[0].mixer.delta_memory
    np.testing.assert_array_equal(kept.gain[...][0], trained.gain[...][0])
    assert mixed.stack.prompt[...].shape == (3, 16)


@pytest.mark.parametrize("to", ["bswa", "fam"])
def test_a_memory_of_another_mixer_is_refused(
    to: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, memory, new = str(folder / "train.txt"), str(tmp_path / "x.memory"), str(tmp_path / "new")
    run = str(folder / "delta")
    assert main(["generate", run, "--read", text, "--state-out", memory]) == 0
    sizes = ["model.fam_len=8"] if to == "fam" else []
    assert main(["convert", run, new, "--to", to, *sizes]) == 0
    capsys.readouterr()
    assert main(["generate", new, "--state-in", memory, "--prompt", "a"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"{memory}: belongs to a model with model." in error


@pytest.mark.long
def test_a_memory_returns_what_was_written_under_a_key() -> None:
    """Eight random values under eight random keys of 16 elements, with rate 1.

    Head 0 writes values under the keys of their own tokens, head 1 under those of the ones before.
    """
    model = resolve_model(ModelConfig(width=32, heads=2, kv_heads=2, block_len=8))
    memory = DeltaMemory(model)
    memory.rate_bias[...] = jnp.full(2, 100.0)
    memory.gain[...] = jnp.ones(2)
    memory.key_smear.weight[...] = jnp.asarray([-100.0, 100.0])
    k, v = random_block(np.random.default_rng(0))
    s = memory.init_state(1).mT
    update = memory.make_updates(memory.make_writes(k, v))
    for _ in range(20):  # each write removes a part of what the others disturbed
        s = write(s, update)
    out = memory.read(k, s.mT)
    np.testing.assert_allclose(out[:, :, 0], v[:, :, 0], atol=1e-3)
    np.testing.assert_allclose(out[:, :-1, 1], v[:, 1:, 1], atol=1e-3)


def random_block(rng: np.random.Generator, tokens: int = 8) -> tuple[jax.Array, jax.Array]:
    """Return keys and values [b w g e] of a block."""
    k, v = (jnp.asarray(rng.normal(size=(1, tokens, 2, 16)), jnp.float32) for _ in range(2))
    return k, v


@pytest.mark.parametrize("order", [1, 2, 7])
def test_the_gradient_of_features_equals_differences(order: int) -> None:
    model = ModelConfig(width=16, heads=2, kv_heads=2, delta_order=order)
    memory = DeltaMemory(resolve_model(model))
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8)))
        features = jax.jit(memory.features)
        assert features(x).shape == (3, 16 * order)
        np.testing.assert_allclose(jnp.linalg.norm(features(x), axis=-1), 1, atol=1e-4)
        check_grads(features, (x,), order=1, modes=["rev"], eps=1e-5)


def test_the_chunks_of_a_block_are_written_in_order() -> None:
    """A block of three chunks, with rates that differ, against one token after the other."""
    memory = DeltaMemory(resolve_model(ModelConfig(width=32, heads=2, kv_heads=2)))
    rng = np.random.default_rng(0)
    memory.rate_weight[...] = jnp.asarray(rng.normal(size=(2, 32)), jnp.float32)
    memory.key_smear.weight[...] = jnp.full(2, -100.0)  # no smearing
    k, v = random_block(rng, 48)
    after = write(memory.init_state(1).mT, memory.make_updates(memory.make_writes(k, v))).mT
    rates, keys = (np.asarray(x, np.float64) for x in (memory.rates(k, v), memory.features(k)))
    values = np.asarray(v, np.float64)
    for head in range(2):
        s = np.zeros((64, 16))
        for t in range(48):
            key = keys[0, t, head]
            s += rates[0, t, head] * np.outer(key, values[0, t, head] - s.T @ key)
        np.testing.assert_allclose(after[0, head], s, atol=1e-4)


def test_tokens_that_a_head_ignores_leave_its_memory_as_it_is() -> None:
    """A rate is exactly 0, unlike a sigmoid's."""
    memory = DeltaMemory(resolve_model(ModelConfig(width=32, heads=2, kv_heads=2)))
    memory.rate_bias[...] = jnp.asarray([1.0, -2.2])  # sigmoid 0.73 and 0.0998
    rng = np.random.default_rng(0)
    before = jnp.asarray(rng.normal(size=memory.init_state(1).mT.shape), jnp.float32)
    k, v = random_block(rng)
    after = write(before, memory.make_updates(memory.make_writes(k, v)))
    assert (after[:, 0] != before[:, 0]).mean() > 0.5
    np.testing.assert_array_equal(after[:, 1], before[:, 1])


@pytest.mark.parametrize("rotated", [1.0, 0.0])
def test_in_bfloat16_a_call_reads_with_the_queries_of_step(rotated: float) -> None:
    """A block of one layer. Queries that are rotated and rotated back give a difference of 0.003.

    Keys are rotated alike in both.
    """
    arch = ArchConfig(rotary_fraction=rotated)
    shape: dict[str, Any] = {"width": 64, "heads": 2, "block_len": 16, "memory_segments": 0}
    config = resolve_model(ModelConfig(**shape, dtype="bfloat16", arch=arch))
    graph, params = nnx.split(DeltaAttention(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(1, 16, 64)), jnp.float32)
    state = nnx.merge(graph, params).init_state(1)
    state = state._replace(s=jnp.asarray(rng.normal(size=state.s.shape), jnp.float32))

    @functools.partial(jax.jit, static_argnums=0)
    def read(method: str, x: jax.Array, state: DeltaState) -> tuple[jax.Array, DeltaState]:
        return getattr(nnx.merge(graph, params), method)(x, state, Context(), None)

    called, _ = read("__call__", x, state)
    for t in range(16):
        stepped, state = read("step", x[:, t : t + 1], state)
        np.testing.assert_allclose(called[:, t : t + 1], stepped, rtol=0, atol=2e-4)


@pytest.mark.parametrize("in_scan", [True, False])
def test_the_gradient_keeps_the_memory_before_each_block_not_each_chunk(
    in_scan: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With remat. Three blocks of two chunks, and the zeros of a reset."""
    monkeypatch.setattr(delta, "computes_in_scan", lambda blocks: in_scan)
    mixer, k, scan = scan_of_three_blocks()
    before = mixer.init_state(1).s
    backward = jax.eval_shape(lambda *args: jax.vjp(scan, *args)[1], k, before)
    assert before.size < saved_memories(backward, before) <= 4 * before.size


@pytest.mark.parametrize(("in_scan", "kept"), [(True, 3), (False, 1)])
def test_a_layer_keeps_the_memory_where_features_are_computed_within_the_scan(
    in_scan: bool, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each of three blocks; elsewhere only the argument, and the scan runs again."""
    monkeypatch.setattr(delta, "computes_in_scan", lambda blocks: in_scan)
    mixer, k, scan = scan_of_three_blocks()
    before = mixer.init_state(1).s
    scan = remat_with_policy(scan, "layer", scanned=False)
    backward = jax.eval_shape(lambda *args: jax.vjp(scan, *args)[1], k, before)
    assert saved_memories(backward, before) == kept * before.size


def scan_of_three_blocks() -> tuple[DeltaAttention, jax.Array, Any]:
    """Return a mixer with remat, keys of three blocks, and `scan_memory` of such keys and S."""
    model = ModelConfig(width=16, heads=2, block_len=64, remat="layer", delta_order=3)
    mixer = DeltaAttention(resolve_model(model), rngs=nnx.Rngs(0))
    state = mixer.init_state(1)
    inputs = mixer.window.project_blocks(jnp.ones((1, 3 * 64, 16)), state.window, Context())

    def scan(k: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
        return mixer.scan_memory(inputs._replace(k=k), s, Context())

    return mixer, inputs.k, scan


def saved_memories(backward: Any, memory: jax.Array) -> int:
    """Return the number of elements of saved memories, transposed or not.

    No other array has their last two dimensions.
    """
    arrays = [a for a in jax.tree.leaves(backward) if a.dtype == memory.dtype]
    shapes = memory.shape[-2:], memory.mT.shape[-2:]
    return sum(a.size for a in arrays if a.shape[-2:] in shapes)


def test_features_within_the_scan_are_those_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four blocks, of which the third resets the memory and the last is not full; and gradients."""
    config = resolve_model(ModelConfig(width=16, heads=2, block_len=8, smeared_keys=True))
    graph, params = nnx.split(DeltaAttention(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 4 * 8, 16)), jnp.float32)
    valid = jnp.ones((2, 4 * 8), bool).at[1, -3:].set(False)
    ctx = Context(jnp.zeros((2, 4 * 8), bool).at[:, 2 * 8].set(True), valid)
    s = nnx.merge(graph, params).init_state(2).s
    s = jnp.asarray(rng.normal(size=s.shape), jnp.float32)

    def scan(params: Any, x: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
        mixer = nnx.merge(graph, params)
        window = mixer.init_state(2).window
        return mixer.scan_memory(mixer.window.project_blocks(x, window, ctx), s, ctx)

    def outputs_and_gradients(in_scan: bool) -> Any:
        monkeypatch.setattr(delta, "computes_in_scan", lambda blocks: in_scan)

        @jax.jit
        def read(*args: Any) -> Any:
            outputs, backward = jax.vjp(scan, *args)
            return outputs, backward(
                jax.tree.map(lambda a: jnp.sin(jnp.arange(a.size)).reshape(a.shape), outputs)
            )

        return read(params, x, s)

    ours, theirs = map(outputs_and_gradients, (True, False))
    assert any((np.asarray(a) != 0).any() for a in jax.tree.leaves(ours))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs)


@pytest.mark.parametrize("given", ["delta_order=0", "delta_order=8", "delta_heads=3"])
def test_sizes_that_heads_do_not_have_are_refused(
    given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--run", str(tmp_path), "model.mixer=delta", f"model.{given}"]
    assert main(["train", "text_bswa", *arguments, "model.width=16", "model.heads=2"]) == 2
    assert f"model.{given}: " in capsys.readouterr().err


def test_a_document_is_asked_more_than_once_about_its_memory() -> None:
    config = load_config("passkey", ["model.mixer=delta"])
    assert config.data.passkey.ask_every > 0
