"""The size of a model is computed without creating it, and one that cannot fit is rejected."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from flax import nnx

from famjax.config.keys import replace_value
from famjax.config.resolved import resolve_model
from famjax.config.schema import (
    AdaptiveConfig,
    ArchConfig,
    Config,
    DataConfig,
    EncoderConfig,
    FeedbackConfig,
    LinearConfig,
    LoraConfig,
    ModelConfig,
)
from famjax.core import host_memory
from famjax.core.errors import UserError
from famjax.core.units import byte_size
from famjax.experiment import memory, size
from famjax.experiment.load import available_configs, load_config, override
from famjax.mixers import MIXERS
from famjax.models.remap_params import canonical_name, is_feature_map
from famjax.models.seq2seq import make_model
from famjax.train.partition import partition_trainable

SHAPE = ModelConfig(vocab_size=50, layers=4, width=24, heads=4, kv_heads=2, head_dim=8)
EVERYTHING = ArchConfig(
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    qk_norm=True,
    post_norm=True,
    positions="learned",
)
STACK = replace(SHAPE, stack="feedback", block_len=1)
LORA = LoraConfig(rank=3)


def stack(**given: Any) -> ModelConfig:
    return replace(STACK, feedback=FeedbackConfig(span=20, **given))


MODELS = {
    "fam": SHAPE,
    "static": replace(SHAPE, fam_update="static"),
    "block recurrent": replace(SHAPE, mixer="bswa,block_recurrent", recurrent_gate="lstm"),
    "block recurrent, fixed": replace(SHAPE, mixer="block_recurrent", norm="layernorm"),
    "prefix": replace(SHAPE, mixer="bswa,fam", fam_init="prefix"),
    "fm": replace(SHAPE, mixer="fm", lora=LORA),
    "hybrid": replace(SHAPE, mixer="full,swa,bswa,linear", mlp="gelu", norm="layernorm"),
    "everything": replace(SHAPE, mixer="full", arch=EVERYTHING, capacity=30, tied=False),
    "post norm": replace(SHAPE, arch=ArchConfig(pre_norm=False), kv_heads=0, head_dim=0),
    "lora": replace(SHAPE, lora=LORA),
    "lora on some": replace(SHAPE, lora=LoraConfig(rank=2, on="attention.q,mlp.*"), mlp="gelu"),
    "elu": replace(SHAPE, mixer="linear", linear=LinearConfig(map="elu")),
    "rfa": replace(SHAPE, mixer="linear", linear=LinearConfig(map="rfa", features=6)),
    "adaptive": replace(SHAPE, adaptive=AdaptiveConfig("10,30", 2)),
    "adaptive, untied": replace(SHAPE, adaptive=AdaptiveConfig("10,30", 2), tied=False),
    "feedback": stack(),
    "feedback, spans": stack(adaptive_span=True, positions="rotary", shared_kv=False),
    "feedback, lower": replace(stack(composition="same_and_lower", cache="memory"), lora=LORA),
    "feedback, lora": replace(stack(shared_kv=False, composition="average"), lora=LORA),
    "transformer": replace(stack(shared_kv=False), stack="transformer"),
    "lstm": replace(SHAPE, stack="lstm", block_len=1),
    "encoder": replace(SHAPE, encoder=EncoderConfig(layers=3), lora=LORA, norm="layernorm"),
    "encoder, linear": replace(
        SHAPE, mixer="linear", encoder=EncoderConfig(1, "linear", 6, shared=False)
    ),
    "encoder, positions": replace(
        SHAPE,
        mixer="full",
        encoder=EncoderConfig(1),
        arch=ArchConfig(
            positions="learned", position_offset=2, embed_norm=True, logit_bias=True, pre_norm=False
        ),
        norm="layernorm",
        mlp="swish",
    ),
    "feedback, encoder": replace(stack(), encoder=EncoderConfig(layers=1)),
    "rmt": replace(SHAPE, stack="rmt", lora=LORA, norm="layernorm"),
    "autocompressor": replace(SHAPE, stack="autocompressor", tied=False),
}


@pytest.mark.parametrize("name", [*MODELS, *available_configs()])
def test_parameters_and_states_are_counted(name):
    """Parameter counts are equal; the estimate of a state is never too large."""
    model = MODELS.get(name) or replace(load_config(name).model, vocab_size=300_000)
    model = replace(model, lora=replace(model.lora, dropout=0.0), dropout=type(model.dropout)())
    made = nnx.eval_shape(lambda: make_model(model, rngs=nnx.Rngs(0)))
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(made, nnx.Param))
    adapters = [a.size for path, a in leaves if "lora" in str(path)]
    maps = [a.size for path, a in leaves if is_feature_map(canonical_name(path)[0])]
    total = sum(a.size for _, a in leaves)
    assert size.count_params(model) == (total - sum(adapters), sum(adapters), sum(maps))
    state = jax.tree.leaves(
        jax.eval_shape(lambda: make_model(model, rngs=nnx.Rngs(0)).init_state(1))
    )
    there = sum(a.size * a.dtype.itemsize for a in state)
    assert 0.9 * there <= size.state_bytes(model) + 100 <= there + 100


HUGE = [
    ("model.width", 10**9),
    ("model.mlp_width", 10**9),
    ("model.vocab_size", 10**9),
    ("model.head_dim", 10**9),
    ("model.fam_len", 10**9),
    ("model.memory_segments", 10**9),
    ("model.lora.rank", 10**9),
    ("data.batch", 10**9),
    ("data.length", 10**9),
]


@pytest.mark.parametrize(("key", "value"), HUGE)
def test_error_names_the_key_that_is_too_large(key, value):
    config = replace_value(Config(), key, value)
    with pytest.raises(
        UserError, match=rf"^{key}={value}: parameters, .* would take at least [\d.]"
    ):
        memory.check_training_fits(config)


@pytest.mark.parametrize(
    ("model", "key"),
    [
        (replace(SHAPE, mixer="full", capacity=10**9), "model.capacity"),
        (replace(SHAPE, mixer="swa", window=10**9), "model.window"),
        (replace(SHAPE, mixer="linear", linear=LinearConfig(features=10**9)), "model.linear.feat"),
        (replace(STACK, feedback=FeedbackConfig(span=10**9)), "model.feedback.span"),
        (replace(SHAPE, block_len=10**9), "model.block_len"),
    ],
)
def test_error_names_the_key_of_other_models(model, key):
    with pytest.raises(UserError, match=rf"^{key}"):
        memory.check_training_fits(Config(model=model))


@pytest.mark.parametrize("model", [replace(SHAPE, mixer="linear"), STACK])
def test_error_names_the_sources_that_are_too_long(model):
    """An encoder's attention has weights of all pairs of tokens."""
    data = DataConfig(batch=8, length=64, source_length=10**7)
    config = Config(model=replace(model, encoder=EncoderConfig(layers=1)), data=data)
    with pytest.raises(UserError, match=r"^data\.source_length=10000000: parameters"):
        memory.check_training_fits(config)
    memory.check_training_fits(replace(config, model=model))


def test_a_model_that_fits_is_accepted(monkeypatch):
    config = Config(model=replace(SHAPE, vocab_size=258))
    memory.check_training_fits(config)
    needed = size.training_bytes(config)
    monkeypatch.setattr(memory, "host_bytes", lambda: needed - 1)
    said = f"would take at least {byte_size(needed)}, and this machine has "
    with pytest.raises(UserError, match=said):
        memory.check_training_fits(config)
    memory.check_model_fits(config.model)  # fits without gradients
    with pytest.raises(UserError, match="2 rows would take at least"):
        memory.check_bytes_fit("2 rows", needed)
    memory.check_training_fits(config, memory.DeviceMemory(10**12, "another machine has"))


def test_verbs_that_use_one_device_have_its_memory_only(monkeypatch):
    model = replace(SHAPE, vocab_size=258)
    needed = size.weight_bytes(model)
    device = SimpleNamespace(
        platform="tpu", device_kind="TPU v5", memory_stats=lambda: {"bytes_limit": needed - 1}
    )
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    memory.check_model_fits(model)
    memory.check_model_fits(model, 2)
    memory.check_bytes_fit("2 rows", needed)
    others = "the 7 others (famjax eval and generate have --mesh auto)"
    said = re.escape(f"and 1 TPU v5 device is used, not {others}, and has ")
    with pytest.raises(UserError, match=said):
        memory.check_model_fits(model, 1)
    with pytest.raises(UserError, match=said):
        memory.check_bytes_fit("2 rows", needed, 1)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with pytest.raises(UserError, match="and 1 TPU v5 device has "):
        memory.check_model_fits(model)


def test_trained_parameters_need_gradients_and_moments():
    plain, model = Config(model=SHAPE), replace(SHAPE, lora=LoraConfig(rank=3, base="bfloat16"))
    weights, adapters, _ = size.count_params(model)
    assert size.training_bytes(plain) == 16 * weights
    assert size.training_bytes(replace(plain, model=model)) == 2 * weights + 16 * adapters
    slow = replace(plain, optimizer=replace(plain.optimizer, name="adafactor", clip_norm=0.0))
    assert size.training_bytes(slow) == 8 * weights


def test_available_memory_respects_cgroup_limits(tmp_path):
    total = memory.host_bytes()
    assert 2**28 < total < 2**60
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("1:cpu:/x\n0::/jobs/a\n")
    groups = tmp_path / "sys/fs/cgroup"
    (groups / "jobs/a").mkdir(parents=True)
    for folder, limit in (("jobs/a", "max"), ("jobs", 10**8), (".", 2 * 10**8)):
        (groups / folder / "memory.max").write_text(f"{limit}\n")
    assert memory.host_bytes(tmp_path) == 10**8
    # this process alone has more than that, so nothing is left
    assert 0 < host_memory.available_bytes() < total
    assert host_memory.available_bytes(tmp_path) == 0
    for folder in ("jobs", "."):
        (groups / folder / "memory.max").write_text(f"{2**60}\n")
    assert host_memory.available_bytes(tmp_path) > 0


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("data.layout=packed", 64 * 64),
        ("data.layout=lanes", 64 * 4096),
        ("data.layout=packed train.bptt_segments=2", 32 * 4096),
    ],
)
def test_rows_that_are_read_at_once_attend_to_no_cache(keys, expected):
    full = ["model.mixer=full", "model.block_len=1", "model.capacity=4096", "data.length=64"]
    config = override(Config(), [*full, *keys.split()])
    assert MIXERS["full"].max_attention_weights(config) == expected


@pytest.mark.parametrize(("mixer", "megabytes"), [("bswa", 134), ("delta", 201), ("fam", 145)])
def test_states_of_a_model_of_8b_are_those_of_the_docs(mixer, megabytes):
    """docs/finetune.md, "How much memory it takes"."""
    shape = {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "mlp_width": 14336}
    model = ModelConfig(
        vocab_size=128256,
        mixer=mixer,
        block_len=512,
        memory_segments=1,
        fam_len=16,
        dtype="bfloat16",
        **shape,
    )
    assert round(32 * MIXERS[mixer].state_bytes(resolve_model(model)) / 1e6) == megabytes


def test_kernels_of_gpus_store_no_attention_weights():
    config = replace_value(Config(model=replace(SHAPE, mixer="full")), "data.length", 2**17)
    needed = size.training_bytes(config) + size.batch_bytes(config, has_kernels=True)
    with pytest.raises(UserError, match=r"^data\.length="):
        memory.check_training_fits(config, memory.DeviceMemory(needed, "a TPU has"))
    memory.check_training_fits(config, memory.DeviceMemory(needed, "a GPU has", has_kernels=True))


@pytest.mark.parametrize("only", ["maps", "not_maps", "all"])
@pytest.mark.parametrize("rank", [0, 3])
def test_frozen_weights_have_the_bytes_of_their_dtype(only, rank):
    lora = LoraConfig(rank=rank if only == "all" else 0, base="bfloat16")
    model = replace(SHAPE, mixer="linear", lora=lora)
    parts = jax.eval_shape(
        lambda: partition_trainable(model, make_model(model, rngs=nnx.Rngs(0)), only)[1:]
    )
    held = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(parts))
    assert size.weight_bytes(model, only) == pytest.approx(held, rel=0.01)
