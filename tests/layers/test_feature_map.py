"""Feature maps against their transcription, and random features against their kernels."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts.harness import jit
from flax import nnx
from oracles import linear as oracle

from famjax.config.resolved import resolve_model
from famjax.config.schema import LinearConfig, ModelConfig
from famjax.layers import feature_map
from famjax.layers.feature_map import FeatureMap, orthogonal_vectors, random_vectors
from famjax.models.language_model import LanguageModel

G, R, E = 2, 3, 4
BASE = ModelConfig(vocab_size=9, layers=1, width=8, heads=G * R, kv_heads=G, head_dim=E)
KINDS = {"relu": 6, "learned_elu": 6, "cos": 6, "tanh": 6, "elu": E, "rfa": 6, "performer": 6}
WEIGHTS = {"rfa": {"tau": (G,)}} | {
    kind: {"bias": (G, 6), "kernel": (G, E, 6)} for kind in feature_map.LEARNED
}


def make_map(kind, features=6, **changes):
    linear = LinearConfig(kind, features=features)
    return FeatureMap(resolve_model(replace(BASE, linear=linear, **changes)), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_transcription(kind):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        phi = make_map(kind)
        params = nnx.state(phi, nnx.Param)
        assert {name: a.shape for name, a in nnx.to_pure_dict(params).items()} == WEIGHTS.get(
            kind, {}
        )
        weights = jax.tree.map(lambda a: rng.uniform(0.5, 1.5, a.shape), params)
        nnx.update(phi, weights)
        x = 2 * rng.normal(size=(2, G, R, E))
        found = np.asarray(jit(phi.__call__)(x))
        count = feature_map.num_vectors(replace(BASE, linear=LinearConfig(kind, features=6)))
        drawn = random_vectors if kind == "rfa" else orthogonal_vectors
        expected = oracle.phi_of(kind, nnx.to_pure_dict(weights), drawn(G, E, count or 1))
    assert found.shape == (2, G, R, KINDS[kind])
    for at in np.ndindex(2, G, R):
        np.testing.assert_allclose(found[at], expected(at[1], x[at]), rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_finite_for_zero_inputs_and_narrow_heads(kind):
    phi = make_map(kind, dtype="bfloat16")
    x = jnp.zeros((G, R, E), jnp.bfloat16)

    @jit
    def both(x):
        return phi(x), jax.grad(lambda x: phi(x).astype(jnp.float32).sum())(x)

    features, gradient = both(x)
    assert features.dtype == x.dtype
    assert jnp.isfinite(features).all()
    assert jnp.isfinite(gradient).all()


def similar(kind, q, k, features):
    """Return phi(q) phi(k) of one head."""
    config = replace(BASE, heads=1, kv_heads=1, linear=LinearConfig(kind, features=features))
    phi = FeatureMap(resolve_model(config), rngs=nnx.Rngs(0))
    return float(jit(lambda q, k: (phi(q) * phi(k)).sum())(q[None, None], k[None, None]))


@pytest.mark.parametrize("seed", range(3))
def test_random_features_approximate_their_kernel(seed):
    """exp(q k / sqrt(e)) for positive features; for rfa the Gaussian kernel of unit vectors."""
    q, k = 0.6 * np.random.default_rng(seed).normal(size=(2, E))
    assert similar("performer", q, k, 20_000) == pytest.approx(np.exp(q @ k / E**0.5), rel=0.05)
    apart = q / np.linalg.norm(q) - k / np.linalg.norm(k)
    gaussian = 1e-4 * 10_000 * np.exp(-apart @ apart / 2)
    assert similar("rfa", q, k, 20_000) == pytest.approx(gaussian, rel=0.05)


def test_random_vectors_are_fixed_and_orthogonal_by_blocks():
    assert random_vectors(1, 2, 2)[0, 0, 0] == pytest.approx(1.764052345967664)
    w = orthogonal_vectors(2, 4, 10)
    assert w.shape == (2, 4, 10)
    for head in w:
        for block in (head[:, :4], head[:, 4:8], head[:, 8:]):
            products = block.T @ block
            np.testing.assert_allclose(products, np.diag(np.diag(products)), atol=1e-12)
    assert not np.allclose(w[0], w[1])
    lengths = np.square(np.linalg.norm(orthogonal_vectors(1, 16, 1600)[0], axis=0))
    assert lengths.mean() == pytest.approx(16, rel=0.05)
    assert lengths.std() == pytest.approx(32**0.5, rel=0.15)


def test_random_vectors_are_not_variables():
    config = replace(BASE, mixer="linear", linear=LinearConfig("performer"))
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    _, params, rest = nnx.split(model, nnx.Param, ...)
    assert not jax.tree.leaves(rest)
    mixer = nnx.to_pure_dict(params)["stack"]["layers"][0]["mixer"]
    assert set(mixer) == {"qkv"}
