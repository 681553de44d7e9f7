"""Contract 5: lanes are reset, padded or idle (all padding) independently."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from famjax.config.derived import is_segmented

from .harness import (
    CASES,
    FAMILIES,
    FURTHER,
    WIDTH,
    B,
    Runner,
    W,
    close,
    every,
    lane,
    normal,
    runner,
    same,
)

# their windows, segments and memories are those of others
LONG = (*FURTHER, "swa-2", "bswa_sg-2", "transformer-shared", "autocompressor")
all_cases = every(*CASES, long=LONG)
# each kind of memory that is passed on, and each kind of state without one
PASSED = ("fam-1-3", "fam-static", "fam-zero", "delta-smeared", "block_recurrent", "rmt")
PASSED += ("autocompressor", "full", "bswa-1", "fm-2", "linear", "feedback-all", "lstm")
QUICK = ("fam-1-3", "delta-smeared", "block_recurrent", "rmt", "bswa-1")


class Call(NamedTuple):
    """Masks [b t] of one call."""

    reset: Any
    valid: Any


@st.composite
def calls(draw, block: int):
    """Draw calls that follow the rules of `Context`, including lanes that end within a block.

    Blocks of a lane are drawn sequentially: continue, start a document, or stop. Padding lasts
    until a document starts or the call ends; after an incomplete block, until a document starts.
    """
    lengths = draw(st.lists(st.sampled_from((1, 3, 8) if block == 1 else (W, 2 * W)), max_size=3))
    incomplete = np.zeros(B, bool)
    found = []
    for length in lengths:
        reset, valid = np.zeros((2, B, length), bool)
        for i in range(B):
            stopped = draw(st.sampled_from([False, False, False, True]))  # the lane starts idle
            for at in range(0, length, block):
                if draw(st.sampled_from([False, False, True])):
                    reset[i, at], stopped, incomplete[i] = True, False, False
                if stopped or incomplete[i]:
                    continue
                count = draw(st.sampled_from([block] * block + [*range(int(reset[i, at]), block)]))
                valid[i, at : at + count] = True
                stopped, incomplete[i] = count < block, 0 < count < block
        found.append(Call(reset, valid))
    return found


@st.composite
def steps(draw, count: int):
    """Draw `count` steps: valid tokens, some of which start a document, and padding."""
    kinds = [[draw(st.sampled_from("vvvrp")) for _ in range(count)] for _ in range(B)]
    kinds = np.array(kinds).reshape(B, count)
    return Call(kinds == "r", kinds != "p")


class Fresh:
    """One lane, computed token by token from the initial state, without masks."""

    def __init__(self, r: Runner):
        self.r, self.state = r, r.fresh

    def read(self, x: Any) -> Any:
        """Map one token [d] -> [v]."""
        y, self.state = self.r.step(np.broadcast_to(x, (B, 1, WIDTH)), self.state)
        return y[0, 0]

    def read_all(self, x: Any, reset: Any, valid: Any) -> Any:
        """Map [t d] -> [t v], zero at padding."""
        ys = np.zeros((len(x), self.r.config.vocab_size))
        for t in np.flatnonzero(valid):
            if reset[t]:
                self.state = self.r.fresh
            ys[t] = self.read(x[t])
        return ys


# with options of families: a table of positions, which a reset begins again, and each stack and
# mixer whose state they change; test_stream has the other combinations
_RESET = ("full, others", "swa-2, families", "fam-1-3, families", "feedback-all, others")


@every(
    *(*CASES, *_RESET),
    slow=[name for name in FAMILIES if name not in _RESET],
    long=(*LONG, *_RESET, "block_recurrent", "fm-2", "bswa-1", "rmt"),
)
@settings(max_examples=8, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99))
def test_each_lane_is_a_fresh_stream_of_its_valid_tokens(case, data, seed):
    r = runner(case)
    drawn = data.draw(calls(r.block_len))
    plan = [(r.call, call) for call in drawn] + [(r.step, data.draw(steps(W - 1)))]
    state, alone = r.fresh, [Fresh(r) for _ in range(B)]
    for number, (read, (reset, valid)) in enumerate(plan):
        x = normal(100 * seed + number, *reset.shape, WIDTH)
        before = state
        y, state = read(x, state, reset, valid)
        for i in range(B):
            expected = alone[i].read_all(x[i], reset[i], valid[i])
            close(np.where(valid[i][:, None], y[i], 0), expected)
            close(lane(state, i), lane(alone[i].state, 0))
            if not valid[i].any():
                same(lane(state, i), lane(before, i))


@all_cases
@settings(max_examples=4, deadline=None)
@given(data=st.data(), changed=st.integers(0, B - 1))
def test_lanes_are_independent(case, data, changed):
    r = runner(case)
    _, start = r.step(normal(1, B, W, WIDTH), r.fresh)
    one, other = (data.draw(calls(r.block_len).filter(len))[0] for _ in range(2))
    length = min(one.reset.shape[1], other.reset.shape[1])
    x, y = normal(2, B, length, WIDTH), normal(3, B, length, WIDTH)

    def changed_lane(a, b):
        a = a[:, :length].copy()
        a[changed] = b[changed, :length]
        return a

    for read in (r.call, r.step):
        before = read(x, start, one.reset[:, :length], one.valid[:, :length])
        after = read(changed_lane(x, y), start, *map(changed_lane, one, other))
        for i in set(range(B)) - {changed}:
            same((after[0][i], lane(after[1], i)), (before[0][i], lane(before[1], i)))


@all_cases
def test_padding_values_have_no_effect(case):
    """The state and the outputs at valid tokens are bitwise equal for any padding values."""
    r = runner(case)
    _, start = r.step(normal(1, B, W, WIDTH), r.fresh)
    x, reset = normal(2, B, 2 * W, WIDTH), np.zeros((B, 2 * W), bool)
    valid = np.arange(2 * W) < np.array([[3], [W], [W + 1]])
    junk = np.where(valid[..., None], x, 1e3 * normal(3, B, 2 * W, WIDTH))
    y, state = r.call(x, start, reset, valid)
    with_junk, state_with_junk = r.call(junk, start, reset, valid)
    same(state_with_junk, state)
    same(with_junk[valid], y[valid])


@every(
    *PASSED,
    slow=[case for case in CASES if case not in PASSED],
    long=[case for case in PASSED if case not in QUICK],
)
def test_pass_state_starts_a_document_with_the_last_memory(case):
    """Random state passing keeps the memory and not the window; without one it is a reset."""
    r = runner(case)
    no = np.zeros((B, 2 * W), bool)

    def call(x, state, reset=no, pass_state=None):
        # other tests have calls with these masks, and share their programs
        here = np.s_[:, : x.shape[1]]
        return r.call(x, state, reset[here], ~no[here], pass_state=pass_state)

    _, start = call(normal(1, B, 2 * W, WIDTH), r.fresh)
    x, begins = normal(2, B, 2 * W, WIDTH), no.copy()
    begins[1, W] = begins[2, 0] = True  # lane 0 continues; lane 2 starts a document
    pass_state = begins & (np.arange(B) == 1)[:, None]
    _, before = call(x[:, :W], start)
    passed = r.run(
        lambda params, *states: r.model(params).stack.pass_state(*states), r.fresh, before
    )
    expected, after = call(x[:, W:], passed)
    plain, reset_state = call(x, start, begins)
    for y, state in (
        call(x, start, begins, pass_state),
        r.step(x, start, begins, None, pass_state),
    ):
        close(y[1, W:], expected[1])
        close(lane(state, 1), lane(after, 1))
        others = np.arange(B) != 1
        close(y[others], plain[others])
        close(lane(state, 2), lane(reset_state, 2))
        passed_on = ("fam", "delta", "block_recurrent")
        if any(name in case for name in passed_on) or is_segmented(r.config):
            assert np.abs(y[1, W:] - plain[1, W:]).max() > 1e-3
        else:
            close(y[1], plain[1])
