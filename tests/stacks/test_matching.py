"""The matching loss (`train.match`): the stream of the softmax model, errors and gradients."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts import transcription
from contracts.harness import BASE, FAMILIES, LENGTH, POST, TOKENS, B, Runner, close, jit
from flax import nnx
from oracles import matching as oracle

from famjax.config.schema import LinearConfig, ModelConfig
from famjax.core.types import Context
from famjax.models.language_model import LanguageModel
from famjax.models.remap_params import remap_params
from famjax.parallel.sharding import path_name

RELU, TURNED = {"map": "relu", "rope": False}, {"map": "relu"}


def linear(mixer: str, map: dict[str, Any], **model: Any) -> ModelConfig:
    """Return a config whose chunks do not divide the stream."""
    config = replace(BASE, mixer=mixer, linear=LinearConfig(features=6, chunk=5, **map))
    return replace(config, **model)


CASES = {
    "linear": linear("linear", TURNED),
    "families": linear("linear", RELU, arch=FAMILIES["linear, families"].arch),
    "others": linear(
        "linear", {"map": "tanh"}, arch=FAMILIES["full, others"].arch, kv_heads=1, capacity=LENGTH
    ),
    "post": linear("linear", {"map": "rfa"}, arch=POST, norm="layernorm"),
    "hybrid": linear(
        "full,linear,linear", RELU | {"map": "cos"}, layers=6, kv_heads=4, remat="layer"
    ),
    "unrolled": linear("linear,swa", TURNED, layers=4, scan_layers=False),
    # FAM's memory prompt passes through the layers too
    "fam": linear("linear,fam", TURNED, layers=4, tied=False),
}
QUICK = ("linear", "hybrid", "fam")


def cases(*names: str) -> Any:
    """Parametrize a test with cases, of which quick runs have those in QUICK."""
    long = pytest.mark.long
    given = [name if name in QUICK else pytest.param(name, marks=long) for name in names]
    return pytest.mark.parametrize("case", given)


@functools.cache
def runner(case: str) -> Runner:
    return Runner(CASES[case])


def match(r: Runner, params: Any) -> tuple[Any, Any]:
    model = r.model(params)
    return model.stack.match_softmax(model.embed(TOKENS), Context())


@functools.cache
def match_outputs(case: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the stream after each layer [b t d] and the errors [l b]."""
    r = runner(case)
    return r.run(jit(functools.partial(match, r)))


@cases(*CASES)
def test_the_stream_is_that_of_the_softmax_model(case: str) -> None:
    """The softmax model has the same weights, full instead of linear attention, and no maps."""
    r = runner(case)
    config = replace(r.config, mixer=r.config.mixer.replace("linear", "full"))
    with jax.enable_x64(True):
        teacher = Runner(config, params=remap_params(r.params, r.config, config))

    def stream(params: Any) -> Any:
        model = teacher.model(params)
        return model.stack(model.embed(TOKENS), model.init_state(B), Context())[0]

    expected = teacher.run(jit(stream))
    close(match_outputs(case)[0], expected)
    # and it differs from the linear model's own stream
    own = r.run(jit(lambda p: r.model(p).stack(r.model(p).embed(TOKENS), r.model(p).init_state(B),
                                               Context())[0]))  # fmt: skip
    assert np.abs(own - expected).max() > 1e-3 * np.abs(expected).max()


@cases("linear", "hybrid", "unrolled")
def test_errors_equal_the_oracle(case: str) -> None:
    r = runner(case)
    layers = transcription.residual_layers(r.config, pure(r.params)["stack"])
    rows = pure(r.params)["embedding"][TOKENS] * r.config.width**0.5
    expected = np.transpose([oracle.errors(layers, row) for row in rows])
    found = match_outputs(case)[1]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-8)
    assert (expected > 0.01).all()


def pure(params: Any) -> Any:
    return jax.tree.map(np.asarray, nnx.to_pure_dict(params))


@cases("post", "unrolled", "fam")
def test_only_maps_have_gradients(case: str) -> None:
    """They equal central differences, and all other gradients are 0."""
    r = runner(case)
    loss = jit(lambda params: match(r, params)[1].mean())
    grads = r.run(jit(jax.grad(lambda params: match(r, params)[1].mean())))
    rng = np.random.default_rng(0)
    flat = jax.tree_util.tree_leaves_with_path(grads)
    maps = [path for path, _ in flat if "/map/" in path_name(path)]
    assert len(maps) == (1 if case == "post" else 2)
    assert not any(np.any(leaf) for path, leaf in flat if path not in maps)

    def draw(path: Any, a: Any) -> np.ndarray:
        return rng.normal(size=a.shape) if path in maps else np.zeros(a.shape)

    along = jax.tree_util.tree_map_with_path(draw, grads)

    def loss_at(step: float) -> float:
        with jax.enable_x64(True):
            params = jax.tree.map(lambda a, d: a + step * jnp.asarray(d), r.params, along)
            return float(loss(params))

    expected = (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6
    slope = sum(
        float((g * d).sum())
        for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(along), strict=True)
    )
    assert slope == pytest.approx(expected, rel=1e-5)
    assert abs(expected) > 1e-4


@pytest.mark.parametrize("scan", [True, False])
def test_the_backward_pass_recomputes_no_softmax(scan: bool) -> None:
    """The teacher's output is saved, so that softmax over n^2 scores is computed once."""
    config = linear("linear", TURNED, scan_layers=scan)
    graph, params = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))

    def loss(params: Any, tokens: Any) -> Any:
        model = nnx.merge(graph, params)
        return model.stack.match_softmax(model.embed(tokens), Context())[1].mean()

    def flops(f: Any) -> float:
        tokens = jax.ShapeDtypeStruct((1, 512), jnp.int32)
        return jax.jit(f).lower(params, tokens).compile().cost_analysis()["flops"]

    assert flops(jax.grad(loss)) < 1.3 * flops(loss)


def test_a_layer_with_zero_output_has_no_error() -> None:
    """With values of 0, the relative error does not divide by 0."""
    r = runner("linear")

    def without_values(path: Any, a: Any) -> Any:
        return jnp.zeros_like(a) if "/v/" in path_name(path) else a

    with jax.enable_x64(True):
        params = jax.tree_util.tree_map_with_path(without_values, r.params)
        loss = lambda params: match(r, params)[1].mean()  # noqa: E731
        value, grads = jit(jax.value_and_grad(loss))(params)
    assert float(value) == 0
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
