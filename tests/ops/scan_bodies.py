"""Random bodies of scans: compositions of operations that a `token_fn` or scan body may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from famjax.core.types import Array
from famjax.ops.weight_einsum import weight_einsum

B, D, G, E, F = 2, 4, 2, 3, 6

# A failing example is not shrunk: it would compile many more. Beside the given ones, of which one
# has every operation, few are compiled in quick runs, and more in others.
QUICK = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=3,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
MORE = settings(QUICK, max_examples=20)

Params = dict[str, Array]
Operation = Callable[[Params, Params, Array], Array]


def weight(w: Params, p: Params, x: Array) -> Array:
    return weight_einsum("...d,de->...e", x, w["square"])


def tied(w: Params, p: Params, x: Array) -> Array:
    """The kernel of `weight`, transposed."""
    return weight_einsum("...d,de->...e", x, w["square"].T)


def twice(w: Params, p: Params, x: Array) -> Array:
    return weight(w, p, jnp.tanh(weight(w, p, x)))


def feed_forward(w: Params, p: Params, x: Array) -> Array:
    """One kernel with more columns than rows, and one with fewer."""
    x = jax.nn.silu(weight_einsum("...d,df->...f", x, w["up"]))
    return weight_einsum("...f,fd->...d", x, w["down"])


def heads(w: Params, p: Params, x: Array) -> Array:
    """Two output axes and two contracted ones."""
    q = weight_einsum("...d,dge->...ge", x, w["split"])
    return weight_einsum("...ge,ged->...d", jnp.sin(q), w["join"])


def norm(w: Params, p: Params, x: Array) -> Array:
    return p["scale"] * x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-3)


def gate(w: Params, p: Params, x: Array) -> Array:
    return x * jax.nn.sigmoid(x + p["bias"])


def half(w: Params, p: Params, x: Array) -> Array:
    """Stop the gradient of one half."""
    return x + jax.lax.stop_gradient(jnp.tanh(x)) * x


OPERATIONS: dict[str, Operation] = {
    f.__name__: f for f in (weight, tied, twice, feed_forward, heads, norm, gate, half)
}


def names(*more: str) -> st.SearchStrategy[tuple[str, ...]]:
    """Draw up to five operations, with names from `more` too."""
    return st.lists(st.sampled_from((*OPERATIONS, *more)), min_size=1, max_size=5).map(tuple)


def normal(seed: int, *shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def parameters() -> tuple[Params, Params]:
    """Return kernels and other parameters in float64; one of each is unused."""
    shapes = {
        "square": (D, D),
        "up": (D, F),
        "down": (F, D),
        "split": (D, G, E),
        "join": (G, E, D),
        "key": (D, G, E),
        "value": (D, G, E),
        "unused": (3, 2),
    }
    matmul_params = {
        name: 0.5 * normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())
    }
    return matmul_params, {
        name: normal(20 + i, D) for i, name in enumerate(("scale", "bias", "unused"))
    }


def assert_equal(ours: Any, plain: Any, tolerance: float) -> None:
    """Check that two trees of float64 arrays are equal, relative to their largest element."""
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    paths = jax.tree.leaves_with_path(plain)
    for a, (path, b) in zip(jax.tree.leaves(ours), paths, strict=True):
        assert a.dtype == b.dtype == jnp.float64
        scale = max(1.0, np.abs(b).max(initial=0.0))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale, err_msg=str(path))
