"""`turns` against `jax.lax.scan`: values, gradients, and what is done how often."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from famjax.core.remat import recomputing
from famjax.ops.product import product
from famjax.ops.turns import plain_turns, turns

N, B, D = 5, 2, 6


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64():
        yield


def turn(heavy: Any, light: Any, carry: Any, x: Any) -> Any:
    """Two products of one weight, one of another, a scale, and a choice by what has no gradient."""
    (x, (keep, _)) = x
    h = jnp.tanh(product("...d,de->...e", carry * light["scale"] + x["in"], heavy["up"]))
    new = product("...d,de->...e", h, heavy["down"]["cast"].astype(h.dtype))
    out = product("...d,de->...e", jnp.sin(new) * x["gate"], heavy["up"])
    return jnp.where(keep[:, None], carry, new + carry), (out, new)


def arguments(seed: int = 0) -> tuple[Any, ...]:
    random = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape))

    heavy = {"up": normal(D, D), "down": {"cast": normal(D, D).astype(jnp.float32)}}
    light = {"scale": normal(D), "unused": normal(3)}
    xs = {"in": normal(N, B, D), "gate": normal(N, B, D)}
    rest = (jnp.asarray(random.random((N, B)) < 0.3), None)
    return heavy, light, normal(B, D), xs, rest


def of(loop: Any, *given: Any) -> jax.Array:
    """Return a scalar that all results of the loop take part in."""
    last, (out, new) = loop(turn, *given)
    return (last**3).sum() + (jnp.cos(out) * new).sum()


def test_values_and_gradients_are_those_of_a_scan() -> None:
    given = arguments()
    for ours, theirs in zip(
        jax.tree.leaves(jax.jit(turns, static_argnums=0)(turn, *given)),
        jax.tree.leaves(plain_turns(turn, *given)),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    by = (1, 2, 3, 4)
    found = jax.jit(jax.grad(of, by), static_argnums=0)(turns, *given)
    expected = jax.grad(of, by)(plain_turns, *given)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        tolerance = 1e-6 if a.dtype == np.float32 else 1e-11
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def test_no_loop_is_gone_through_again() -> None:
    """Where everything is computed again: there and back, and not there once more."""
    *given, rest = arguments()

    def loss(loop: Any, *given: Any) -> jax.Array:
        def body(heavy: Any, light: Any, carry: Any, xs: Any) -> jax.Array:
            return of(loop, heavy, light, carry, jax.tree.map(jnp.exp, xs), rest)

        return recomputing(body, "layer", scanned=False)(*given)

    def loops(loop: Any) -> int:
        grad = jax.jit(jax.value_and_grad(loss, (1, 2, 3, 4)), static_argnums=0)
        return grad.lower(loop, *given).compile().as_text().count(" while(")

    assert loops(turns) == 2
    assert loops(plain_turns) == 3
