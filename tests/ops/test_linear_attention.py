"""Chunkwise and recurrent forms and the custom VJP against the quadratic definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts.harness import jit

from famjax.ops.linear_attention import (
    EPS,
    Sums,
    attend_all,
    chunkwise_attention,
    recurrent_attention,
)

B, T, G, R, K, E = 2, 11, 2, 3, 5, 4
# in lane 0 documents start at the call's start and within chunks, in lane 1 once
RESET = np.zeros((B, T), bool)
RESET[0, [0, 4, 5]] = RESET[1, 8] = True
START = np.maximum.accumulate(np.where(RESET, np.arange(T), -1), axis=1).astype(np.int32)
ON = np.full((B, T), -1, np.int32)


def random_inputs(dtype="float64", t=T):
    """Return positive features, values, and sums over earlier tokens."""
    rng = np.random.default_rng(0)
    q, k, z = (rng.random(shape) for shape in ((B, t, G, R, K), (B, t, G, K), (B, G, K)))
    v, s = rng.normal(size=(B, t, G, E)), rng.normal(size=(B, G, K, E))
    wide = jnp.promote_types(dtype, jnp.float32)
    q, k, v = (jnp.asarray(a, dtype) for a in (q, k, v))
    return q, k, v, Sums(jnp.asarray(s, wide), jnp.asarray(z, wide))


def definition(q, k, v, sums, start):
    """Equation 4 with a mask; Equation 5 after the last token."""
    index = jnp.arange(q.shape[1])
    seen = (start[:, :, None] == start[:, None]) & (index[:, None] >= index)
    before = start < 0
    a = jnp.einsum("bigrk,bjgk->bgrij", q, k) * seen[:, None, None]
    past = q * before[..., None, None, None]
    num = jnp.einsum("bgrij,bjge->bigre", a, v) + jnp.einsum("bigrk,bgke->bigre", past, sums.s)
    den = jnp.moveaxis(a.sum(-1), -1, 1) + jnp.einsum("bigrk,bgk->bigr", past, sums.z)
    last = k * (start == start[:, -1:])[..., None, None]
    kept = before[:, -1][:, None, None]
    s = sums.s * kept[..., None] + jnp.einsum("bjgk,bjge->bgke", last, v)
    return num / jnp.maximum(den, EPS)[..., None], Sums(s, sums.z * kept + last.sum(1))


def recurrent(q, k, v, sums, start):
    ys, read = [], jit(recurrent_attention)
    for i in range(q.shape[1]):
        now = slice(i, i + 1)
        # each step is a call: a document starts at or before its token
        begins = np.where(RESET[:, now] & (start[:, now] >= 0), 0, -1)
        y, sums = read(q[:, now], k[:, now], v[:, now], sums, jnp.asarray(begins))
        ys.append(y)
    return jnp.concatenate(ys, 1), sums


all_pairs = jit(definition)
compiled = functools.cache(jit)


@functools.cache
def chunkwise(chunk):
    return functools.partial(chunkwise_attention, chunk=chunk)


def close(a, b, tolerance):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.shape == y.shape
        assert jnp.isfinite(x).all()
        assert jnp.abs(x - y).max() <= tolerance * jnp.abs(y).max()


@pytest.mark.parametrize("start", [START, ON], ids=["documents", "one"])
@pytest.mark.parametrize("chunk", [1, 4, T, 64])
def test_chunkwise_equals_quadratic(start, chunk):
    with jax.enable_x64(True):
        args = random_inputs()
        close(compiled(chunkwise(chunk))(*args, start), all_pairs(*args, start), 1e-12)


@pytest.mark.parametrize("start", [START, ON], ids=["documents", "one"])
def test_recurrent_equals_quadratic(start):
    with jax.enable_x64(True):
        args = random_inputs()
        close(recurrent(*args, start), all_pairs(*args, start), 1e-12)


@functools.cache
def gradient(f):
    """Return gradients with respect to q, k, v and initial sums, of outputs and final sums."""

    def value(q, k, v, sums, start):
        rng = np.random.default_rng(1)
        leaves = jax.tree.leaves(f(q, k, v, sums, start))
        return sum((a * rng.normal(size=a.shape).astype(sums.s.dtype)).sum() for a in leaves)

    return jit(jax.grad(value, argnums=(0, 1, 2, 3)))


@pytest.mark.parametrize("start", [START, ON], ids=["documents", "one"])
@pytest.mark.parametrize("chunk", [4, T])
def test_gradient_equals_plain_differentiation(start, chunk):
    with jax.enable_x64(True):
        args = *random_inputs(), start
        close(gradient(chunkwise(chunk))(*args), gradient(definition)(*args), 1e-12)


def test_bfloat16_results_are_close_and_sums_are_float32():
    args = *random_inputs("bfloat16"), START
    wide = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype != np.int32 else a, args)
    y, sums = compiled(chunkwise(4))(*args)
    assert y.dtype == jnp.bfloat16
    assert sums.s.dtype == sums.z.dtype == jnp.float32
    close((y.astype(jnp.float32), sums), all_pairs(*wide), 0.01)
    ours = gradient(chunkwise(4))(*args)
    assert [a.dtype for a in ours[:3]] == [jnp.bfloat16] * 3
    narrowed = jax.tree.map(lambda a: a.astype(jnp.float32), ours)
    close(narrowed, gradient(definition)(*wide), 0.03)


def test_non_causal_attention():
    """The last token of a document attends to all of it with or without a causal mask."""
    with jax.enable_x64(True):
        q, k, v, sums = random_inputs()
        empty = jax.tree.map(jnp.zeros_like, sums)
        causal, _ = compiled(chunkwise(4))(q, k, v, empty, ON)
        close(attend_all(q, k, v)[:, -1], causal[:, -1], 1e-12)


def test_zero_features_give_zero_outputs_and_finite_gradients():
    q, k, v, sums = random_inputs("float32")
    args = (0 * q, 0 * k, v, jax.tree.map(jnp.zeros_like, sums), ON)
    y, _ = compiled(chunkwise(4))(*args)
    assert (y == 0).all()
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(gradient(chunkwise(4))(*args)))


def test_states_are_not_residuals():
    """States would take 32 x 32 numbers per chunk of 4 tokens, whose inputs are 4 x 3 x 32."""
    t, k = 1024, 32
    shapes = [(1, t, 1, 1, k), (1, t, 1, k), (1, t, 1, k)]
    q, key, v = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    sums = Sums(jnp.zeros((1, 1, k, k)), jnp.zeros((1, 1, k)))
    start = jnp.full((1, t), -1, jnp.int32)

    def loss(q, k, v):
        return jnp.square(chunkwise_attention(q, k, v, sums, start, 4)[0]).sum()

    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, key, v).compile()
    states = t // 4 * k * k * 4
    assert program.memory_analysis().temp_size_in_bytes < states


def test_a_document_of_100_000_tokens_stays_finite_and_near_the_mean():
    """In float32 steps: with similar weights the output is the mean of all values."""
    t, k = 100_000, 3
    rng = np.random.default_rng(0)
    keys = jnp.asarray(rng.random((t, 1, 1, 1, k)), jnp.float32)
    values = jnp.asarray(rng.normal(1, 1, size=(t, 1, 1, 1, k)), jnp.float32)
    on = jnp.full((1, 1), -1, jnp.int32)
    fresh = Sums(jnp.zeros((1, 1, k, k)), jnp.zeros((1, 1, k)))

    def token(sums, xs):
        key, v = xs
        y, sums = recurrent_attention(jnp.ones((1, 1, 1, 1, k)), key, v, sums, on)
        return sums, y

    sums, ys = jax.jit(lambda: jax.lax.scan(token, fresh, (keys, values)))()
    assert jnp.isfinite(ys).all()
    weights = np.asarray(keys, float).sum((1, 2, 3, 4))
    mean = (weights[:, None] * np.asarray(values, float).reshape(t, k)).sum(0) / weights.sum()
    np.testing.assert_allclose(np.asarray(ys[-1]).reshape(k), mean, rtol=1e-4)
    np.testing.assert_allclose(np.asarray(sums.z).sum(), weights.sum(), rtol=1e-4)
