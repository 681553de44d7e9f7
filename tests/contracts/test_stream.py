"""Contracts 1 to 4, 7, 10 and 13: streams of segments."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from famjax.bench.greedy import make_writer
from famjax.config.resolved import resolve_model
from famjax.core.errors import UserError
from famjax.core.types import Context
from famjax.stacks.residual import Layer

from . import transcription
from .harness import (
    CASES,
    FAMILIES,
    KINDS,
    LENGTH,
    TOKENS,
    VOCAB,
    WIDTH,
    B,
    Runner,
    W,
    but,
    close,
    every,
    kinds,
    marked,
    runner,
    same,
)

# in quick runs one case of each kind
all_cases = marked(list(CASES), slow=(), long=[case for case in CASES if case not in KINDS])
every_case = pytest.mark.parametrize("case", CASES)
# in other dtypes: the variants of a mixer differ in what they compute, not in how it is kept
all_kinds = kinds(long=but("full", "fam-1-3", "linear", "feedback-all", "lstm"))

ALL = np.ones((B, LENGTH), bool)


def parts(r: Runner) -> tuple[int, ...]:
    """Return possible lengths of calls."""
    return (1, 3, 8) if r.block_len == 1 else (W, 2 * W)


@st.composite
def splits(draw, lengths):
    """Draw the call lengths of a split of the stream."""
    found = []
    while left := LENGTH - sum(found):
        found.append(draw(st.sampled_from([n for n in lengths if n <= left])))
    return found


# contract 1


@every(*CASES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_split_of_a_stream_into_calls_is_one_call(case, data):
    r = runner(case)
    whole, end = r.whole
    state, at, ys = r.fresh, 0, []
    for n in data.draw(splits(parts(r))):
        # with masks that mask nothing, while the single call has none
        y, state = r.call(r.x[:, at : at + n], state, ~ALL[:, :n], ALL[:, :n])
        ys.append(y)
        at += n
    close(np.concatenate(ys, 1), whole)
    close(state, end)


# a window that ends inside a block, smaller and larger than one that ends with it
HYBRIDS = {
    "bswa,swa": replace(CASES["swa-2"], mixer="bswa,swa", memory_segments=0, window=3),
    "swa,bswa": replace(CASES["swa-2"], mixer="swa,bswa", memory_segments=1, window=2),
}


@pytest.mark.parametrize("case", [*CASES, *HYBRIDS])
def test_outputs_depend_only_on_the_receptive_field(case):
    r = Runner(HYBRIDS[case]) if case in HYBRIDS else runner(case)
    receptive_field = r.model(r.params).stack.receptive_field
    if receptive_field is None:
        unbounded = {"full", "fam", "fm", "delta", "linear", "feedback", "lstm", "rmt"}
        unbounded |= {"autocompressor", "block_recurrent"}
        assert r.config.ngram_memory or unbounded & {*r.mixers, r.config.stack}
        return
    last = max(LENGTH - W, receptive_field + W)  # the receptive field of bswa-3 exceeds the stream
    x = np.concatenate([r.x, r.x], 1)[:, : last + W]
    whole, _ = r.call(x, r.fresh)
    # a stream that starts later, in an equal call; later tokens have no effect (contract 3)
    late, _ = r.call(np.roll(x, receptive_field - last, 1), r.fresh)
    close(late[:, receptive_field : receptive_field + W], whole[:, -W:])

    def matters(token):
        other = x.copy()
        other[:, token] += np.random.default_rng(9).normal(size=WIDTH)
        return (r.call(other, r.fresh)[0] != whole)[:, -W:].any()

    assert not matters(last - receptive_field - 1)
    # whole blocks cover more than a token window, and than the key and the embeddings before a
    # block's first; learned spans may be shorter than their limit
    rounded_up = {"swa", "bswa-smeared", "bswa-conv", "transformer-shared"}
    assert rounded_up & {*r.mixers, case} or matters(last - receptive_field)


@all_kinds
def test_calls_and_steps_are_one_call_in_float32(case):
    r = runner(case, x64=False)
    whole, end = r.whole
    state, ys = r.fresh, []
    for block, at in enumerate(range(0, LENGTH, W)):
        y, state = (r.step if block % 3 == 1 else r.call)(r.x[:, at : at + W], state)
        ys.append(y)
    close(np.concatenate(ys, 1), whole, 3e-5)
    close(state, end, 3e-5)


# contract 2


@all_cases
def test_step_token_by_token_is_one_call(case):
    r = runner(case)
    whole, end = r.whole
    y, state = r.step(r.x, r.fresh)
    close(y, whole)
    close(state, end)


# one of each kind of positions, and of keys and values
FEW = ("full, families", "bswa-3, others", "fam-1-3, families", "feedback-previous, families")


@marked([*FAMILIES], (), [case for case in FAMILIES if case not in FEW])
def test_step_equals_call_with_the_options_of_families(case):
    r = runner(case)
    whole, end = r.whole
    y, state = r.step(r.x, r.fresh)
    close(y, whole)
    close(state, end)


@kinds(without=tuple(c for c in KINDS if CASES[c].stack != "residual"))
def test_an_unstacked_state_gives_equal_results(case):
    r = runner(case)
    there = r.run(lambda params, state: r.model(params).stack.unstack(state), r.fresh)
    y, there = r.step(r.x[:, :W], there)
    expected, end = r.step(r.x[:, :W], r.fresh)
    close(y, expected)
    close(r.run(lambda params, state: r.model(params).restack(state), there), end)


def test_a_loop_of_steps_updates_the_kv_cache_in_place():
    """Temporaries of the compiled loop, without the donated state, are smaller than one cache."""
    r = Runner(replace(CASES["full"], capacity=512, head_dim=64), x64=False)
    state = r.run(lambda params: r.model(params).stack.unstack(r.model(params).init_state(B)))
    tokens = jnp.zeros((B, 1), jnp.int32)
    program = jax.jit(make_writer(r.graph, 3), donate_argnums=1)
    memory = program.lower(r.params, state, tokens).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < state.repeats[0][0].k.nbytes


@every(*CASES)
@pytest.mark.parametrize("first", ["call", "step"])
def test_calls_and_steps_can_alternate(case, first):
    r = runner(case)
    whole, end = r.whole
    state, ys = r.fresh, []
    for i, at in enumerate(range(0, LENGTH, 8)):
        x = r.x[:, at : at + 8]
        if (i % 2 == 0) == (first == "call"):
            y, state = r.call(x, state, ~ALL[:, :8], ALL[:, :8])
        else:
            y, state = r.step(x, state)
        ys.append(y)
    close(np.concatenate(ys, 1), whole)
    close(state, end)


# contract 3 (its gradients are in test_gradients)


@all_cases
def test_a_token_does_not_affect_earlier_outputs(case):
    r = runner(case)
    for t in [1, 2, 4, 7, 8, 13, 19, 23]:
        other = TOKENS.copy()
        other[:, t] = (other[:, t] + 1 + t % 3) % VOCAB
        y, _ = r.tokens(other, r.fresh)
        same(y[:, :t], r.whole[0][:, :t])
        assert (np.abs(y[:, t] - r.whole[0][:, t]).max(-1) > 1e-3).all()


# contract 4


@every_case
def test_the_model_equals_its_transcription(case):
    """Logits and states; uses `step` if the stream ends within a block."""
    r = runner(case)
    logits, state = r.whole
    stepped, cut = r.step(r.x[:, : LENGTH - 2], r.fresh)
    for i in range(B):
        for length, ys, end in [(LENGTH, logits, state), (LENGTH - 2, stepped, cut)]:
            expected, memory = r.oracle(TOKENS[i, :length])
            close(ys[i], expected, 1e-9)
            found = transcription.memory_in_state(r.config, end, i)
            close(found, memory[: len(found)], 1e-9)


# contract 7


@all_kinds
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_state_never_grows(case, dtype):
    """A call and a step return a state with the shapes and dtypes of their input state.

    Compiled shapes depend on the arguments' shapes only, so they stay the same after any number of
    calls.
    """
    r = runner(case, x64=False, dtype=dtype)

    def shapes(state):
        return jax.tree.map(lambda a: (a.shape, a.dtype.name), state)

    x = r.x[:, :W]
    for read, tokens in [(r.call, x), (r.step, x[:, :1])]:
        assert shapes(read(tokens, r.fresh)[1]) == shapes(r.fresh)


# contract 10


@all_kinds
def test_saved_and_restored_states_continue_bit_for_bit(case):
    r = runner(case, x64=False, dtype="bfloat16")
    x = r.x
    _, state = r.call(x[:, :W], r.fresh)
    _, state = r.step(x[:, W : W + 2], state)  # the middle of a block
    leaves, structure = jax.tree.flatten(state)
    saved = [(a.shape, a.dtype.name, a.tobytes()) for a in leaves]

    there, state = r.step(x[:, W + 2 : 2 * W], state)
    end, state = r.call(x[:, 2 * W : 3 * W], state)

    # another process would build and compile its own model
    other = Runner(r.config, x64=False, params=jax.tree.map(np.asarray, r.params))
    restored = structure.unflatten(
        [np.frombuffer(b, jnp.dtype(kind)).reshape(shape) for shape, kind, b in saved]
    )
    there_again, restored = other.step(x[:, W + 2 : 2 * W], restored)
    end_again, restored = other.call(x[:, 2 * W : 3 * W], restored)
    same((there_again, end_again, restored), (there, end, state))


# contract 13


def test_full_attention_rejects_tokens_beyond_its_capacity(monkeypatch):
    """Outside jit and scan, the error is one line."""
    layer = Layer("full", resolve_model(CASES["full"]), rngs=nnx.Rngs(0))
    x, fresh = jnp.ones((1, LENGTH + 2, WIDTH)), layer.init_state(1, None)
    full = fresh._replace(length=jnp.array([LENGTH]))
    for read in (layer, layer.step):
        with pytest.raises(UserError, match=rf"token {LENGTH + 1} .* {LENGTH}; raise model\.cap"):
            read(x[:, :1], full, Context())
    with pytest.raises(UserError, match=f"token {LENGTH + 2} "):
        layer(x, fresh, Context())

    class CheckPassed(Exception):
        """The capacity check passed; later code is the same as under jit."""

    def project(_):
        raise CheckPassed

    monkeypatch.setattr(layer.mixer.qkv, "project", project)
    # exactly at capacity, after a reset, and for padding
    yes, no = jnp.ones((1, 1), bool), jnp.zeros((1, 1), bool)
    last = fresh._replace(length=jnp.array([LENGTH - 1]))
    for state, ctx in [(last, Context()), (full, Context(yes, yes)), (full, Context(no, no))]:
        with pytest.raises(CheckPassed):
            layer(x[:, :1], state, ctx)


@pytest.mark.long
def test_full_attention_under_jit_is_nan_only_beyond_its_capacity():
    r = runner("full")
    x, (whole, _) = r.x, r.whole
    _, state = r.step(x[:, :20], r.fresh)
    y, at_capacity = r.step(x[:, 20:], state)
    close(y, whole[:, 20:])
    y, past = r.step(x[:, :2], at_capacity)
    assert np.isnan(y).all()
    tail = np.concatenate([x[:, 20:], x[:, :4]], 1)
    y, past_in_call = r.call(tail, state, ~ALL[:, :8], ALL[:, :8])
    close(y[:, :4], whole[:, 20:])
    assert np.isnan(y[:, 4:]).all()
    # and a new document starts with an empty cache
    begin = np.tile(np.arange(8) == 0, (B, 1))
    for poisoned in (past, past_in_call):
        again, _ = r.step(x[:, :8], poisoned, begin)
        close(again, whole[:, :8])
