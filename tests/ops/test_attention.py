"""The custom VJP of attention against plain differentiation."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from famjax.ops import attention
from famjax.ops.attention import attend, attend_blocks, attention_weights


def plain(q, k, v, mask=None, cap=0.0):
    weights = attention_weights(q, k, mask, cap).astype(v.dtype)
    return jnp.einsum("...grts,...sge->...tgre", weights, v).reshape(q.shape)


HEADS = ((4, 4), (4, 2), (3, 1))
# (heads, masked, cap): all of grouped heads, and each option with the others
QUICK = {(HEADS[1], masked, cap) for masked in (False, True) for cap in (0.0, 0.7)}
QUICK |= {(HEADS[0], False, 0.0), (HEADS[2], True, 0.7)}


@pytest.mark.parametrize(
    ("heads", "masked", "cap"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(HEADS, (False, True), (0.0, 0.7))
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("dtype", "apart"),
    [("float64", 1e-12), pytest.param("bfloat16", 0.02, marks=pytest.mark.long)],
)
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


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("cap", [0.0, 0.7])
@pytest.mark.parametrize("parts", [1, 3])
def test_blocks_in_parts_are_those_of_one_computation(heads, cap, parts, monkeypatch):
    """Two rows of four blocks, in parts of two and a smaller last part; and the gradient."""
    monkeypatch.setattr(attention, "_count_parts", lambda q, k: parts)
    (h, g), b, n = heads, 2, 4
    rng = np.random.default_rng(0)
    shapes = ((b, n, 5, h, 8), (b, n, 6, g, 8), (b, n, 6, g, 8))
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    mask = jnp.asarray(rng.random((b, n, 5, 6)) < 0.6).at[..., 0].set(True)
    program = jax.jit(lambda *qkv: attend_blocks(*qkv, mask, cap))  # traced for these parts
    assert ("while" in program.lower(q, k, v).as_text()) == (parts > 1)
    expected = attend(q, k, v, mask, cap)
    np.testing.assert_allclose(program(q, k, v), expected, rtol=1e-5, atol=1e-6)

    def gradient(attention):
        return jax.grad(lambda *qkv: jnp.sin(attention(*qkv, mask, cap)).sum(), (0, 1, 2))(q, k, v)

    for ours, theirs in zip(gradient(attend_blocks), gradient(attend), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.long
def test_only_a_cpu_alone_computes_blocks_in_parts(monkeypatch):
    """And only if the weights exceed its cache: 2 x 2 blocks of 2 x 256 x 512, 4 MiB."""
    q, k = jnp.zeros((2, 2, 256, 2, 8)), jnp.zeros((2, 2, 512, 2, 8))
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert attention._count_parts(q, k) == 4
    assert attention._count_parts(q[:1, :1], k[:1, :1, :64]) == 1
    assert attention._count_parts(q[:1, :1], jnp.zeros((1, 1, 4096, 2, 8))) == 1
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert attention._count_parts(q, k) == 1
