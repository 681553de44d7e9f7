"""The custom VJP of `weight_einsum` against plain differentiation, for both factor orders."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from famjax.ops.weight_einsum import weight_einsum


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
