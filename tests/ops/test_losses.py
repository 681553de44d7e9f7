"""Label smoothing against NumPy and PyTorch, and in chunks."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import torch
from flax import nnx
from oracles import losses as oracle

from famjax.config.schema import AdaptiveConfig, MeshConfig
from famjax.models.language_model import LanguageModel
from famjax.ops import losses
from famjax.ops.losses import num_chunks, smoothed_token_losses, token_losses
from famjax.parallel import sharding, traced

B, T, V = 4, 6, 258
SMOOTHING = 0.1
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(B, T, V)) * 3
TARGETS = RNG.integers(0, V, (B, T)).astype(np.int32)
WEIGHTS = RNG.normal(size=(B, T))
X = RNG.normal(size=(B, T, 16))


@pytest.fixture(autouse=True)
def wide() -> Any:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("smoothing", [0.0, SMOOTHING, 0.6])
def test_value_and_gradient_equal_numpy(smoothing: float) -> None:
    def loss(logits: Any) -> Any:
        scores = smoothed_token_losses(logits, TARGETS, smoothing)
        return (scores[2] * WEIGHTS).sum(), scores

    gradient, scores = jax.grad(loss, has_aux=True)(LOGITS)
    for i, j in np.ndindex(B, T):
        expected = oracle.loss(LOGITS[i, j], TARGETS[i, j], smoothing)
        assert float(scores[2][i, j]) == pytest.approx(expected, rel=1e-12)
        slope = WEIGHTS[i, j] * oracle.gradient(LOGITS[i, j], TARGETS[i, j], smoothing)
        np.testing.assert_allclose(gradient[i, j], slope, rtol=0, atol=1e-13)
    # the first two are those without smoothing
    for found, plain in zip(scores, token_losses(LOGITS, TARGETS), strict=False):
        np.testing.assert_array_equal(found, plain)


def test_is_pytorch_s_definition() -> None:
    logits = torch.tensor(LOGITS.reshape(-1, V), requires_grad=True)
    targets = torch.tensor(TARGETS.reshape(-1).astype(np.int64))
    loss = torch.nn.CrossEntropyLoss(label_smoothing=SMOOTHING)(logits, targets)
    loss.backward()
    found, gradient = jax.value_and_grad(
        lambda logits: smoothed_token_losses(logits, TARGETS, SMOOTHING)[2].mean()
    )(LOGITS)
    assert float(found) == pytest.approx(loss.item(), rel=1e-12)
    np.testing.assert_allclose(
        np.reshape(gradient, (-1, V)), logits.grad.numpy(), rtol=0, atol=1e-15
    )


@functools.cache
def parts(tied: bool) -> Any:
    config = replace(tiny.SHAPE, layers=1, mixer="bswa", tied=tied)
    return nnx.split(LanguageModel(config, rngs=nnx.Rngs(0)))


def model_gradient(tied: bool, loss: Any, params: Any = None, x: Any = X) -> Any:
    """Return value and gradients by parameters and x of weighted losses: a function (model, x)."""
    graph, own = parts(tied)

    def total(params: Any, x: Any) -> Any:
        return (loss(nnx.merge(graph, params), x) * WEIGHTS).sum()

    found = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(own if params is None else params, x)
    return jax.tree.map(np.asarray, found)


def smoothed(model: LanguageModel, x: Any) -> Any:
    return model.smoothed_losses(x, jnp.asarray(TARGETS), SMOOTHING)[2]


def literal(model: LanguageModel, x: Any) -> Any:
    """The definition, from log p of all words."""
    log_p = jax.nn.log_softmax(model.logits(x))
    nll = -jnp.take_along_axis(log_p, jnp.asarray(TARGETS)[..., None], -1)[..., 0]
    return (1 - SMOOTHING) * nll + SMOOTHING * -log_p.mean(-1)


def assert_close(a: Any, b: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-11), a, b)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_s_chunks_give_the_definition(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = model_gradient(tied, literal)
    assert_close(model_gradient(tied, smoothed), expected)
    monkeypatch.setattr(losses, "LOGITS_BYTES", B * V * 4 * 2)
    assert num_chunks(B, T, V) == 3
    assert_close(model_gradient(tied, smoothed), expected)
    graph, params = parts(tied)
    scores = nnx.merge(graph, params).smoothed_losses(
        jnp.asarray(X), jnp.asarray(TARGETS), SMOOTHING
    )
    plain = nnx.merge(graph, params).losses(jnp.asarray(X), jnp.asarray(TARGETS))
    assert_close(scores[:2], plain)
    assert np.abs(scores[2] - plain[0]).max() > 0.1


def test_a_vocabulary_on_several_devices_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LOGITS_BYTES", B * V * 4 * 2)
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    params = parts(True)[1]
    spread = jax.device_put(params, sharding.parameter_shardings(mesh, params))
    x = jax.device_put(X, sharding.batch_sharding(mesh, B))
    assert_close(model_gradient(True, smoothed, spread, x), model_gradient(True, smoothed))


@pytest.mark.parametrize("tied", [True, False])
def test_chunks_on_several_devices_reduce_the_table_s_gradient_once(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GSPMD by itself reduces the gradient of the table in each iteration over the chunks."""
    monkeypatch.setattr(losses, "LOGITS_BYTES", V * 4 * 2)
    mesh = sharding.make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])
    graph, params = parts(tied)

    def total(params: Any, x: Any) -> Any:
        return (smoothed(nnx.merge(graph, params), x) * WEIGHTS).sum()

    rows = sharding.batch_sharding(mesh, B)
    on_mesh = jax.jit(
        traced.with_mesh(mesh, jax.value_and_grad(total, argnums=(0, 1))),
        in_shardings=(sharding.parameter_shardings(mesh, params), rows),
    )
    found = on_mesh(params, jax.device_put(X, rows))
    monkeypatch.setattr(losses, "LOGITS_BYTES", 2**20)
    assert_close(jax.tree.map(np.asarray, found), model_gradient(tied, smoothed))
    monkeypatch.setattr(losses, "LOGITS_BYTES", V * 4 * 2)
    text = on_mesh.lower(params, jax.device_put(X, rows)).compile().as_text()
    reduced = re.findall(r" = (.*?) all-reduce\(.*?/while/body", text)
    # sums of each token over the shards of the vocabulary, and no gradient of a shard
    assert reduced
    shard = f"[16,{V // 2}]", f"[{V // 2},16]"
    assert not any(shape in shapes for shape in shard for shapes in reduced), reduced


def test_the_logits_of_a_large_vocabulary_are_never_all_in_memory() -> None:
    v, b, t = 100_000, 4, 512
    with jax.enable_x64(False):
        config = replace(tiny.SHAPE, layers=1, mixer="bswa", vocab_size=v)
        graph, params = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))

        def loss(params: Any, x: Any, targets: Any) -> Any:
            return nnx.merge(graph, params).smoothed_losses(x, targets, SMOOTHING)[2].sum()

        x = jax.ShapeDtypeStruct((b, t, 16), jnp.float32)
        targets = jax.ShapeDtypeStruct((b, t), jnp.int32)
        lowered = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x, targets)
        assert lowered.compile().memory_analysis().temp_size_in_bytes < 0.4 * b * t * v * 4


def test_an_adaptive_softmax_has_none() -> None:
    config = replace(tiny.SHAPE, mixer="bswa", adaptive=AdaptiveConfig("20,60", 2))
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    with pytest.raises(AssertionError):
        model.smoothed_losses(jnp.asarray(X), jnp.asarray(TARGETS), SMOOTHING)
