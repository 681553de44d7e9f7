"""The gate of the bounded memory update."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from famjax.config.resolved import resolve_model
from famjax.config.schema import ModelConfig
from famjax.layers.memory_gate import MemoryGate

MODEL = resolve_model(ModelConfig(width=8, heads=2, fam_len=4, fam_update="gated"))


def test_initial_gates_have_the_timescales():
    opening = MemoryGate(MODEL)(jax.random.normal(jax.random.key(0), (2, 4, 8)))
    timescales = np.geomspace(1.5, 64, 4)
    expected = (1 / timescales - 0.01) / 0.99
    np.testing.assert_allclose(opening, np.broadcast_to(expected[:, None], (2, 4, 1)), rtol=1e-4)


def test_one_token_has_the_shortest_timescale():
    gate = MemoryGate(replace(MODEL, fam_len=1))
    np.testing.assert_allclose(jax.nn.sigmoid(gate.bias[...]), [1 / 1.5], rtol=1e-6)


def test_a_gate_below_the_threshold_is_exactly_closed():
    gate = MemoryGate(MODEL)
    gate.bias[...] = jnp.array([9.0, -4.5, -4.7, -50.0])
    opening = gate(jnp.ones((4, 8)))[:, 0]
    assert opening[0] > 0.999
    assert opening[1] > 0
    assert (opening[2:] == 0).all()


def test_without_a_threshold_no_gate_is_closed():
    gate = MemoryGate(replace(MODEL, fam_gate_threshold=0.0))
    gate.bias[...] = jnp.array([9.0, -4.5, -4.7, -50.0])
    np.testing.assert_allclose(gate(jnp.ones((4, 8)))[:, 0], jax.nn.sigmoid(gate.bias[...]))


def test_gates_do_not_depend_on_the_scale_of_their_inputs():
    """The gates of a grown memory neither open nor close."""
    gate = MemoryGate(MODEL)
    gate.weight[...] = jnp.linspace(-1, 1, 8)
    a = jax.random.normal(jax.random.key(1), (4, 8))
    np.testing.assert_allclose(gate(1000 * a), gate(a), rtol=1e-3)
