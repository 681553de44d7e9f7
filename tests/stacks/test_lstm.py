"""The LSTM baseline; contracts of all stacks are in `tests/contracts`."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from contracts.harness import close, jit, normal, same
from flax import nnx
from jax.sharding import PartitionSpec as P

from famjax.config.schema import MeshConfig, ModelConfig
from famjax.core.types import Context
from famjax.parallel import sharding
from famjax.stacks import lstm
from famjax.stacks.lstm import LstmStack, LstmState

B, T, D, LAYERS = 3, 12, 8, 2
CONFIG = ModelConfig(layers=LAYERS, width=D)
X = normal(0, B, T, D)


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


@functools.cache
def parts() -> Any:
    """Return the graph and parameters with non-initial biases."""
    graph, params = nnx.split(LstmStack(CONFIG, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(3)
    return graph, jax.tree.map(lambda a: np.asarray(a) + 0.3 * rng.normal(size=a.shape), params)


@functools.cache
def _call() -> Any:
    return jit(lambda params, *args: nnx.merge(parts()[0], params)(*args))


def fresh(batch: int = B) -> LstmState:
    return jax.tree.map(np.asarray, LstmStack(CONFIG, rngs=nnx.Rngs(0)).init_state(batch))


def call(x: Any, state: Any, reset: Any = None, valid: Any = None) -> Any:
    return jax.tree.map(np.asarray, _call()(parts()[1], x, state, Context(reset, valid)))


def test_initial_forget_gates_and_state():
    params = nnx.to_pure_dict(nnx.split(LstmStack(CONFIG, rngs=nnx.Rngs(0)))[1])
    for i in range(LAYERS):
        np.testing.assert_array_equal(params["cells"][i]["bias"], np.eye(4)[1][:, None] + [0] * D)
    same(fresh(), LstmState(*np.zeros((2, LAYERS, B, D))))


def test_a_reset_at_padding_has_no_effect():
    _, start = call(X, fresh())
    _, state = call(X[:, :1], start, np.ones((B, 1), bool), np.zeros((B, 1), bool))
    same(state, start)


def test_gradient_equals_plain_differentiation():
    """With resets and padding; by parameters, inputs and state."""
    graph, params = parts()
    _, start = call(normal(1, B, 7, D), fresh())
    reset, valid = np.random.default_rng(2).random((2, B, T)) < np.array([0.2, 0.8])[:, None, None]
    probe, probes = normal(4, B, T, D), LstmState(*normal(5, 2, LAYERS, B, D))

    def loss(params, x, state):
        y, end = nnx.merge(graph, params)(x, state, Context(reset, valid))
        return (y * probe).sum() + sum((a * b).sum() for a, b in zip(end, probes, strict=True))

    def grad():
        return jit(jax.grad(loss, argnums=(0, 1, 2)))(params, X, start)

    ours = grad()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lstm, "recurrence", lambda *args: lstm._scan(*args)[:2])
        close(jax.tree.map(np.asarray, ours), jax.tree.map(np.asarray, grad()))
    seeds = itertools.count(10)
    moved = jax.tree.map(lambda a: normal(next(seeds), *a.shape), (params, X, start))
    value = jit(lambda e: loss(*jax.tree.map(lambda a, m: a + e * m, (params, X, start), moved)))
    along = sum((a * b).sum() for a, b in zip(*map(jax.tree.leaves, (ours, moved)), strict=True))
    np.testing.assert_allclose((value(1e-6) - value(-1e-6)) / 2e-6, along, rtol=1e-6)


def test_state_and_kernels_are_sharded_by_gates():
    _, params = parts()
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with_axes = LstmStack(CONFIG, rngs=nnx.Rngs(0)).state_axes()
    places = sharding.state_shardings(mesh, with_axes, fresh(4))
    assert places.c.spec == P(None, ("data", "fsdp"), "tensor")
    kernels = nnx.to_pure_dict(sharding.parameter_shardings(mesh, params))["cells"][0]
    assert kernels["input"]["kernel"].spec == P("fsdp", None, "tensor")
    # read at every token: no rows are communicated
    assert kernels["hidden"]["kernel"].spec == P(None, None, "tensor")
