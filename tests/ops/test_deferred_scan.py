"""`deferred_scan` against `jax.lax.scan` and a Python loop: values, gradients, number of loops."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scan_bodies
from hypothesis import example, given
from hypothesis import strategies as st
from scan_bodies import MORE, OPERATIONS, QUICK, assert_equal, names, normal, parameters

from famjax.core.remat import remat_with_policy
from famjax.ops.deferred_scan import deferred_scan, plain_scan
from famjax.ops.weight_einsum import weight_einsum

N, B, D = 5, 2, 6


@pytest.fixture(autouse=True, scope="module")
def wide():
    with jax.enable_x64():
        yield


def scan_body(matmul_params: Any, other_params: Any, carry: Any, x: Any) -> Any:
    """Apply one kernel twice, another once, a scale, and a select by `non_diff`."""
    (x, (keep, _)) = x
    h = jnp.tanh(
        weight_einsum("...d,de->...e", carry * other_params["scale"] + x["in"], matmul_params["up"])
    )
    new = weight_einsum("...d,de->...e", h, matmul_params["down"]["cast"].astype(h.dtype))
    out = weight_einsum("...d,de->...e", jnp.sin(new) * x["gate"], matmul_params["up"])
    return jnp.where(keep[:, None], carry, new + carry), (out, new)


def arguments(seed: int = 0) -> tuple[Any, ...]:
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape))

    matmul_params = {"up": normal(D, D), "down": {"cast": normal(D, D).astype(jnp.float32)}}
    other_params = {"scale": normal(D), "unused": normal(3)}
    xs = {"in": normal(N, B, D), "gate": normal(N, B, D)}
    non_diff = (jnp.asarray(random.random((N, B)) < 0.3), None)
    return matmul_params, other_params, normal(B, D), xs, non_diff


def loss_of(loop: Any, *given: Any) -> jax.Array:
    """Return a scalar that depends on all results of the scan."""
    last, (out, new) = loop(scan_body, *given)
    return (last**3).sum() + (jnp.cos(out) * new).sum()


def test_values_and_gradients_equal_lax_scan() -> None:
    given = arguments()
    for ours, theirs in zip(
        jax.tree.leaves(jax.jit(deferred_scan, static_argnums=0)(scan_body, *given)),
        jax.tree.leaves(plain_scan(scan_body, *given)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    by = (1, 2, 3, 4)
    d_weights = jax.jit(jax.grad(loss_of, by), static_argnums=0)(deferred_scan, *given)
    expected = jax.grad(loss_of, by)(plain_scan, *given)
    assert jax.tree.structure(d_weights) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(d_weights), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        tolerance = 1e-6 if a.dtype == np.float32 else 1e-11
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_the_forward_scan_is_not_recomputed() -> None:
    """With full rematerialization: one forward and one backward loop, no second forward loop."""
    *given, non_diff = arguments()

    def loss(loop: Any, *given: Any) -> jax.Array:
        def body(matmul_params: Any, other_params: Any, carry: Any, xs: Any) -> jax.Array:
            return loss_of(
                loop, matmul_params, other_params, carry, jax.tree.map(jnp.exp, xs), non_diff
            )

        return remat_with_policy(body, "layer", scanned=False)(*given)

    def loops(loop: Any) -> int:
        grad = jax.jit(jax.value_and_grad(loss, (1, 2, 3, 4)), static_argnums=0)
        return grad.lower(loop, *given).compile().as_text().count(" while(")

    assert loops(deferred_scan) == 2
    assert loops(plain_scan) == 3


# random bodies


class Case(NamedTuple):
    """A body, and the number of iterations.

    Attributes:
      operations: names of `OPERATIONS` and of operations that `_body` adds, in this order.
    """

    operations: tuple[str, ...]
    iterations: int


EXTRA = ("input", "select", "slow_carry")
cases = st.builds(Case, names(*EXTRA), st.sampled_from((1, 4)))


def _body(case: Case, w: Any, p: Any, carry: Any, x: Any) -> Any:
    """Map carry (h [b d], count [b]) and x (u, v [b d]) -> carry, (y, z [b d])."""
    h, slow = carry
    (u, v), (keep, shift) = x
    new = h + v
    for name in case.operations:
        if name == "input":
            new = new * jnp.tanh(u) + shift
        elif name == "select":
            new = jnp.where(keep[:, None], h, new)
        elif name == "slow_carry":
            new = new + jnp.sin(slow)[:, None]
        else:
            new = 0.5 * new + OPERATIONS[name](w, p, new)
    return (new, 0.9 * slow + new.mean(-1)), (new * v, jnp.cos(h))


def _python_loop(body: Any, w: Any, p: Any, carry: Any, xs: Any, non_diff: Any) -> Any:
    ys = []
    for i in range(len(non_diff[0])):
        carry, y = body(w, p, carry, jax.tree.map(lambda a, i=i: a[i], (xs, non_diff)))
        ys.append(y)
    return carry, jax.tree.map(lambda *a: jnp.stack(a), *ys)


def _loss(scan: Any, case: Case, *args: Any) -> Any:
    """Return a scalar that depends on every element of the results, and the results."""
    n, b = case.iterations, scan_bodies.B
    non_diff = (normal(52, n, b) > 0, jnp.arange(n, dtype=jnp.int32) % 2)
    results = scan(functools.partial(_body, case), *args, non_diff)
    leaves = enumerate(jax.tree.leaves(results))
    return sum((jnp.sin(a) * normal(60 + i, *a.shape)).sum() for i, a in leaves), results


@QUICK
@given(cases)
@example(Case((*OPERATIONS, *EXTRA), 4))
@example(Case(("norm",), 4))
def test_random_bodies_equal_plain_differentiation(case: Case) -> None:
    check(case)


@pytest.mark.slow
@MORE
@given(cases)
def test_more_bodies_equal_plain_differentiation(case: Case) -> None:
    check(case)


def check(case: Case) -> None:
    """Compare values, and gradients of the kernels, the other parameters, the carry and xs."""
    n, b, d = case.iterations, scan_bodies.B, scan_bodies.D
    xs = (normal(50, n, b, d), normal(51, n, b, d))
    args = (*parameters(), (normal(30, b, d), normal(31, b)), xs)

    def value_and_grad(scan: Any) -> Any:
        grad = jax.value_and_grad(functools.partial(_loss, scan, case), (0, 1, 2, 3), has_aux=True)
        return grad(*args)

    (_, results), grads = jax.jit(lambda: value_and_grad(deferred_scan))()
    (_, expected), expected_grads = value_and_grad(_python_loop)
    assert_equal(results, expected, 1e-12)
    assert_equal(grads, expected_grads, 1e-10)


def test_a_scan_of_no_iterations() -> None:
    """The carry is unchanged; differentiation is an error."""
    w, p, carry, xs, non_diff = arguments()
    none = jax.tree.map(lambda a: a[:0], (xs, non_diff))
    last, ys = deferred_scan(scan_body, w, p, carry, *none)
    np.testing.assert_array_equal(last, carry)
    assert [y.shape for y in jax.tree.leaves(ys)] == [(0, B, D), (0, B, D)]
    with pytest.raises(ValueError, match="deferred_scan: xs has no iterations"):
        jax.grad(loss_of, 1)(deferred_scan, w, p, carry, *none)
