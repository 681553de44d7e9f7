"""Contracts 1 to 4, 7, 10 and 13: what a stream of segments is."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from famjax.core.errors import UserError
from famjax.core.types import Context
from famjax.stacks.residual import Layer

from .harness import (
    CASES,
    KINDS,
    LENGTH,
    VOCAB,
    B,
    Runner,
    W,
    close,
    normal,
    runner,
    same,
    stream,
)

all_cases = pytest.mark.parametrize("case", CASES)
all_kinds = pytest.mark.parametrize("case", KINDS)

ALL = np.ones((B, LENGTH), bool)
X = stream()


def parts(r: Runner) -> tuple[int, ...]:
    """Lengths of calls that splits are made of."""
    return (1, 3, 8) if r.block_len == 1 else (W, 2 * W)


@st.composite
def splits(draw, lengths):
    """The lengths of the calls that the stream is read in."""
    found = []
    while left := LENGTH - sum(found):
        found.append(draw(st.sampled_from([n for n in lengths if n <= left])))
    return found


# 1 ------------------------------------------------------------------------------------------------


@all_cases
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_split_of_a_stream_into_calls_is_one_call(case, data):
    r = runner(case)
    whole, end = r.call(X, r.fresh)
    state, at, ys = r.fresh, 0, []
    for n in data.draw(splits(parts(r))):
        # with masks that mask nothing, where the whole call has none
        y, state = r.call(X[:, at : at + n], state, ~ALL[:, :n], ALL[:, :n])
        ys.append(y)
        at += n
    close(np.concatenate(ys, 1), whole)
    close(state, end)


@all_kinds
def test_splits_and_steps_are_one_call_in_float32(case):
    r, x = runner(case, x64=False), X.astype(np.float32)
    whole, end = r.call(x, r.fresh)
    head, state = r.call(x[:, :8], r.fresh)
    middle, state = r.step(x[:, 8:16], state)
    tail, state = r.call(x[:, 16:], state)
    close(np.concatenate([head, middle, tail], 1), whole, 3e-5)
    close(state, end, 3e-5)


# 2 ------------------------------------------------------------------------------------------------


@all_cases
def test_step_token_by_token_is_one_call(case):
    r = runner(case)
    whole, end = r.call(X, r.fresh)
    y, state = r.step(X, r.fresh)
    close(y, whole)
    close(state, end)


@all_cases
@pytest.mark.parametrize("first", ["call", "step"])
def test_calls_and_steps_take_turns(case, first):
    r = runner(case)
    whole, end = r.call(X, r.fresh)
    state, ys = r.fresh, []
    for i, at in enumerate(range(0, LENGTH, 8)):
        x = X[:, at : at + 8]
        if (i % 2 == 0) == (first == "call"):
            y, state = r.call(x, state, ~ALL[:, :8], ALL[:, :8])
        else:
            y, state = r.step(x, state)
        ys.append(y)
    close(np.concatenate(ys, 1), whole)
    close(state, end)


# 3 (its gradients are in test_gradients) ----------------------------------------------------------


@all_cases
def test_a_token_changes_nothing_before_it(case):
    r = runner(case)
    whole, _ = r.call(X, r.fresh)
    for t in [1, 2, 4, 7, 8, 13, 19, 23]:
        other = X.copy()
        other[:, t] = normal(t, B, X.shape[-1])
        y, _ = r.call(other, r.fresh)
        same(y[:, :t], whole[:, :t])
        assert (np.abs(y[:, t] - whole[:, t]).max(-1) > 1e-3).all()


# 4 ------------------------------------------------------------------------------------------------


@all_cases
def test_the_model_equals_its_transcription(case):
    """Logits and the FAM of every layer, in whole blocks and in a part of one, by `step`."""
    r = runner(case)
    tokens = np.random.default_rng(5).integers(VOCAB, size=(B, LENGTH))
    logits, state = r.tokens(tokens, r.fresh)
    stepped, _ = r.step(r.embed(tokens[:, : LENGTH - 2]), r.fresh)
    names = r.config.mixer.split(",")
    for i in range(B):
        expected, fams = r.oracle(tokens[i])
        close(logits[i], expected, 1e-9)
        close(stepped[i], expected[: LENGTH - 2], 1e-9)
        for layer, fam in enumerate(fams):
            repeat, place = divmod(layer, len(names))
            if fam is not None:
                close(state[place].fam[repeat, i], fam, 1e-9)


# 7 ------------------------------------------------------------------------------------------------


@all_kinds
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_state_never_grows(case, dtype):
    """Shapes, types and bytes after 0, 1, 10 and 100 blocks."""
    r = runner(case, x64=False, dtype=dtype, capacity=100 * W)

    def sizes(state):
        return jax.tree.map(lambda a: (a.shape, a.dtype.name, a.nbytes), state)

    state, read = r.fresh, 0
    for until in [1, 10, 100]:
        for _ in range(until - read):
            _, state = r.call(X[:, :W].astype(np.float32), state)
        read = until
        assert sizes(state) == sizes(r.fresh)


# 10 -----------------------------------------------------------------------------------------------


@all_kinds
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_and_restored_it_goes_on_bit_for_bit(case, dtype):
    r, x = runner(case, x64=False, dtype=dtype), X.astype(np.float32)
    _, state = r.call(x[:, :8], r.fresh)
    _, state = r.step(x[:, 8:10], state)  # the middle of a block
    leaves, structure = jax.tree.flatten(state)
    saved = [(a.shape, a.dtype.name, a.tobytes()) for a in leaves]

    there, state = r.step(x[:, 10:16], state)
    end, state = r.call(x[:, 16:], state)

    # another process would have a model and compiled functions of its own
    other = Runner(r.config, x64=False, params=r.params)
    restored = structure.unflatten(
        [np.frombuffer(b, jnp.dtype(kind)).reshape(shape) for shape, kind, b in saved]
    )
    there_again, restored = other.step(x[:, 10:16], restored)
    end_again, restored = other.call(x[:, 16:], restored)
    same((there_again, end_again, restored), (there, end, state))


# 13 -----------------------------------------------------------------------------------------------


def test_full_attention_refuses_to_go_past_its_capacity():
    config = replace(CASES["full"], capacity=6)
    layer, x = Layer("full", config, rngs=nnx.Rngs(0)), jnp.asarray(X, jnp.float32)
    fresh = layer.init_state(B, None)
    y, state = layer(x[:, :6], fresh, Context())  # exactly at capacity
    assert np.isfinite(y).all()
    assert (state.length == 6).all()
    for read in (layer, layer.step):
        with pytest.raises(UserError, match=r"token 7 .* 6; raise model\.capacity"):
            read(x[:, 6:7], state, Context())
    with pytest.raises(UserError, match="token 8 "):
        layer(x[:, :8], fresh, Context())
    # what is padding, or behind a reset, does fit
    layer(x[:, :8], fresh, Context(valid=jnp.arange(8)[None] < jnp.full((B, 1), 6)))
    layer(x[:, :8], fresh, Context(reset=jnp.broadcast_to(jnp.arange(8) == 4, (B, 8))))


def test_full_attention_under_jit_is_nan_past_its_capacity_and_only_there():
    r = runner("full")
    whole, _ = r.call(X, r.fresh)
    _, state = r.call(X[:, :20], r.fresh)
    y, at_capacity = r.step(X[:, 20:], state)
    close(y, whole[:, 20:])
    y, past = r.step(X[:, :2], at_capacity)
    assert np.isnan(y).all()
    tail = np.concatenate([X[:, 20:], X[:, :4]], 1)
    y, past_in_call = r.call(tail, state)
    close(y[:, :4], whole[:, 20:])
    assert np.isnan(y[:, 4:]).all()
    # and a new document begins with a clean cache
    begin = np.tile(np.arange(8) == 0, (B, 1))
    for poisoned in (past, past_in_call):
        again, _ = r.step(X[:, :8], poisoned, begin)
        close(again, whole[:, :8])
