"""The delta rule by chunks, against one token after the other."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts.harness import jit
from jax.test_util import check_grads

from famjax.ops import delta_rule
from famjax.ops.delta_rule import chunk_len, delta_update


def random_inputs(tokens: int, k: int = 6, e: int = 4) -> tuple[np.ndarray, ...]:
    """Return unit keys, values, rates and S of two heads."""
    rng = np.random.default_rng(tokens)
    keys = rng.normal(size=(2, tokens, k))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    v, s = rng.normal(size=(2, tokens, e)), rng.normal(size=(2, k, e))
    return keys, v, rng.uniform(0, 1, (2, tokens)), s


def update_once(k: jax.Array, v: jax.Array, beta: jax.Array, s: jax.Array) -> jax.Array:
    """Return S after one chunk."""
    return delta_update(k, v, beta)(s.mT).mT


def one_by_one(k: np.ndarray, v: np.ndarray, beta: np.ndarray, s: np.ndarray) -> np.ndarray:
    s = s.copy()
    for head in range(len(s)):
        for key, value, rate in zip(k[head], v[head], beta[head], strict=True):
            s[head] += rate * np.outer(key, value - s[head].T @ key)
    return s


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 16, 33, 50, 61, 64])
def test_a_chunk_is_its_tokens_one_after_the_other(tokens: int) -> None:
    k, v, beta, s = random_inputs(tokens)
    with jax.enable_x64(True):
        written = jit(update_once)(k, v, beta, s)
    np.testing.assert_allclose(written, one_by_one(k, v, beta, s), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tokens", [16, 33, 64])
def test_equal_keys_lose_no_digits(tokens: int) -> None:
    """With the series of powers of A the error is 1e-4 after a chunk of 16."""
    rng = np.random.default_rng(0)
    k = np.ones((1, tokens, 6)) / np.sqrt(6)
    beta, (v, s) = np.full((1, tokens), 0.95), (rng.normal(size=(1, n, 4)) for n in (tokens, 6))
    written = jit(update_once)(*(x.astype(np.float32) for x in (k, v, beta, s)))
    np.testing.assert_allclose(written, one_by_one(k, v, beta, s), atol=3e-6)


@pytest.mark.parametrize("tokens", [3, 16])
def test_gradients_equal_differences(tokens: int) -> None:
    with jax.enable_x64(True):
        inputs = tuple(map(jnp.asarray, random_inputs(tokens)))
        check_grads(jax.jit(update_once), inputs, order=1, eps=1e-5)


def test_all_products_have_full_precision() -> None:
    """By default TPUs multiply float32 in bfloat16, GPUs in TF32; CPUs do not."""

    def loss(k: jax.Array, v: jax.Array, beta: jax.Array, s: jax.Array) -> jax.Array:
        return update_once(k, v, beta, s).sum()

    program = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2, 3)))(*random_inputs(16)))
    full = "precision=(Precision.HIGHEST, Precision.HIGHEST)"
    assert program.count("dot_general[") == program.count(full) > 10


def test_what_was_written_last_with_rate_1_is_returned() -> None:
    k, v, beta, s = random_inputs(5)
    with jax.enable_x64(True):
        written = jit(update_once)(k, v, np.ones_like(beta), s)
    answers = np.einsum("hke,hk->he", written, k[:, -1])
    np.testing.assert_allclose(answers, v[:, -1], atol=1e-10)


@pytest.mark.parametrize(
    ("tokens", "c"), [(1, 1), (4, 4), (32, 32), (48, 24), (64, 32), (100, 25), (192, 32)]
)
def test_blocks_are_cut_into_equal_chunks(tokens: int, c: int) -> None:
    assert chunk_len(tokens) == c


@pytest.mark.parametrize(("tokens", "c"), [(1, 1), (48, 48), (100, 50), (1024, 64)])
def test_chunks_of_accelerators_are_larger(
    tokens: int, c: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_rule, "target_device", lambda: SimpleNamespace(platform="gpu"))
    assert chunk_len(tokens) == c
