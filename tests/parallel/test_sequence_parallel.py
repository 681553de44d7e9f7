"""Sequence parallelism on one device and on several, against NumPy and `jax.lax`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from famjax.config.schema import MeshConfig
from famjax.parallel import sequence_parallel, sharding, traced

B = 12


def sharded(devices: int, f: Any) -> Any:
    """Return f compiled with tokens sharded over this many devices."""
    mesh = sharding.make_mesh(MeshConfig(1, 1, 1, devices), jax.devices()[:devices])
    return jax.jit(traced.with_mesh(mesh, f))


# blocks per device: more and fewer than the halo
@pytest.mark.parametrize(("devices", "n"), [(1, 6), (8, 8), (4, 12)])
@pytest.mark.parametrize("c", [1, 3])
def test_halo_exchange(devices: int, n: int, c: int) -> None:
    rng = np.random.default_rng(0)
    old, new = (rng.random((B, size, 2), np.float32) for size in (c, n))
    line = np.concatenate([old, new], 1)
    expected = np.stack([line[:, j : j + c] for j in range(n)], 1)
    np.testing.assert_array_equal(
        sharded(devices, sequence_parallel.halo_exchange)(old, new), expected
    )


@pytest.mark.parametrize(("devices", "n"), [(1, 6), (8, 8), (4, 12)])
@pytest.mark.parametrize(("c", "size"), [(0, 1), (3, 4), (2, 2)])
def test_gather_last(devices: int, n: int, c: int, size: int) -> None:
    rng = np.random.default_rng(0)
    old, new = (rng.random((B, s, 2), np.float32) for s in (c, n))
    end = rng.permutation(np.arange(B) % (n + 1))  # all of them, including the first and the last
    line = np.concatenate([old, new, np.zeros((B, size - c, 2), np.float32)], 1)
    expected = np.stack([lane[i : i + size] for lane, i in zip(line, end, strict=True)])
    found = sharded(devices, lambda *a: sequence_parallel.gather_last(*a, size))(old, new, end)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("n", [8, 12])
def test_ring_scan(n: int) -> None:
    """Results and gradients of all arguments; 12 blocks do not divide over 8 devices."""
    rng = np.random.default_rng(0)
    shared, carry, xs = (rng.standard_normal(s, np.float32) for s in ((4, 4), (B, 4), (n, B, 4)))

    def step(shared: Any, carry: Any, x: Any) -> Any:
        fam, count = carry
        fam = jnp.tanh(fam @ shared + x)
        return (fam, count + 1), fam * x

    def loss(scan: Any, *args: Any) -> Any:
        shared, fam, xs = args
        (fam, count), ys = scan(step, shared, (fam, jnp.zeros((), jnp.int32)), xs)
        return jnp.sin(ys).sum() + (fam**3).sum(), count

    def gradients(scan: Any) -> Any:
        return jax.value_and_grad(lambda *a: loss(scan, *a), argnums=(0, 1, 2), has_aux=True)

    plain = gradients(lambda f, shared, *a: jax.lax.scan(lambda c, x: f(shared, c, x), *a))
    (value, count), grads = sharded(8, gradients(sequence_parallel.ring_scan))(shared, carry, xs)
    (value_, _), grads_ = jax.jit(plain)(shared, carry, xs)
    assert count == n
    np.testing.assert_allclose(value, value_, rtol=1e-5)
    for found, expected in zip(grads, grads_, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("c", [0, 1, 3])
def test_gradients_of_blockwise_map(c: int) -> None:
    """In float64 they equal plain differentiation of a map over `halo_exchange`."""
    n = 5
    with jax.enable_x64():
        rng = np.random.default_rng(0)
        old, new, xs = (jnp.asarray(rng.normal(size=s)) for s in ((2, c, 3), (2, n, 3), (n, 2, 3)))
        keep = jnp.asarray(rng.random((n, 2)) < 0.5)

        def block(window: Any, x: Any) -> Any:
            x, keep = x
            weights = jax.nn.softmax(jnp.einsum("bd,bsd->bs", x, window))
            return jnp.where(keep[:, None], jnp.einsum("bs,bsd->bd", weights, window), x**2)

        def plain(old: Any, new: Any, xs: Any) -> Any:
            line = jnp.concatenate([old, new], 1)
            ys = [block(line[:, i : i + c + 1], (xs[i], keep[i])) for i in range(n)]
            return jnp.sin(jnp.stack(ys)).sum()

        def ours(old: Any, new: Any, xs: Any) -> Any:
            return jnp.sin(sequence_parallel.blockwise_map(block, old, new, xs, keep)).sum()

        found, expected = (
            jax.jit(jax.value_and_grad(f, (0, 1, 2)))(old, new, xs) for f in (ours, plain)
        )
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
