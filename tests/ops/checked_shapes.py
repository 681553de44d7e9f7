"""Wrong shapes and dtypes raise errors; run by `test_shapes.py` with `--shapes`."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import jaxtyping
import pytest

from famjax.ops import attention, lookup, losses, relative, rotary

X = jnp.ones((2, 3, 4, 6))  # [b t h e]


@pytest.mark.parametrize(
    "call",
    [
        lambda: attention.attend(X, X[:, :, :2], X[:, :2, :2]),  # 3 keys, 2 values
        lambda: attention.attention_weights(X, X, jnp.ones((3, 3))),  # not a bool mask
        lambda: lookup.look_up(X[0, 0], jnp.ones(3)),  # tokens are not integers
        lambda: losses.token_losses(X, jnp.zeros((2, 3), int)),  # no target for each head
        lambda: relative.relative_shift(jnp.ones((2, 3, 4)), 4 + 3 + 1),  # entries != span + t
        lambda: rotary.rotate(X, jnp.ones(3, int)),  # integer angles
    ],
)
def test_a_wrong_shape_or_dtype_is_an_error(call: Callable[[], object]) -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        call()
