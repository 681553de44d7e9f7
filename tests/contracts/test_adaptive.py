"""Adaptive input and softmax against a NumPy transcription; chunked losses."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracles import adaptive as oracle

from famjax.config.resolved import resolve_model
from famjax.config.schema import (
    AdaptiveConfig,
    ArchConfig,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from famjax.core.errors import UserError
from famjax.core.types import Context
from famjax.experiment.checks import validate, validate_model
from famjax.layers.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from famjax.models.language_model import LanguageModel
from famjax.models.remap_params import remap_params
from famjax.ops import losses
from famjax.ops.losses import num_chunks, token_losses
from famjax.parallel import sharding
from famjax.train.flops import forward_flops

from .harness import close, jit, normal

V, D, B, T = 44, 8, 4, 6
BASE = ModelConfig(
    vocab_size=V, layers=1, width=D, heads=2, mlp_width=8, block_len=2, mixer="bswa",
    adaptive=AdaptiveConfig("12,28", factor=2),
)  # fmt: skip
MODELS = {"tied": BASE, "untied": replace(BASE, tied=False)}
both = pytest.mark.parametrize("case", MODELS)
X = normal(0, B, T, D)
# the first and the last token of every cluster
TARGETS = np.resize([0, 11, 12, 27, 28, 43, 5, 20, 35], (B, T))


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


def parts(case: str) -> Any:
    return _parts(case, jnp.result_type(float))


@functools.cache
def _parts(case: str, dtype: Any) -> Any:
    return nnx.split(LanguageModel(MODELS[case], rngs=nnx.Rngs(0)))


def model(case: str, params: Any) -> LanguageModel:
    return nnx.merge(parts(case)[0], params)


def run(case: str, method: str, *args: Any) -> Any:
    """Call a method of the model, compiled."""
    f = jit(lambda params, *args: getattr(model(case, params), method)(*args))
    return jax.tree.map(np.asarray, f(parts(case)[1], *args))


def weights(case: str) -> tuple[list[Any], list[Any], Any]:
    """Return the clusters of the input, those of the softmax, and the clusters' entries."""
    p = jax.tree.map(np.asarray, nnx.to_pure_dict(parts(case)[1]))

    def of(module: Any) -> list[Any]:
        clusters = [module["clusters"][i] for i in range(3)]
        return [{"projection": None, **cluster} for cluster in clusters]

    inputs = of(p["embedding"])
    return inputs, inputs if case == "tied" else of(p["head"]), p["head"]["entries"]["kernel"]


def normed(x: Any) -> Any:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


@both
def test_equals_the_transcription(case):
    inputs, outputs, entries = weights(case)
    widths = [cluster["table"].shape for cluster in outputs]
    assert widths == [(12, 8), (16, 4), (16, 2)]
    embedded = run(case, "embed", TARGETS)
    found = run(case, "logits", X)
    nats, right = run(case, "losses", X, TARGETS)
    for i, j in np.ndindex(B, T):
        close(embedded[i, j], D**0.5 * oracle.embed(inputs, TARGETS[i, j]))
        expected = oracle.log_probs(outputs, entries, normed(X[i, j]))
        close(found[i, j], expected)
        assert np.exp(expected).sum() == pytest.approx(1)
        assert float(nats[i, j]) == pytest.approx(-expected[TARGETS[i, j]])
        assert right[i, j] == (expected.argmax() == TARGETS[i, j])
    np.testing.assert_allclose(np.exp(found).sum(-1), 1, rtol=1e-12)


@both
@pytest.mark.parametrize("bits", [32, 64])
def test_the_argmax_is_correct_in_every_cluster(case, bits):
    """Exact: the target's log-probability is computed by the same sum as the largest one."""
    with jax.enable_x64(bits == 64):
        towards = np.concatenate([np.zeros((D, 1)), weights(case)[2]], 1).T
        x = (normal(1, B, 50, D) + 5 * towards[np.arange(50) % 3]).astype(f"float{bits}")
        likeliest = run(case, "logits", x).argmax(-1).astype(np.int32)
        assert {0, 1, 2} == set(np.searchsorted([12, 28], np.unique(likeliest), "right"))
        assert run(case, "losses", x, likeliest)[1].all()
        assert not run(case, "losses", x, (likeliest + 1) % V)[1].any()


def grad(case: str, score: Any) -> Any:
    """Return gradients of weighted token losses by `score`, a function of the stack's outputs."""

    def loss(params, x):
        m = model(case, params)
        return (score(m, m.embed(TARGETS) + x)[0] * normal(2, B, T)).sum()

    params = parts(case)[1]
    return jax.tree.map(np.asarray, jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, X))


@both
def test_the_gradient_is_that_of_all_words(case, monkeypatch):
    """Values too, and chunked losses are the same."""
    whole = grad(case, lambda m, x: token_losses(m.logits(x), TARGETS))
    short = grad(case, lambda m, x: m.losses(x, TARGETS))
    close(short, whole)
    monkeypatch.setattr(losses, "LOGITS_BYTES", B * V * 4 * 2)
    assert num_chunks(B, T, V) == 3
    close(grad(case, lambda m, x: m.losses(x, TARGETS)), short)


def test_num_chunks():
    assert num_chunks(8, 1024, 258) == 1
    assert num_chunks(8, 1024, 32_000) == 16
    assert num_chunks(8, 1, 10**9) == 1
    assert num_chunks(1, 7, 10**9) == 7


@pytest.mark.parametrize("adaptive", ["", "20000,60000"])
def test_the_logits_of_a_large_vocabulary_are_never_all_in_memory(adaptive):
    v, b, t = 100_000, 4, 512
    with jax.enable_x64(False):
        config = replace(BASE, vocab_size=v, width=16, adaptive=AdaptiveConfig(adaptive, factor=2))
        graph, params = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))

        def loss(params, x, targets):
            return nnx.merge(graph, params).losses(x, targets)[0].sum()

        x = jax.ShapeDtypeStruct((b, t, 16), jnp.float32)
        targets = jax.ShapeDtypeStruct((b, t), jnp.int32)
        compiled = jit(jax.grad(loss, argnums=(0, 1))).lower(params, x, targets).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 0.4 * b * t * v * 4


def test_one_cluster_is_a_plain_softmax_and_a_projected_embedding():
    config = replace(BASE, adaptive=AdaptiveConfig())
    embedding = AdaptiveEmbedding(config, rngs=nnx.Rngs(0))
    (cluster,) = embedding.clusters
    close(np.asarray(embedding(TARGETS)), np.asarray(cluster.table[TARGETS] @ cluster.projection))
    head = AdaptiveSoftmax(config, rngs=nnx.Rngs(0))
    plain = jnp.einsum("btd,vd->btv", X, cluster.table[...])
    close(np.asarray(head.log_probs(X, embedding)), np.asarray(jax.nn.log_softmax(plain)))
    for a, b in zip(head.losses(X, TARGETS, embedding), token_losses(plain, TARGETS), strict=True):
        close(np.asarray(a), np.asarray(b))


@pytest.mark.long
@both
def test_sharded_equals_unsharded(case, monkeypatch):
    """With chunked losses: rows of a chunk stay on their devices."""
    monkeypatch.setattr(losses, "LOGITS_BYTES", B * V * 4 * 2)
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    params = parts(case)[1]
    rows = sharding.batch_sharding(mesh, B)
    lies = (sharding.parameter_shardings(mesh, params), rows)
    table = nnx.to_pure_dict(lies[0])["embedding"]["clusters"][1]["table"]
    assert tuple(table.spec) == ("tensor", "fsdp")

    def f(params, tokens):
        def loss(params):
            m = model(case, params)
            x, _ = m.stack(m.embed(tokens), m.init_state(B), Context())
            return m.losses(x, tokens)[0].sum()

        return jax.value_and_grad(loss)(params)

    on_one = jit(f)(params, TARGETS)
    with_mesh = jit(f)(*jax.device_put((params, TARGETS), lies))
    close(jax.tree.map(np.asarray, with_mesh), jax.tree.map(np.asarray, on_one))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cutoffs": "12,x"}, "cutoffs=12,x: give whole numbers"),
        ({"cutoffs": "12,"}, "cutoffs=12,: give whole numbers"),
        ({"cutoffs": "28,12"}, "cutoffs=28,12: each must be more than the one before"),
        ({"cutoffs": "0,12"}, "cutoffs=0,12: each must be more"),
        ({"cutoffs": "12,44"}, "12,44: the cluster from 44 on is empty in a vocabulary of 44"),
        ({"factor": 4}, "model.width=8 is not a multiple of model.adaptive.factor^2=16"),
        ({"factor": 0}, "model.adaptive.factor=0: must be at least 1"),
    ],
)  # fmt: skip
def test_bad_cutoffs(changes, said):
    with pytest.raises(UserError) as error:
        validate_model(replace(BASE, adaptive=replace(BASE.adaptive, **changes)))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_logit_cap_is_rejected():
    with pytest.raises(UserError, match="logit_cap"):
        validate_model(replace(BASE, arch=ArchConfig(logit_cap=3.0)))


def test_label_smoothing_is_rejected():
    train = TrainConfig(label_smoothing=0.1)
    with pytest.raises(UserError, match=r"^train.label_smoothing=0.1: an adaptive softmax has no"):
        validate(Config(model=BASE, data=DataConfig(length=2), train=train))


def test_weights_are_remapped_only_between_equal_clusters():
    params = parts("tied")[1]
    moved = remap_params(params, BASE, replace(BASE, mixer="swa", window=2))
    close(*(jax.tree.map(np.asarray, nnx.to_pure_dict(a))["embedding"] for a in (moved, params)))
    with pytest.raises(UserError, match=r"model\.adaptive"):
        remap_params(params, BASE, replace(BASE, adaptive=AdaptiveConfig()))
    with pytest.raises(UserError, match="is initialized from rows of the embedding"):
        remap_params(params, BASE, replace(BASE, mixer="fam"))


def test_flops_are_those_of_every_cluster():
    plain = replace(BASE, adaptive=AdaptiveConfig())
    head = 2 * D * (12 + 2) + 2 * 4 * (D + 16) + 2 * 2 * (D + 16)
    inputs = 2 * D * (8 + 4 + 2)
    flops = [forward_flops(resolve_model(model)) for model in (BASE, plain)]
    assert flops[0] - flops[1] == head + inputs - 2 * D * V
