"""The custom VJP of `weight_einsum` against plain differentiation, for both factor orders."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from famjax.ops.einsum_tape import history_einsum
from famjax.ops.weight_einsum import is_weight_equation, weight_einsum


@pytest.mark.parametrize(
    ("equation", "x", "kernel"),
    [
        ("...d,dc->...c", (2, 3, 4), (4, 9)),
        ("...c,cd->...d", (2, 3, 9), (9, 4)),
        ("...d,dhe->...he", (5, 4), (4, 2, 3)),
        ("...he,hed->...d", (5, 2, 3), (2, 3, 4)),
    ],
)
def test_gradients_equal_plain_differentiation(equation, x, kernel):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        a, b = jnp.asarray(rng.normal(size=x)), jnp.asarray(rng.normal(size=kernel))

        def loss(multiply):
            return lambda a, b: jnp.sin(multiply(equation, a, b)).sum()

        expected = jax.value_and_grad(loss(jnp.einsum), (0, 1))(a, b)
        found = jax.value_and_grad(loss(weight_einsum), (0, 1))(a, b)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), found, expected)


def test_the_narrower_factor_comes_first():
    def gradient(equation, x, kernel, dtype):
        loss = lambda x, kernel: weight_einsum(equation, x, kernel).sum()  # noqa: E731
        zeros = (jnp.zeros(x, dtype), jnp.zeros(kernel, dtype))
        return jax.make_jaxpr(jax.grad(loss, 1))(*zeros)

    for dtype in (jnp.float32, jnp.bfloat16):
        up = gradient("...d,dc->...c", (32, 4), (4, 9), dtype)
        down = gradient("...c,cd->...d", (32, 9), (9, 4), dtype)
        for jaxpr in (up, down):
            products = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"]
            assert [v.aval.shape for v in products[-1].invars] == [(32, 4), (32, 9)]
            assert jaxpr.out_avals[0].dtype == dtype


def test_the_sums_of_bfloat16_can_be_kept_in_float32():
    draw = np.random.default_rng(0).normal
    x, kernel, weight = (
        jnp.asarray(draw(size=size), jnp.bfloat16) for size in [(4, 30), (30, 5), (4, 5)]
    )
    wide = weight_einsum("...d,dc->...c", x, kernel, jnp.float32)
    expected = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, expected, rtol=1e-5, atol=1e-5)

    def loss(x, kernel):
        return (weight_einsum("...d,dc->...c", x, kernel, jnp.float32) * weight).sum()

    d_x, d_kernel = jax.grad(loss, (0, 1))(x, kernel)
    assert d_x.dtype == d_kernel.dtype == jnp.bfloat16
    weight = np.asarray(weight, np.float64)
    np.testing.assert_allclose(d_x, weight @ np.asarray(kernel, np.float64).T, rtol=0.02, atol=0.05)
    np.testing.assert_allclose(d_kernel, np.asarray(x, np.float64).T @ weight, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("equation", ["...d,dc->...c", "...he,hed->...d", "...z,zc->...c"])
def test_equations_of_a_kernel(equation):
    assert is_weight_equation(equation)
    with pytest.raises(ValueError, match=r"history_einsum: .* is of a kernel"):
        history_einsum(equation, jnp.zeros((2, 3)), jnp.zeros((3, 4)))


@pytest.mark.parametrize("equation", ["bge,bgse->bgs", "bgrs,bgse->bgre"])
def test_equations_of_the_history(equation):
    assert not is_weight_equation(equation)
    with pytest.raises(ValueError, match=r"weight_einsum: .* is of the history"):
        weight_einsum(equation, jnp.zeros((2, 3)), jnp.zeros((3, 4)))


@pytest.mark.parametrize(
    "equation",
    [
        "...d,cd->...c",  # the kernel is transposed
        "...d,dc->c",  # sums over the leading dimensions
        "...dd,ddc->...c",  # a diagonal
        "b...d,dc->b...c",
        "...d->...d",
        "bz,bze->be",  # z is the tape's
        "bs,bse->b",  # e is in one term only
    ],
)
def test_other_equations_are_refused(equation):
    with pytest.raises(ValueError, match="neither of a kernel"):
        weight_einsum(equation, jnp.zeros((2, 3)), jnp.zeros((3, 4)))
