"""Attention matching (`train.match`) trains feature maps only, and the next stage uses them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import small
import torch
import transformers
from flax import nnx

from famjax.cli.main import main
from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.experiment.load import load_config, override
from famjax.parallel import sharding
from famjax.parallel.sharding import path_name
from famjax.train.loop import train
from famjax.train.metrics import read_metrics
from famjax.train.program import make_program
from famjax.train.resolve import resolve
from famjax.train.run import Run, initial_weights, open_run

MATCH = ["data.layout=packed", "train.only=maps", "train.match=true"]

# match, then finetune a converted Llama


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("match")


@pytest.fixture(scope="module")
def hybrid_model(work_dir: Path) -> Path:
    """Return a model of four layers; the top one keeps softmax attention."""
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
    given = ["--to", "t2r", "--keep-every", "4", "--feature-size", "8", "--tokenizer", "bytes"]
    said = [
        "convert",
        str(work_dir / "llama"),
        str(work_dir / "hybrid"),
        *given,
        "model.block_len=8",
    ]
    assert main(said) == 0
    return work_dir / "hybrid"


def train_with_source(work_dir: Path, init: Path, name: str, *more: str) -> Run:
    """Continue training from a folder, on one of the eight devices."""
    files = [f"data.files={small.texts(work_dir / 'texts')}", "data.length=32", "data.batch=4"]
    few = ["data.holdout=0", "optimizer.warmup_steps=0", "train.log_every=1"]
    config = load_config("text_fam", [f"init={init}", *files, *few, *more])
    with pytest.MonkeyPatch.context() as patch:
        one = functools.partial(sharding.make_mesh, devices=jax.devices()[:1])
        patch.setattr(sharding, "make_mesh", one)
        return train(config, work_dir / name, quiet=True)


@pytest.fixture(scope="module")
def matched_run(work_dir: Path, hybrid_model: Path) -> Run:
    given = [*MATCH, "train.steps=30", "optimizer.learning_rate=0.02"]
    return train_with_source(work_dir, hybrid_model, "matched", *given)


def weights(run: Run) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(run.model, nnx.Param))
    return {path_name(path): np.asarray(leaf) for path, leaf in leaves}


def test_match_loss_decreases(work_dir: Path, matched_run: Run) -> None:
    rows = read_metrics(work_dir / "matched" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 31))
    first, last = (np.mean([row["loss"] for row in part]) for part in (rows[:3], rows[-3:]))
    assert last < 0.6 * first
    for i in range(3):
        assert rows[-1][f"match_{i}"] < rows[0][f"match_{i}"]
    # of one row, before the first update
    of_layers = np.mean([rows[0][f"match_{i}"] for i in range(3)])
    assert of_layers == pytest.approx(rows[0]["loss"], rel=0.3)
    # the top layer has nothing to match, and there is no next-token loss
    assert not {"match_3", "accuracy", "bits_per_byte"} & rows[-1].keys()


def test_only_feature_maps_are_trained(hybrid_model: Path, matched_run: Run) -> None:
    before, after = weights(open_run(hybrid_model)), weights(matched_run)
    assert before.keys() == after.keys()
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert changed == {name for name in before if "/map/" in name}


@pytest.mark.long
def test_the_next_stage_starts_with_the_feature_maps(work_dir: Path, matched_run: Run) -> None:
    opened = weights(open_run(work_dir / "matched"))
    assert all((opened[name] == array).all() for name, array in weights(matched_run).items())
    config = load_config("text_fam", [f"init={work_dir / 'matched'}", "data.length=32"])
    begun, *_ = initial_weights(config, work_dir / "none")
    leaves = jax.tree_util.tree_leaves_with_path(begun)
    assert {path_name(path) for path, _ in leaves} == opened.keys()
    assert all((opened[path_name(path)] == np.asarray(leaf)).all() for path, leaf in leaves)
    tuned = train_with_source(
        work_dir, work_dir / "matched", "tuned", "train.steps=2", "data.layout=packed"
    )
    assert tuned.config.train.only == "all"
    moved = weights(tuned)
    assert all((moved[name] != array).any() for name, array in opened.items())


def test_a_merged_matched_run_needs_no_base(work_dir: Path, matched_run: Run) -> None:
    alone = open_run(work_dir / "matched").merge_adapters().config
    assert (alone.init, alone.train.only, alone.train.match) == ("", "all", False)


# independent of accumulation, sharding and dtype

# learned_elu: similarities stay positive and rounding errors small
ROWS, LENGTH, VOCABULARY = 8, 16, 64
SHAPE = (
    f"init=somewhere model.vocab_size={VOCABULARY} model.layers=2 model.width=16 model.heads=4 "
    "model.kv_heads=2 model.mlp_width=32 model.block_len=8 model.mixer=linear "
    f"model.linear.map=learned_elu model.linear.features=8 data.batch={ROWS} data.length={LENGTH} "
    "optimizer.schedule=constant optimizer.warmup_steps=0 optimizer.beta1=0 optimizer.clip_norm=0"
).split()
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.cache
def step_results(*overrides: str, mesh: tuple[int, int, int] = (1, 1, 1)) -> dict[str, np.ndarray]:
    """Return the gradients (Adam's first moment) and the metric sums of one step."""
    axes = zip(("data", "fsdp", "tensor"), mesh, strict=True)
    given = [*SHAPE, *MATCH, *overrides, *(f"mesh.{n}={size}" for n, size in axes)]
    config = override(Config(), given)
    with pytest.MonkeyPatch.context() as patch:
        devices = jax.devices()[: int(np.prod(mesh))]
        make_mesh = functools.partial(sharding.make_mesh, devices=devices)
        patch.setattr(sharding, "make_mesh", make_mesh)
        program = make_program(resolve(config, None, len(devices)), np.ones(VOCABULARY, np.float32))
    state = program.start()
    batch = jax.device_put(packed_batch(), program.batch)
    step: Any = program.step
    state = step.lower(state, batch).compile(compiler_options=FAST)(state, batch)
    found = {"loss": state.totals.loss, "weight": state.totals.weight, "bad": state.bad}
    leaves = jax.tree_util.tree_leaves_with_path(state.opt_state[1][0].mu)
    return {
        **{name: np.asarray(value, np.float64) for name, value in found.items()},
        **{path_name(path): np.asarray(leaf, np.float64) for path, leaf in leaves},
    }


def packed_batch() -> dict[str, np.ndarray]:
    """Return random rows in which some targets have weight 0."""
    rng = np.random.default_rng(0)
    shape = (ROWS, LENGTH)
    return {
        "tokens": rng.integers(0, VOCABULARY, shape, np.int32),
        "targets": rng.integers(0, VOCABULARY, shape, np.int32),
        "weights": rng.choice([0, 0.1, 1], shape).astype(np.float32),
        "valid": np.ones(shape, bool),
        "reset": np.arange(LENGTH) == np.zeros((ROWS, 1)),
    }


@pytest.mark.long
def test_accumulation_on_eight_devices_gives_the_same_gradients() -> None:
    plain, other = step_results(), step_results("train.accumulate=2", mesh=(2, 2, 2))
    assert plain.keys() == other.keys()
    assert plain["weight"] == ROWS * LENGTH
    assert plain["bad"] == 0
    for name, value in plain.items():
        atol = 1e-5 * np.abs(value).max(initial=1e-6)
        np.testing.assert_allclose(other[name], value, rtol=0, atol=atol, err_msg=name)


@pytest.mark.long
def test_bfloat16_gradients_agree() -> None:
    plain, other = step_results(), step_results("model.dtype=bfloat16")
    assert other["bad"] == 0
    assert other["loss"] == pytest.approx(plain["loss"], rel=0.02)
    for name in plain.keys() - {"loss", "weight", "bad"}:
        a, b = plain[name].ravel(), other[name].ravel()
        assert a @ b > 0.95 * np.linalg.norm(a) * np.linalg.norm(b), name


# invalid configs


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["train.only=all"], "train.match=true trains feature maps alone, train.only=all; set tra"),
        (["train.only=not_maps"], "train.match=true trains feature maps alone, train.only=not_map"),
        (["data.layout=lanes"], "train.match=true starts each row with an empty memory, data"),
        (
            ["train.rsp=0.5"],
            "train.match=true starts each row with an empty memory, train.rsp=0.5;",
        ),
        (["train.bptt_segments=2"], "train.match=true reads each row whole, train.bptt_segments=2"),
        (
            ["train.label_smoothing=0.1"],
            "train.match=true has no targets, train.label_smoothing=0.",
        ),
        (["model.lora.rank=2"], "train.only=maps does not train adapters, model.lora.rank="),
        (["model.mixer=bswa"], "train.only=maps: model.mixer=bswa has no feature maps; give layer"),
        (["model.linear.map=elu"], "train.only=maps: model.linear.map=elu has no weights; take a "),
        (["init="], "train.match=true: random weights have no attention to match; give init="),
    ],
)
def test_invalid_matching_is_rejected(hybrid_model: Path, more: list[str], said: str) -> None:
    given = [f"init={hybrid_model}", "model.linear.features=8", *MATCH, "model.mixer=linear"]
    with pytest.raises(UserError) as caught:
        load_config("text_fam", [*given, *more])
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
