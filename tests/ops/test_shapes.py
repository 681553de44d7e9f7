"""The shapes in the annotations of famjax/ops are checked at run time, in tests."""

from __future__ import annotations

import subprocess
import sys
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


def test_nothing_is_checked_outside_of_tests() -> None:
    code = (
        "import sys; from famjax.ops import rotary; import numpy as np\n"
        "rotary.rotate(np.ones((2, 4), np.float32), np.ones(2, np.float32))\n"
        "assert 'beartype' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
