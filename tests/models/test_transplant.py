"""`remap_params` between softmax and linear attention, and between memory updates."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from famjax.config.schema import ArchConfig, FeedbackConfig, LinearConfig, ModelConfig
from famjax.core.errors import UserError
from famjax.models.remap_checks import check_compatible
from famjax.models.remap_params import (
    abstract_inference_model,
    canonical_name,
    remap_params,
)

FULL = ModelConfig(vocab_size=9, layers=2, width=8, heads=2, mixer="full")
RELU = replace(FULL, mixer="linear", linear=LinearConfig("relu", features=4))


GATED = replace(FULL, mixer="fam", fam_len=3, fam_update="gated")


def weights(model):
    return jax.tree.map(lambda a: jnp.zeros(a.shape), abstract_inference_model(model)[1])


def names(params):
    return {canonical_name(path)[0] for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]}


def test_maps_without_weights_keep_all_parameters():
    elu = replace(RELU, linear=LinearConfig("elu"))
    assert names(remap_params(weights(FULL), FULL, elu)) == names(weights(FULL))


def test_a_maps_weights_are_dropped_or_kept():
    assert names(remap_params(weights(RELU), RELU, FULL)) == names(weights(FULL))
    half = remap_params(weights(RELU), RELU, replace(RELU, mixer="linear,full"))
    kernel = nnx.to_pure_dict(half)["stack"]["layers"][0]["mixer"]["map"]["kernel"]
    assert kernel.shape == (1, 2, 4, 4)


def test_a_missing_map_is_initialized_by_its_layer():
    half = replace(RELU, mixer="linear,full")
    whole, rest = (remap_params(weights(old), old, RELU) for old in (FULL, half))
    kernels = [
        nnx.to_pure_dict(p)["stack"]["layers"][0]["mixer"]["map"]["kernel"] for p in (whole, rest)
    ]
    assert (kernels[0][0] != kernels[0][1]).any()
    assert not kernels[1][0].any()  # the given value
    assert (kernels[1][1] == kernels[0][1]).all()


def test_a_map_of_another_size_is_an_error():
    old = replace(RELU, linear=LinearConfig())
    with pytest.raises(UserError, match=r"model\.linear\.features=4: the given feature maps"):
        remap_params(weights(old), old, RELU)


def test_gates_are_new_kept_or_dropped():
    given = jax.tree.map(lambda a: a + 7, weights(GATED))
    plain = replace(GATED, fam_update="sum")
    assert gate(remap_params(given, GATED, replace(GATED, memory_segments=3)))["bias"].min() == 7
    assert names(remap_params(given, GATED, plain)) == names(weights(plain))
    new = gate(remap_params(weights(plain), plain, GATED))
    np.testing.assert_allclose(1 / jax.nn.sigmoid(new["bias"][1]), [1.5, 9.798, 64], rtol=1e-3)
    assert not new["weight"].any()


def test_gates_of_another_number_of_tokens_are_new():
    given = jax.tree.map(lambda a: a + 7, weights(GATED))
    longer = gate(remap_params(given, GATED, replace(GATED, fam_len=5)))
    assert longer["bias"].shape == (2, 5)
    assert longer["bias"].max() < 1  # -log(1.5 - 1)
    assert longer["weight"].min() == 7


def test_a_prompt_becomes_prefixes_and_back():
    prefixed = replace(GATED, fam_init="prefix")
    given = jax.tree.map(lambda a: a + 7, weights(prefixed))
    kept = remap_params(given, prefixed, replace(prefixed, fam_position="zero"))
    assert prefix(kept).min() > 2
    new = prefix(remap_params(weights(GATED), GATED, prefixed))
    # each layer's own
    assert new.shape == (2, 3, GATED.width)
    assert np.abs(new[0] - new[1]).max() > 0.1
    assert names(remap_params(given, prefixed, GATED)) == names(weights(GATED))


def prefix(params):
    return nnx.to_pure_dict(params)["stack"]["layers"][0]["mixer"]["prefix"]


def test_rotations_may_change_and_norms_may_not() -> None:
    scaled = replace(FULL, arch=ArchConfig(rope_scaling="linear", rope_factor=4))
    check_compatible(FULL, scaled)
    assert names(remap_params(weights(FULL), FULL, scaled)) == names(weights(FULL))
    with pytest.raises(UserError, match=r"norm_eps=0\.1: the given weights have 1e-06"):
        check_compatible(FULL, replace(FULL, arch=ArchConfig(norm_eps=0.1)))


def test_timescales_of_gates_that_are_kept_cannot_change() -> None:
    """They set initial values, so they would have no effect."""
    other = replace(GATED, fam_max_timescale=8.0)
    with pytest.raises(UserError, match=r"model\.fam_max_timescale=8: the given gates are trained"):
        check_compatible(GATED, other)
    check_compatible(replace(GATED, fam_update="sum"), other)
    check_compatible(GATED, replace(other, fam_len=5))
    check_compatible(GATED, replace(other, mixer="bswa"))


def gate(params):
    return nnx.to_pure_dict(params)["stack"]["layers"][0]["mixer"]["memory_gate"]


def test_stacks_whose_weights_are_compatible() -> None:
    """Stacks with the same positions are compatible, except the LSTM, which shares nothing."""
    rotary = FeedbackConfig(positions="rotary")
    models = {
        name: ModelConfig(stack=name, block_len=1, feedback=rotary)
        for name in ("residual", "feedback", "transformer", "lstm", "rmt", "autocompressor")
    }
    for old, new in itertools.permutations(models, 2):
        if "lstm" in (old, new):
            with pytest.raises(UserError, match=f"model.stack={new}: the given weights are of"):
                check_compatible(models[old], models[new])
        else:
            check_compatible(models[old], models[new])
    learned = ModelConfig(stack="feedback", block_len=1)
    with pytest.raises(UserError, match=r"have learned ones; set model\.stack=feedback"):
        check_compatible(learned, models["residual"])
