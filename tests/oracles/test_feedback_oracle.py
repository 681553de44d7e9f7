"""The transcription of the Feedback Transformer against numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from . import feedback as oracle
from . import transformer
from .test_oracles import CLOSE, D, E, changed_rows, layer, sequence

L, TAU, T = 2, 3, 9


def stack(composition: str = "all", **changes) -> oracle.Stack:
    rng = np.random.default_rng(4)
    w = oracle.Stack(
        [layer(seed=10 + i, mlp="gelu", norm="layernorm") for i in range(L)],
        TAU,
        composition,
        logits=rng.normal(size=(L, L + 1)),
        distances=rng.normal(size=(TAU, E)),
    )
    return replace(w, **changes)


X = sequence(T)


def changed_by(w: oracle.Stack, token: int) -> list[int]:
    """Return the tokens whose outputs depend on one token's input."""
    other = X.copy()
    other[token] += sequence(1, seed=6)[0]  # not a constant, which LayerNorm removes
    return np.flatnonzero(changed_rows(oracle.stack(w, other)[0], oracle.stack(w, X)[0])).tolist()


def test_a_token_sees_the_memory_of_tau_tokens_before_it():
    one = stack("layer", layers=[layer()])
    assert changed_by(one, 2) == [2, 3, 4, 5]
    # a Transformer layer sees as far back as the layer below, plus tau
    assert changed_by(stack("previous"), 1) == list(range(1, 1 + L * TAU + 1))


@pytest.mark.parametrize("composition", ["all", "average", "top", "same_and_lower"])
def test_a_memory_of_outputs_has_an_unlimited_receptive_field(composition):
    assert changed_by(stack(composition), 1) == list(range(1, T))


@pytest.mark.parametrize("pre_norm", [True, False])
def test_the_first_token_attends_to_nothing(pre_norm):
    """It passes through norms and feed-forwards only."""
    w = stack(pre_norm=pre_norm)
    x = X[0]
    for own in w.layers:
        first, second = (own.norm1_scale, own.norm1_bias), (own.norm2_scale, own.norm2_bias)
        if pre_norm:
            x = x + transformer.feed_forward(own.mlp, transformer.norm(x, *second))
        else:
            x = transformer.norm(x, *first)
            x = transformer.norm(x + transformer.feed_forward(own.mlp, x), *second)
    np.testing.assert_allclose(oracle.stack(w, X)[0][0], x, **CLOSE)


def test_composition_previous_is_a_transformer():
    """Equal to the other transcription with one layer; its first token must attend to something."""
    w = stack("previous", layers=[layer(seed=1)], distances=None)
    seen = [[0], *(range(max(0, t - TAU), t) for t in range(1, T))]
    expected = transformer.tokens_layer(w.layers[0], X, seen, 0, w.rope_base)
    np.testing.assert_allclose(oracle.stack(w, X)[0][1:], expected[1:], **CLOSE)


def test_compositions_of_the_memory():
    x = [np.full(D, 1.0), np.full(D, 10.0), np.full(D, 100.0)]

    def memory_of(composition, **changes):
        found = oracle.COMPOSITIONS[composition](stack(**changes), x)
        return [float(m[0]) for m in found]

    thirds = np.log([[1, 1, 2], [1, 1, 2]])
    assert memory_of("all", logits=thirds[:1]) == pytest.approx([52.75])
    assert memory_of("average") == pytest.approx([37])
    assert memory_of("top") == [100]
    assert memory_of("layer", layer=1) == [10]
    assert memory_of("same_and_lower", logits=thirds) == pytest.approx([5.5, 52.75])
    assert memory_of("previous") == [1, 10]


def test_shared_keys_equal_those_of_one_layer():
    w = stack(layers=[layer(seed=1)] * L)
    own = w.layers[0]
    keys = oracle.KeyWeights(own.norm1_scale, own.norm1_bias, own.wk, own.wv)
    np.testing.assert_allclose(
        oracle.stack(replace(w, keys=keys), X)[0], oracle.stack(w, X)[0], **CLOSE
    )
    assert changed_rows(oracle.stack(stack(keys=keys), X)[0], oracle.stack(stack(), X)[0])[1:].all()


def test_the_span_mask_has_a_ramp_and_weights_are_renormalized():
    """With R = 4 and z = 1.5: distances 1, 2, 3, 5 and 6 have 1, 7/8, 5/8, 1/8 and 0."""
    found = oracle.faded(np.full(5, 0.2), [9, 8, 7, 5, 4], 10, z=1.5, ramp=4)
    np.testing.assert_allclose(found, np.array([8, 7, 5, 1, 0]) / 21, **CLOSE)
    wide = stack(spans=np.full((L, 4), TAU))
    np.testing.assert_allclose(oracle.stack(wide, X)[0], oracle.stack(stack(), X)[0], **CLOSE)
    narrow = stack("layer", layers=[layer()], spans=np.full((1, 4), 1.0), ramp=1)
    assert changed_by(narrow, 2) == [2, 3]


def test_relative_positions_are_distances_to_the_memory():
    """The nearest vector matters from the second token on, the farthest once it is in range."""
    w = stack()
    for number in range(TAU):
        distances = w.distances.copy()
        distances[number] += 1
        other = oracle.stack(replace(w, distances=distances), X)[0]
        first = np.flatnonzero(changed_rows(other, oracle.stack(w, X)[0]))[0]
        assert first == max(2, number + 1)  # the second token sees only one memory


def test_relu_feed_forward():
    np.testing.assert_array_equal(transformer.relu(np.array([-2.0, 0.0, 3.0])), [0, 0, 3])
