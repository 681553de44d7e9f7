"""Wrong shapes of a scan's arguments are refused with the argument's name."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from famjax.ops.deferred_scan import deferred_scan, plain_scan
from famjax.ops.leading_size import leading_size
from famjax.ops.token_scan import token_scan


def test_the_size_is_that_of_all_arrays() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    assert leading_size("scan", xs={"a": jnp.zeros((3, 2))}, non_diff=(keys, None)) == 3


def body(matmul_params: Any, other_params: Any, carry: Any, x: Any) -> Any:
    return carry, x[0]


def token_fn(matmul_params: Any, other_params: Any, visible: Any, x: Any) -> Any:
    return x[0], visible.past[..., 0, :]


SCANS = {
    "deferred_scan": lambda xs, non_diff: deferred_scan(body, (), (), jnp.zeros(2), xs, non_diff),
    "plain_scan": lambda xs, non_diff: plain_scan(body, (), (), jnp.zeros(2), xs, non_diff),
    "token_scan": lambda xs, non_diff: token_scan(
        token_fn, 2, (), (), jnp.zeros((1, 3, 2)), xs, non_diff
    ),
}


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize(
    ("xs", "non_diff", "message"),
    [
        ((4, 2), (4,), ""),
        ((4, 2), (5,), "non_diff['mask'] has 5 iterations, and xs['a'] has 4"),
        ((4, 2), (), "non_diff['mask'] is a scalar"),
    ],
)
def test_scans_name_the_argument(name: str, xs: tuple, non_diff: tuple, message: str) -> None:
    args = ({"a": jnp.zeros(xs)}, {"mask": jnp.zeros(non_diff, bool)})
    if not message:
        SCANS[name](*args)
        return
    with pytest.raises(ValueError, match=re.escape(f"{name}: {message}")):
        SCANS[name](*args)


def test_scans_without_arrays() -> None:
    with pytest.raises(ValueError, match="token_scan: xs and non_diff have no arrays"):
        SCANS["token_scan"]((), None)


def test_blocks_of_a_token_scan_divide_its_tokens() -> None:
    with pytest.raises(ValueError, match="token_scan: 3 tokens are not a multiple of block=2"):
        SCANS["token_scan"](jnp.zeros((3, 2)), None)


def test_the_history_of_a_token_scan_has_entries() -> None:
    with pytest.raises(ValueError, match=re.escape("token_scan: history['k'] is [5]")):
        token_scan(token_fn, 2, (), (), {"k": jnp.zeros(5)}, jnp.zeros((4, 2)), None)
