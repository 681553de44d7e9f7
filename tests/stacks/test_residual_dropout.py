"""Dropout in the residual stack: what each site drops, and that inference drops nothing."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from famjax.config.resolved import resolve_model
from famjax.config.schema import ArchConfig, Config, DropoutConfig, ModelConfig
from famjax.core.errors import UserError
from famjax.core.types import Context
from famjax.experiment.checks import validate
from famjax.experiment.load import load_config
from famjax.layers.dropout import DropoutKey, split_key
from famjax.mixers import fam_scan
from famjax.stacks.residual import ResidualStack
from famjax.train.partition import inference_config

B, T, D, W = 2, 16, 16, 4
SHAPE = ModelConfig(
    layers=2,
    width=D,
    heads=2,
    mlp_width=32,
    mlp="relu",
    block_len=W,
    window=6,
    fam_len=2,
    capacity=32,
)
ALL = {"attention": 0.3, "hidden": 0.3, "residual": 0.2, "embedding": 0.2, "output": 0.2}
EVERY = DropoutConfig(**ALL, layer=0.3)
# swa and bswa_sg are bswa with another mask or gradient
MIXERS = ("full", "bswa", "fam", "fm", "linear")
FED_BACK = ("fam", "fm")  # the memory has been through the layer's feed-forward
NO_ROTATION = ArchConfig(rotary_fraction=0.0)
X = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)

each_mixer = pytest.mark.parametrize("mixer", MIXERS)


def shape(mixer: str, dropout: DropoutConfig | None = None, **changes: Any) -> ModelConfig:
    return replace(SHAPE, mixer=mixer, dropout=dropout or DropoutConfig(), **changes)


@functools.cache
def _read(config: ModelConfig) -> Any:
    graph, params, keys = nnx.split(
        ResidualStack(resolve_model(config), rngs=nnx.Rngs(0)), nnx.Param, DropoutKey
    )
    assert bool(jax.tree.leaves(keys)) == any(vars(config.dropout).values())

    @jax.jit
    def read(params: Any, x: Any, data: Any, reset: Any = None) -> Any:
        stack = nnx.merge(graph, params, jax.tree.map(lambda _: data, keys))
        return stack(x, stack.init_state(len(x)), Context(reset))

    return params, read


def call(config: ModelConfig, key: int = 0, x: Any = X, params: Any = None, reset: Any = None):
    """Return the output and the state of one call from an empty memory."""
    made, read = _read(config)
    data = jnp.array([0, key], jnp.uint32)
    return jax.device_get(read(made if params is None else params, x, data, reset))


def same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def close(a: Any, b: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), a, b)


# sites that depend on the mixer for each mixer, other sites for one mixer
PLACES = [(m, p) for m in MIXERS for p in ("attention", "residual")] + [
    ("full", p) for p in ("hidden", "embedding", "output", "layer")
]


@pytest.mark.parametrize(("mixer", "site"), PLACES)
def test_each_site_drops_only_in_training(mixer: str, site: str) -> None:
    plain = call(shape(mixer))
    given = shape(mixer, DropoutConfig(**{site: 0.5}))
    one, again, *others = (call(given, key) for key in (1, 1, 2, 3, 4))
    same(one, again)
    nothing = site == "attention" and mixer == "linear"
    if nothing:
        same(one, plain)
    else:
        # four masks of two layers are all equal with probability 4^-3
        assert any(np.abs(one[0] - other[0]).max() > 1e-3 for other in others)
        assert any(np.abs(plain[0] - other[0]).max() > 1e-3 for other in (one, *others))
    assert inference_config(given) == shape(mixer)


@each_mixer
def test_step_and_init_state_have_no_dropout(mixer: str) -> None:
    def begin(config: ModelConfig) -> Any:
        stack = ResidualStack(resolve_model(config), rngs=nnx.Rngs(0))
        state = stack.init_state(B)
        return state, stack.step(X[:, :1], state, Context())

    same(begin(shape(mixer, EVERY)), begin(shape(mixer)))


@pytest.mark.long
@pytest.mark.parametrize("mixer", ["bswa", pytest.param("fam", marks=pytest.mark.slow)])
def test_scan_and_remat_have_equal_masks(mixer: str) -> None:
    config = shape(mixer, EVERY)

    def gradients(config: ModelConfig) -> Any:
        params, read = _read(config)
        data = jnp.array([0, 5], jnp.uint32)
        return jax.grad(lambda p: jnp.square(read(p, X, data)[0]).sum())(params), call(config, 5)

    expected = gradients(config)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(expected[0]))
    changes = {"scan_layers": False, "remat": "attention"}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        gradients(replace(config, **changes)),
        expected,
    )


def _zero_weights(params: Any, *parts: str) -> Any:
    """Return the parameters with zero weights in these parts, so that they add nothing."""
    return jax.tree_util.tree_map_with_path(
        lambda path, a: 0 * a if any(f"'{p}'" in jax.tree_util.keystr(path) for p in parts) else a,
        params,
    )


@pytest.mark.parametrize(
    ("mixer", "site", "silent"),
    [("linear", "hidden", "out"), *((m, "attention", "down") for m in ("full", "bswa", "fam"))],
)
def test_masks_differ_by_token_and_keep_the_mean(mixer: str, site: str, silent: str) -> None:
    """With one layer and equal tokens, the layer's output is linear in what is dropped."""
    b, t, rate = 16, 64, 0.4
    x = np.broadcast_to(X[:1, :1], (b, t, D))
    config = shape(mixer, layers=1, fam_len=1, capacity=t, arch=NO_ROTATION)
    params = _zero_weights(_read(config)[0], silent)
    plain = call(config, x=x, params=params)[0] - x
    dropping = replace(config, dropout=DropoutConfig(**{site: rate}))
    found = call(dropping, 3, x, params)[0] - x
    if mixer != "fam":  # its memory has dropout too and is not linear
        error = found.reshape(-1, D).std(0) / len(found.reshape(-1, D)) ** 0.5
        assert (np.abs((found - plain).reshape(-1, D).mean(0)) < 5 * error + 1e-6).all()
    # a document's first token has one attention weight, which is kept or dropped
    tokens = found[:, W:].round(5)
    assert len(np.unique(tokens[0], axis=0)) > 4
    assert len(np.unique(tokens[:, 0], axis=0)) > 4
    # masks differ between blocks
    blocks = tokens[0].reshape(-1, W * D)
    assert len(np.unique(blocks, axis=0)) == len(blocks)


@each_mixer
def test_residual_dropout_applies_to_both_branches(mixer: str) -> None:
    """Residual dropout applies to attention and to the feed-forward, with different masks."""
    config = shape(mixer, layers=1)
    for silent in ("out", "down"):
        params = _zero_weights(_read(config)[0], silent)
        plain = call(config, params=params)[0] - X
        dropping = replace(config, dropout=DropoutConfig(residual=0.25))
        found = call(dropping, 3, params=params)[0] - X
        if mixer in FED_BACK:  # except for the first block, the memory differs
            plain, found = plain[:, :W], found[:, :W]
        kept = np.abs(found) > 1e-7
        np.testing.assert_allclose(found[kept], plain[kept] / 0.75, rtol=1e-3, atol=1e-5)
        assert abs(kept.mean() - 0.75) < 5 * (0.25 * 0.75 / kept.size) ** 0.5


@each_mixer
def test_dropped_layers_add_nothing_and_update_their_state(mixer: str) -> None:
    y, state = call(shape(mixer, DropoutConfig(layer=0.999999)))
    same(y, X)
    params = _zero_weights(_read(shape(mixer))[0], "out", "down")
    if (
        mixer in FED_BACK
    ):  # the silenced parts also update the memory: only the first layer's is equal
        expected = call(shape(mixer))[1]
        same(*(jax.tree.map(lambda a: a[:1], s) for s in (state, expected)))
    else:
        close(state, call(shape(mixer), params=params)[1])


def test_layers_are_dropped_independently() -> None:
    """Outputs equal those of a model in which the dropped layers add nothing."""
    config = shape("full", layers=4)
    params = _read(config)[0]
    drawn = set()
    for key in range(5):
        found = call(replace(config, dropout=DropoutConfig(layer=0.5)), key)[0]
        for mask in range(16):
            keep = np.array([(mask >> i) & 1 for i in range(4)])

            def some(path: Any, a: Any, keep: Any = keep) -> Any:
                at = jax.tree_util.keystr(path)
                added = "'out'" in at or "'down'" in at
                return a * keep.reshape(-1, *(1,) * (a.ndim - 1)) if added else a

            expected = call(config, params=jax.tree_util.tree_map_with_path(some, params))[0]
            if np.abs(found - expected).max() < 1e-5:
                drawn.add(mask)
                break
        else:
            pytest.fail("no set of layers gives what was found")
    assert len(drawn) > 2


@pytest.mark.parametrize("site", ["embedding", "output"])
def test_embedding_and_output_dropout(site: str) -> None:
    x = np.random.default_rng(1).normal(size=(B, 32, D)).astype(np.float32)
    y, _ = call(shape("full", DropoutConfig(**{"layer": 0.999999, site: 0.25})), x=x)
    kept = y != 0
    np.testing.assert_allclose(y[kept], x[kept] / 0.75, rtol=1e-6)
    assert abs(kept.mean() - 0.75) < 5 * (0.25 * 0.75 / x.size) ** 0.5


@pytest.mark.long
def test_fam_updates_have_dropout_with_a_mask_for_each_block(monkeypatch: Any) -> None:
    config = shape("fam", layers=1, memory_segments=0, arch=NO_ROTATION)
    plain, dropping = (
        call(replace(config, dropout=DropoutConfig(hidden=rate)))[1][0].fam for rate in (0.0, 0.5)
    )
    assert np.abs(plain - dropping).max() > 1e-3
    # one key for all blocks would give equal updates
    with monkeypatch.context() as patch:
        patch.setattr(
            fam_scan, "split_key", lambda *given: split_key(*given)[:1].repeat(given[-1], 0)
        )
        _read.cache_clear()
        alike = call(replace(config, dropout=DropoutConfig(hidden=0.5)))[1][0].fam
    _read.cache_clear()
    assert np.abs(alike - dropping).max() > 1e-3
    # rows have different masks
    x = np.broadcast_to(X[:1], X.shape)
    fam = call(replace(config, dropout=DropoutConfig(hidden=0.5)), x=x)[1][0].fam[0]
    assert np.abs(fam[0] - fam[1]).max() > 1e-3


@pytest.mark.long
def test_a_reset_starts_from_the_prompt_without_dropout() -> None:
    """A reset within a call gives the same memory as an empty state."""
    reset = np.zeros((B, T), bool)
    reset[:, 0] = True
    config = shape("fam", EVERY)
    close(call(config, 2, reset=reset), call(config, 2))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            "model.mixer=linear model.dropout.attention=0.1",
            "model.dropout.attention: has no effect",
        ),
        ("model.dropout.residual=1", "less than 1"),
        ("model.stack=lstm model.block_len=1 model.dropout.residual=0.1", "no such dropout"),
    ],
)
def test_invalid_dropout_is_rejected(given: str, told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        load_config("text_bswa", given.split())
    assert "\n" not in str(caught.value)


def test_attention_dropout_needs_attention_in_some_layer() -> None:
    config = load_config("text_bswa", ["model.mixer=linear,bswa", "model.dropout.attention=0.1"])
    validate(config)
    assert isinstance(config, Config)
