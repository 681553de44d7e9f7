"""`token_scan` against plain differentiation of a Python loop, for random token functions."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scan_bodies import (
    MORE,
    OPERATIONS,
    QUICK,
    B,
    D,
    E,
    G,
    assert_equal,
    names,
    normal,
    parameters,
)

from famjax.core.types import Array
from famjax.ops.einsum_tape import history_einsum
from famjax.ops.token_scan import Visible, token_scan
from famjax.ops.weight_einsum import weight_einsum


@pytest.fixture(autouse=True, scope="module")
def x64():
    with jax.enable_x64():
        yield


class Case(NamedTuple):
    """A token function and the sizes of a call.

    Attributes:
      operations: names of `OPERATIONS` and of operations that `_token` adds, in this order.
      tokens, block: of the call; tokens are padded to whole blocks, as in the stack.
      spans: of two sets of keys and values.
    """

    operations: tuple[str, ...]
    tokens: int
    block: int
    spans: tuple[int, int]


ATTENTION = ("attend", "attend_other")
EXTRA = (*ATTENTION, "index", "select")
cases = st.builds(
    lambda operations, attention, sizes, spans: Case((*operations, *attention), *sizes, spans),
    names(*EXTRA),
    # attention is the part with the most cases
    st.sampled_from((ATTENTION, ("attend", "weight"), ())),
    st.sampled_from(((6, 3), (5, 3), (4, 4), (3, 1))),
    st.sampled_from(((2, 3), (1, 0))),
)
EVERYTHING = (*OPERATIONS, *EXTRA, *reversed(ATTENTION))


def _token(case: Case, w: Any, p: Any, visible: Visible, xs: Any) -> Any:
    """Map x [b d] -> ((y, z), ((k, v), (k, v))), entries [b g e]."""
    (x, side), (keep, shift) = xs
    for name in case.operations:
        if name in ATTENTION:
            new = _attend(w, visible, case.spans, ATTENTION.index(name), x)
        elif name == "index":
            new = jnp.cos(visible.index_in_call + shift + x)
        elif name == "select":
            new = jnp.where(keep[:, None], side, x)
        else:
            new = OPERATIONS[name](w, p, x)
        x = x + new if name in ATTENTION else 0.5 * x + new
    k = weight_einsum("...d,dge->...ge", jnp.tanh(x), w["key"])
    v = weight_einsum("...d,dge->...ge", x * side, w["value"])
    return (x, side * p["scale"]), ((k, v), (jnp.sin(v), k * x.mean()))


def _attend(w: Any, visible: Visible, spans: tuple[int, int], s: int, x: Array) -> Array:
    """Attend to the `span` entries before the token, and to a null entry with score 0."""
    (k_past, v_past), (k, v) = visible.past[s], visible.current[s]
    q = weight_einsum("...d,dge->...ge", x, w["key"])
    scores = [history_einsum("bge,bgse->bgs", q, k_past), jnp.einsum("bge,bgse->bgs", q, k)]
    scores = jnp.concatenate(scores, -1)
    entry, i, span = jnp.arange(scores.shape[-1]), visible.index_in_block, spans[s]
    scores = jnp.where((entry >= i) & (entry < i + span), scores, -1e30)
    weights = jax.nn.softmax(jnp.pad(scores, ((0, 0), (0, 0), (1, 0))), -1)[..., 1:]
    past, current = jnp.split(weights, [k_past.shape[-2]], -1)
    out = history_einsum("bgs,bgse->bge", past, v_past) + jnp.einsum("bgs,bgse->bge", current, v)
    return weight_einsum("...ge,ged->...d", out, w["join"])


def _arguments(case: Case) -> tuple[Any, ...]:
    history = tuple((normal(30 + n, B, G, n, E), normal(40 + n, B, G, n, E)) for n in case.spans)
    xs = (normal(50, case.tokens, B, D), normal(51, case.tokens, B, D))
    return *parameters(), history, xs


def _non_diff(tokens: int) -> Any:
    return normal(52, tokens, B) > 0, jnp.arange(tokens, dtype=jnp.int32) % 2


def _ours(case: Case, w: Any, p: Any, history: Any, xs: Any) -> Any:
    t = case.tokens
    padding = -t % case.block
    xs = jax.tree.map(lambda a: jnp.pad(a, ((0, padding), (0, 0), (0, 0))), xs)
    scan = functools.partial(token_scan, functools.partial(_token, case), case.block)
    ys, history = scan(w, p, history, xs, _non_diff(t + padding))
    spans = zip(history, case.spans, strict=True)
    history = tuple(jax.tree.map(lambda a, n=n: a[:, :, : n + t], set) for set, n in spans)
    return jax.tree.map(lambda a: a[:t], ys), history


def _plain(case: Case, w: Any, p: Any, history: Any, xs: Any) -> Any:
    ys = []
    past = history
    for i in range(case.tokens):
        index = i % case.block
        if index == 0:
            # the last `span` entries of a set; none if span is 0
            past = tuple(
                jax.tree.map(lambda a, n=n: a[:, :, a.shape[2] - n :], set)
                for set, n in zip(history, case.spans, strict=True)
            )
            unwritten = jax.tree.map(lambda a: jnp.zeros((B, G, case.block, E)), history)
            current = unwritten
        visible = Visible(past, current, jnp.asarray(index), jnp.asarray(i))
        x = jax.tree.map(lambda a, i=i: a[i], (xs, _non_diff(case.tokens)))
        y, entries = _token(case, w, p, visible, x)
        ys.append(y)
        history = jax.tree.map(
            lambda a, new: jnp.concatenate([a, new[:, :, None]], 2), history, entries
        )
        current = jax.tree.map(lambda a, new, j=index: a.at[:, :, j].set(new), current, entries)
    return jax.tree.map(lambda *a: jnp.stack(a), *ys), history


def _loss(scan: Any, case: Case, *args: Any) -> tuple[Array, Any]:
    """Return a scalar that depends on every element of the results, and the results."""
    results = scan(case, *args)
    total = jnp.zeros(())
    for i, a in enumerate(jax.tree.leaves(results)):
        total = total + (jnp.sin(a) * normal(60 + i, *a.shape)).sum()
    return total, results


@pytest.mark.long
@QUICK
@given(cases)
@example(Case(EVERYTHING, 5, 3, (2, 3)))
@example(Case(("norm",), 4, 4, (1, 0)))
def test_values_and_gradients_equal_plain_differentiation(case: Case) -> None:
    check(case)


@pytest.mark.slow
@MORE
@given(cases)
def test_more_token_functions_equal_plain_differentiation(case: Case) -> None:
    check(case)


def check(case: Case) -> None:
    """Compare values, and gradients of kernels, other parameters, the history and xs."""
    args = _arguments(case)

    def value_and_grad(scan: Any) -> Any:
        grad = jax.value_and_grad(functools.partial(_loss, scan, case), (0, 1, 2, 3), has_aux=True)
        return grad(*args)

    (_, results), grads = jax.jit(lambda: value_and_grad(_ours))()
    (_, expected), expected_grads = jax.jit(lambda: value_and_grad(_plain))()
    assert_equal(results, expected, 1e-12)
    assert_equal(grads, expected_grads, 1e-10)


def test_a_call_without_tokens_is_rejected() -> None:
    case = Case(ATTENTION, 0, 3, (2, 3))
    with pytest.raises(ValueError, match="token_scan: xs has no tokens"):
        _ours(case, *_arguments(case))
