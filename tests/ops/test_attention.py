"""The custom VJP of attention against plain differentiation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from famjax.ops import attention
from famjax.ops.attention import attend, attention_weights


def plain(q, k, v, mask=None, cap=0.0):
    weights = attention_weights(q, k, mask, cap).astype(v.dtype)
    return jnp.einsum("...grts,...sge->...tgre", weights, v).reshape(q.shape)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cap", [0.0, 0.7])
@pytest.mark.parametrize(("dtype", "apart"), [("float64", 1e-12), ("bfloat16", 0.02)])
def test_gradient_equals_plain_differentiation(heads, masked, cap, dtype, apart):
    (h, g), t, s, e = heads, 5, 7, 8
    rng = np.random.default_rng(0)
    with jax.enable_x64(dtype == "float64"):
        q, k, v, probe = (
            jnp.asarray(rng.normal(size=(2, length, n, e)), dtype)
            for length, n in ((t, h), (s, g), (s, g), (t, h))
        )
        # one mask for all rows, like that of a window
        mask = jnp.asarray(rng.random((t, s)) < 0.6).at[:, 0].set(True) if masked else None

        def read(attention, wide):
            def value(q, k, v):
                # vmapped over rows, like blocks
                out = jax.vmap(lambda q, k, v: attention(q, k, v, mask, cap))(q, k, v)
                return (out * probe.astype(out.dtype)).sum(dtype=wide)

            return jax.grad(value, argnums=(0, 1, 2))

        # the definition, in the widest dtype
        wide = jnp.promote_types(dtype, jnp.float32)
        expected = read(plain, wide)(*(a.astype(wide) for a in (q, k, v)))
        for ours, theirs in zip(read(attend, wide)(q, k, v), expected, strict=True):
            assert ours.dtype == q.dtype
            scale = jnp.abs(theirs).max()
            assert jnp.abs(ours.astype(wide) - theirs).max() < apart * scale


@pytest.mark.parametrize("masked", [False, True])
def test_parts_are_those_of_one_computation(masked, monkeypatch):
    """Seven batch elements in parts of two; a part of the last size, too."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(7, length, 2, 8)), jnp.float32) for length in (5, 6, 6))
    mask = jnp.asarray(rng.random((7, 1, 6)) < 0.6).at[..., 0].set(True) if masked else None
    monkeypatch.setattr(attention, "_count_parts", lambda q, k: 3)
    lowered = jax.jit(attend).lower(q, k, v, mask).as_text()
    assert "while" in lowered
    np.testing.assert_allclose(attend(q, k, v, mask), plain(q, k, v, mask), rtol=1e-6, atol=1e-6)


def test_only_a_cpu_alone_computes_in_parts(monkeypatch):
    """And only if the weights are larger than its cache: 4 x 2 x 256 x 512 floats, 4 MiB."""
    q, k = jnp.zeros((4, 256, 2, 8)), jnp.zeros((4, 512, 2, 8))
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert attention._count_parts(q, k) == 4
    assert attention._count_parts(q[:1], k[:1, :64]) == 1
    assert attention._count_parts(q, k[:1]) == 1
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert attention._count_parts(q, k) == 1
