"""The contracts of a stack, for the LSTM baseline. In float64, but where types are the matter."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from oracles import lstm as oracle

from famjax.core import sharding
from famjax.core.config import MeshConfig, ModelConfig
from famjax.core.types import Context
from famjax.stacks import lstm
from famjax.stacks.lstm import LstmStack, LstmState

from .harness import close, jit, lane, normal, same

B, T, D, LAYERS = 3, 12, 8, 2
CONFIG = ModelConfig(layers=LAYERS, width=D)
X = normal(0, B, T, D)


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


@functools.cache
def parts() -> Any:
    """The graph and the parameters, biases other than they are drawn."""
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


def steps(x: Any, state: Any, reset: Any, valid: Any) -> Any:
    ys = []
    for t in range(x.shape[1]):
        now = slice(t, t + 1)
        y, state = call(x[:, now], state, reset[:, now], valid[:, now])
        ys.append(y)
    return np.concatenate(ys, 1), state


def test_it_equals_its_transcription():
    y, state = call(X, fresh())
    cells = nnx.to_pure_dict(parts()[1])["cells"]
    layers = [
        {"input": w["input"]["kernel"], "hidden": w["hidden"]["kernel"], "bias": w["bias"]}
        for w in (cells[i] for i in range(LAYERS))
    ]
    for i in range(B):
        expected, h, c = oracle.stack(layers, X[i])
        close(y[i], expected)
        close(lane(state, i), LstmState(h, c))


def test_it_begins_with_open_forget_gates_and_an_empty_state():
    params = nnx.to_pure_dict(nnx.split(LstmStack(CONFIG, rngs=nnx.Rngs(0)))[1])
    for i in range(LAYERS):
        np.testing.assert_array_equal(params["cells"][i]["bias"], np.eye(4)[1][:, None] + [0] * D)
    same(fresh(), LstmState(*np.zeros((2, LAYERS, B, D))))


@pytest.mark.parametrize("cuts", [[5], [1, 2, 11], range(1, T)])
def test_any_split_of_a_stream_into_calls_is_one_call(cuts):
    """Down to steps, which are calls of one token."""
    whole, end = call(X, fresh())
    state, ys = fresh(), []
    for x in np.split(X, list(cuts), 1):
        y, state = call(x, state)
        ys.append(y)
    close(np.concatenate(ys, 1), whole)
    close(state, end)


def test_a_token_changes_nothing_before_it_and_all_behind_it():
    whole, _ = call(X, fresh())
    for t in (0, 5, 11):
        other = X.copy()
        other[:, t] += 1
        y, _ = call(other, fresh())
        same(y[:, :t], whole[:, :t])
        assert (np.abs(y[:, t:] - whole[:, t:]).max(-1) > 1e-9).all()


def test_each_lane_is_a_fresh_stream_of_its_valid_tokens():
    """Lane 0 goes on; lane 1 begins anew at 4, ends at 8 and begins again at 10; lane 2 idles."""
    _, start = call(normal(1, B, 7, D), fresh())
    reset, valid = np.zeros((B, T), bool), np.ones((B, T), bool)
    reset[1, [4, 10]] = True
    valid[1, 8:10] = valid[2] = False
    for read in (call, steps):
        y, state = read(X, start, reset, valid)
        whole, end = call(X, start)
        close((y[0], lane(state, 0)), (whole[0], lane(end, 0)))
        first, last = call(X[:, 4:8], fresh())[0], call(X[:, 10:], fresh())
        close(y[1, 4:8], first[1])
        close((y[1, 10:], lane(state, 1)), (last[0][1], lane(last[1], 1)))
        same(lane(state, 2), lane(start, 2))
        junk = np.where(valid[..., None], X, 1e3)
        again, with_junk = read(junk, start, reset, valid)
        same((again[valid], with_junk), (y[valid], state))


def test_a_reset_at_padding_forgets_nothing():
    _, start = call(X, fresh())
    _, state = call(X[:, :1], start, np.ones((B, 1), bool), np.zeros((B, 1), bool))
    same(state, start)


def test_the_gradient_is_that_of_plain_differentiation():
    """With resets and padding, with respect to the parameters, the inputs and the state."""
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
        patch.setattr(lstm, "recur", lambda *args: lstm._scan(*args)[:2])
        close(jax.tree.map(np.asarray, ours), jax.tree.map(np.asarray, grad()))
    seeds = itertools.count(10)
    moved = jax.tree.map(lambda a: normal(next(seeds), *a.shape), (params, X, start))
    value = jit(lambda e: loss(*jax.tree.map(lambda a, m: a + e * m, (params, X, start), moved)))
    along = sum((a * b).sum() for a, b in zip(*map(jax.tree.leaves, (ours, moved)), strict=True))
    np.testing.assert_allclose((value(1e-6) - value(-1e-6)) / 2e-6, along, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_state_never_grows_and_stays_float32(dtype):
    with jax.enable_x64(False):
        stack = LstmStack(ModelConfig(layers=LAYERS, width=D, dtype=dtype), rngs=nnx.Rngs(0))
        x = jnp.asarray(X[:, :4], dtype)
        first = stack.init_state(B)
        y, state = stack(x, first, Context())
        for _ in range(10):
            y, state = stack(x, state, Context())
        _, state = stack.step(x[:, :1], state, Context())
        assert y.dtype == dtype
        assert all(a.shape == (LAYERS, B, D) and a.dtype == jnp.float32 for a in (*first, *state))
        plain = nnx.merge(nnx.split(LstmStack(CONFIG, rngs=nnx.Rngs(0)))[0], nnx.split(stack)[1])
        if dtype == "bfloat16":
            expected, _ = plain(x.astype(jnp.float32), first, Context())
            y, _ = stack(x, first, Context())
            assert np.abs(np.asarray(y, np.float32) - expected).max() < 0.02


def test_sharded_equals_unsharded():
    graph, params = parts()
    x, start, reset = normal(6, 4, T, D), fresh(4), np.arange(T) == np.array([[3], [99], [0], [7]])

    def f(params, x, state, reset):
        y, state = nnx.merge(graph, params)(x, state, Context(reset))
        return y, state

    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    lies = (
        sharding.parameter_shardings(mesh, params),
        sharding.batch_sharding(mesh, 4),
        sharding.state_shardings(mesh, nnx.merge(graph, params).state_axes(), start),
        sharding.batch_sharding(mesh, 4),
    )
    on_one = jit(f)(params, x, start, reset)
    on_mesh = jit(f, out_shardings=(None, lies[2]))(
        *jax.device_put((params, x, start, reset), lies)
    )
    assert on_mesh[1].c.sharding.spec == P(None, ("data", "fsdp"), "tensor")
    kernel = nnx.to_pure_dict(lies[0])["cells"][0]["input"]["kernel"]
    assert kernel.spec == P("fsdp", None, "tensor")
    close(jax.tree.map(np.asarray, on_mesh), jax.tree.map(np.asarray, on_one))
