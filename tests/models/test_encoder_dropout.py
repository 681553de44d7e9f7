"""Dropout and LayerDrop of the encoder, and of attention to it."""

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
from famjax.config.schema import ArchConfig, DropoutConfig, EncoderConfig, ModelConfig
from famjax.layers.cross_attention import CrossAttention, EncodedSource
from famjax.layers.dropout import DropoutKey
from famjax.stacks.encoder import Encoder

D, COUNT = 16, 400
# without a final norm, so that an encoder without layers returns its input
SHAPE = ModelConfig(
    vocab_size=19, layers=1, width=D, heads=2, mlp_width=8, arch=ArchConfig(pre_norm=False)
)
X = np.random.default_rng(0).normal(size=(1, 3, D)).astype(np.float32)


def encode(layers: int = 1, **rates: float) -> np.ndarray:
    """Return the encodings of X with many keys: [keys 3 d]."""
    config = replace(SHAPE, encoder=EncoderConfig(layers=layers), dropout=DropoutConfig(**rates))
    encoder = Encoder(resolve_model(config), rngs=nnx.Rngs(0))
    graph, keys, rest = nnx.split(encoder, DropoutKey, ...)

    @jax.jit
    @functools.partial(jax.vmap)
    def run(key: Any) -> Any:
        keyed = jax.tree.map(lambda _: key, keys)
        return nnx.merge(graph, keyed, rest)(jnp.asarray(X), jnp.ones((1, 3), jnp.int32))[0]

    return np.asarray(run(jax.random.key_data(jax.random.split(jax.random.key(1), COUNT))))


def assert_share(found: float, expected: float) -> None:
    """Check a share of COUNT draws, within four standard deviations."""
    assert abs(found - expected) < 4 * (expected * (1 - expected) / COUNT) ** 0.5


def test_layers_are_dropped_at_their_rate() -> None:
    is_dropped = (encode(layer=0.2) == X).all((1, 2))
    assert_share(is_dropped.mean(), 0.2)


def test_each_layer_is_dropped_by_itself() -> None:
    are_dropped = (encode(layers=2, layer=0.5) == X).all((1, 2))
    assert_share(are_dropped.mean(), 0.25)


@pytest.mark.parametrize("site", ["embedding", "output"])
def test_embeddings_and_outputs_are_dropped(site: str) -> None:
    # no layer is left
    y = encode(layer=1.0, **{site: 0.25})
    is_zero = y == 0
    assert abs(is_zero.mean() - 0.25) < 0.01
    scaled = np.broadcast_to(X / 0.75, y.shape)
    np.testing.assert_allclose(y[~is_zero], scaled[~is_zero], rtol=1e-6)
    assert len(np.unique(is_zero.reshape(COUNT, -1), axis=0)) > COUNT / 2


def test_embeddings_and_outputs_are_dropped_independently() -> None:
    kept = encode(layer=1.0, embedding=0.5, output=0.5) != 0
    assert abs(kept.mean() - 0.25) < 0.02


def test_attention_to_the_source_has_masks_of_its_own() -> None:
    """Self-attention of the same layer has the same key."""
    config = replace(SHAPE, encoder=EncoderConfig(layers=1), dropout=DropoutConfig(residual=0.5))
    cross = CrossAttention(resolve_model(replace(config, arch=ArchConfig())), rngs=nnx.Rngs(0))
    key, x = jax.random.key(3), jnp.asarray(X)
    keys = cross.project(x)
    added = cross(x, EncodedSource(keys, np.ones((1, 3, 3), bool)), key) - x
    heads = jnp.ones((1, 3, SHAPE.heads, D // SHAPE.heads))
    of_self = cross.qkv.output_projection(heads, x, key) - x
    for masked in (added, of_self):
        assert 0 < (np.asarray(masked) == 0).sum() < masked.size
    assert ((np.asarray(added) == 0) != (np.asarray(of_self) == 0)).any()
