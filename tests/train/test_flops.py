"""FLOPs per token, compared with counts by hand and with XLA's cost analysis."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from famjax.config.resolved import resolve_model
from famjax.config.schema import (
    Config,
    DataConfig,
    EncoderConfig,
    LinearConfig,
    ModelConfig,
    TrainConfig,
)
from famjax.train import flops

SMALL = ModelConfig(
    vocab_size=100, layers=1, width=8, heads=2, head_dim=4, mlp_width=16, mlp="gelu", block_len=10
)


def config_with(**changes):
    return resolve_model(replace(SMALL, **changes))


def test_flops_equal_counts_by_hand():
    weights = 8 * 8 * 4 + 2 * 8 * 16
    attention = 2 * 2 * 8 * (1 + 0.5) * 10
    head = 2 * 8 * 100
    model = config_with(mixer="bswa", memory_segments=1)
    assert flops.forward_flops(model) == 2 * weights + attention + head
    assert flops.training_flops(model) == 3 * flops.forward_flops(model)


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({"mixer": "full", "capacity": 64}, 32),
        ({"mixer": "swa", "window": 7}, 7),
        ({"mixer": "bswa", "memory_segments": 0}, 5),
        ({"mixer": "bswa_sg", "memory_segments": 3}, 35),
    ],
)
def test_attention_flops_count_the_keys_of_the_mixer(changes, keys):
    weights = 2 * (8 * 8 * 4 + 2 * 8 * 16) + 2 * 8 * 100
    assert flops.forward_flops(config_with(**changes)) == weights + 4 * 8 * keys


def test_fam_adds_flops_of_its_memory_tokens():
    model = config_with(mixer="fam", memory_segments=2, fam_len=5, fam_previous=3)
    weights = 2 * (8 * 8 * 4 + 2 * 8 * 16)
    token = weights + 4 * 8 * (25 + 15)
    fam = weights + 4 * 8 * (5 + 10)
    assert flops.forward_flops(model) == token + 0.5 * fam + 2 * 8 * 100


def test_a_static_query_costs_as_much_as_fams():
    static, copied = (
        flops.forward_flops(config_with(mixer="fam", fam_update=update))
        for update in ("static", "sum")
    )
    assert static == copied


def test_feedback_segments_add_flops_of_keys_and_values_of_outputs():
    shape = {"memory_segments": 2, "kv_heads": 1}
    bswa, fm = (flops.forward_flops(config_with(mixer=m, **shape)) for m in ("bswa", "fm"))
    assert fm - bswa == 2 * 8 * 2 * 4


@pytest.mark.parametrize(
    ("kind", "phi", "k"), [("relu", 6, 6), ("rfa", 3, 6), ("performer", 6, 6), ("elu", 0, 4)]
)
def test_linear_attention_flops_count_maps_state_and_output(kind, phi, k):
    """Two query heads and one key/value head of size 4."""
    model = config_with(mixer="linear", kv_heads=1, linear=LinearConfig(kind, features=6, chunk=7))
    weights = 8 * (2 * 8 + 2 * 4) + 2 * 8 * 16
    pairs = 3 * 4 * phi + k * 4 + 2 * k * (4 + 1)
    assert flops.forward_flops(model) == 2 * (weights + pairs) + 2 * 8 * 100


def test_fam_flops_are_near_those_of_bswa():
    shape = {"width": 512, "heads": 8, "head_dim": 64, "mlp_width": 2048, "vocab_size": 1}
    sizes = {"memory_segments": 1, "block_len": 128, "fam_len": 8}
    fam = flops.forward_flops(config_with(mixer="fam", **shape, **sizes))
    bswa = flops.forward_flops(config_with(mixer="bswa", **shape, **sizes))
    assert fam / bswa == pytest.approx(1 + 8 / 128, abs=0.01)


def test_the_layer_pattern_is_repeated():
    parts = [flops.forward_flops(config_with(mixer=m)) for m in ("bswa", "fam")]
    head = 2 * 8 * 100
    both = flops.forward_flops(config_with(mixer="bswa,fam", layers=3))
    assert both == pytest.approx(2 * parts[0] + parts[1] - 2 * head)


def test_gates_and_shared_keys_are_counted():
    gain = flops.forward_flops(config_with(mlp="swiglu")) - flops.forward_flops(
        config_with(mlp="gelu")
    )
    assert gain == pytest.approx(2 * 8 * 16 * (1 + SMALL.fam_len / SMALL.block_len))
    saved = flops.forward_flops(config_with(mixer="swa")) - flops.forward_flops(
        config_with(mixer="swa", kv_heads=1)
    )
    assert saved == 2 * 2 * 8 * 4


def test_default_widths_are_resolved():
    plain = config_with(kv_heads=0, head_dim=0, mlp_width=0)
    full = config_with(kv_heads=2, head_dim=4, mlp_width=32)
    assert flops.forward_flops(plain) == flops.forward_flops(full)


def test_xla_cost_analysis_counts_the_same_matmuls():
    model = config_with(mlp="swiglu", kv_heads=1)

    def products(x, q, kv, out, up, down):
        return (x @ q @ out) + (x @ kv).sum() + x @ up[:, :16] @ down + (x @ up[:, 16:]).sum()

    shapes = [(64, 8), (8, 8), (8, 2 * 4), (8, 8), (8, 32), (16, 8)]
    counted = jax.jit(products).lower(*(jnp.zeros(s) for s in shapes)).compile().cost_analysis()
    assert counted["flops"] / 64 == pytest.approx(2 * flops.layer_weights(model), rel=0.1)


def test_vocab_size_must_be_known():
    with pytest.raises(ValueError, match="vocab_size"):
        flops.forward_flops(config_with(vocab_size=0))


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", None),
        ("Tesla T4", 65e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("cpu", None),
    ],
)
def test_peak_flops_by_device_kind(kind, peak):
    assert flops.peak_flops(SimpleNamespace(device_kind=kind)) == peak


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_measured_peak_is_plausible_and_cached(dtype):
    first = flops.measure_peak_flops(dtype)
    assert 1e8 < first < 1e16
    assert flops.measure_peak_flops(dtype) == first


def test_longer_sources_count_in_the_encoder_and_the_keys_of_cross_attention():
    model = config_with(mixer="full", encoder=EncoderConfig(layers=2))
    one, three = (
        flops.step_flops(Config(model=model, data=DataConfig(length=16, source_length=n)))
        for n in (16, 48)
    )
    layer, keys_values = 8 * 8 * 4 + 2 * 8 * 16, 2 * 8 * 8
    # two more source tokens for each target token; forward, and backward to both factors
    assert three - one == 3 * 2 * (2 * 2 * layer + 2 * keys_values)
    assert flops.source_tokens(DataConfig(length=16), False) == (1, 0)


def test_computed_scores_of_sources_are_those_of_whole_rows():
    model = config_with(mixer="full", layers=3, encoder=EncoderConfig(layers=2))
    config = Config(model=model, data=DataConfig(length=16, source_length=48))
    more = flops.step_flops(config, computed=True) - flops.step_flops(config)
    decoder = config_with(mixer="full", layers=3)
    masked = Config(model=decoder, data=DataConfig(length=16))
    more -= flops.step_flops(masked, computed=True) - flops.step_flops(masked)
    # scores and sums of values, over 48 keys of width 8, for 3 source tokens and for one target
    assert more == 3 * (3 * 2 + 1 * 3) * (2 * 2 * 8 * 48)


@pytest.mark.parametrize(
    ("kind", "features", "vectors"), [("relu", 6, 6), ("elu", 4, 0), ("rfa", 6, 3)]
)
def test_linear_cross_attention_counts_its_map(kind, features, vectors):
    """Two heads of size 4, a source token for each target token, no scores."""
    changes = {"mixer": "full", "layers": 1, "linear": LinearConfig(kind)}
    plain, linear = (
        config_with(**changes, encoder=EncoderConfig(layers=1, cross=cross, features=6))
        for cross in ("softmax", "linear")
    )
    maps, sums, read = 2 * 2 * 4 * vectors, 2 * features * 4, 2 * features * (4 + 1)
    assert flops.forward_flops(linear) - flops.forward_flops(plain) == 2 * (maps + sums + read)
    # adapters freeze none of them
    assert flops.weight_flops(linear) == flops.weight_flops(plain)


def test_match_flops_count_softmax_and_gradients_of_maps():
    """Layer 0 is linear with two query heads and one key head of size 4; layer 1 is unchanged."""
    changes = {"layers": 2, "mixer": "linear,swa", "kv_heads": 1, "window": 7}
    model = config_with(**changes, linear=LinearConfig("relu", features=6))
    weights = 2 * (8 * 8 * 2 + 2 * 8 * 4 + 2 * 8 * 16)
    softmax = 2 * 2 * 8 * 10  # half of the 20 positions of a row on average
    maps, into, out = 2 * 3 * 4 * 6, 2 * 6 * 4, 2 * 2 * 6 * (4 + 1)
    linear = 2 * maps + 2 * into + 3 * out
    assert (
        flops.softmax_matching_flops(model, 20) == weights + softmax + linear + weights + 4 * 8 * 7
    )
    config = Config(model=model, data=DataConfig(length=20))
    matching = replace(config, train=TrainConfig(only="maps", match=True))
    assert flops.step_flops(matching) == flops.softmax_matching_flops(model, 20)
    assert flops.step_flops(config) == flops.training_flops(model)


def test_the_peak_of_a_cpu_does_not_depend_on_its_number_of_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They share the cores."""
    monkeypatch.setattr(flops, "measure_peak_flops", lambda dtype: 1e9)
    assert jax.device_count() > 1
    assert flops.all_devices_peak_flops("float32") == 1e9
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    peak = flops.peak_flops(gpu)
    assert flops.all_devices_peak_flops("bfloat16") == peak * jax.device_count()
