"""Contracts 8 and 11: precise positions at any distance, and bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracles import transformer as oracle

from famjax.config.derived import is_segmented
from famjax.config.schema import ArchConfig
from famjax.layers.qkv import QKV
from famjax.ops import rotary
from famjax.ops.attention import attend

from . import transcription
from .harness import (
    CASES,
    LENGTH,
    TOKENS,
    VOCAB,
    B,
    Runner,
    W,
    but,
    close,
    init_params,
    jit,
    kinds,
    marked,
    normal,
    runner,
    same,
    stream,
)

# contract 8

WINDOWS = ("swa-2", "bswa-0", "bswa-1", "bswa-3", "transformer-own", "transformer-shared")
UNBOUNDED = ("feedback-all", "lstm", "rmt", "feedback-layer")
UNBOUNDED += ("block_recurrent", "fm-2", "delta-smeared")
ROTATED = ("linear", "fam,linear")
FAR = (*WINDOWS, *UNBOUNDED, *ROTATED)


@marked(
    WINDOWS,
    slow=(),
    long=("swa-2", "bswa-0", "bswa-3", "transformer-own"),
)
def test_windows_are_independent_of_the_position(case):
    """If all blocks are equal, outputs and state stop changing once all memory segments are full.

    They are bitwise equal, so no number in the state grows with the stream.
    """
    r, x = runner(case, x64=False), stream()[:, :W].astype(np.float32)
    state, at = r.fresh, {}
    # enough blocks for the ring to return to its position, and for any growing number to differ
    for block in range(69):
        y, state = r.call(x, state)
        at[block] = y, state
    same(at[68], at[8])


def test_the_window_of_fam_is_independent_of_the_position():
    """The first layer's window depends on the blocks only, and the memory does change, so that only
    the memory distinguishes the positions.
    """
    r = runner("fam-1-3", x64=False)
    x, state, at = stream()[:, :W].astype(np.float32), r.fresh, {}
    for block in range(61):
        _, state = r.call(x, state)
        at[block] = state[0]
    near, far = at[8], at[60]
    same(*(jax.tree.map(lambda a: a[0], s.window) for s in (near, far)))
    counters = [(s.window.blocks, s.window.tokens, s.updates) for s in (near, far)]
    same(*counters)
    assert (near.updates == r.config.fam_previous).all()
    assert np.abs(near.fam - far.fam).max() > 0


@marked(UNBOUNDED, slow=("feedback-layer",), long=UNBOUNDED[2:])
def test_unbounded_mixers_are_as_precise_far_from_the_start(case):
    """After 300 blocks, the float32 error relative to float64 is as small as at the start."""
    r, exact = runner(case, x64=False), runner(case)
    state, counters = r.fresh, []
    for call in range(51):  # six blocks per call
        if call in (1, 50):
            wide = jax.tree.map(lambda a: a.astype(float) if a.dtype == np.float32 else a, state)
            y, end = exact.call(r.x, wide)
            found, after = r.call(r.x, state)
            close(found.astype(float), y, 1e-5)
            same(
                [a for a in jax.tree.leaves(after) if a.dtype == np.int32],
                [a for a in jax.tree.leaves(end) if a.dtype == np.int32],
            )
            counters.append([a for a in jax.tree.leaves(after) if a.dtype == np.int32])
        _, state = r.call(r.x, state)
    same(*counters)


def test_long_range_angles_keep_their_precision():
    """Mixers without blocks: 10^7 tokens from the start, angles multiplied in float32 are off by
    up to half a radian, those of `long_range_angles` by no more than at the start.
    """
    for arch in (ArchConfig(), ArchConfig(rope_scaling="llama3", rope_factor=8)):
        theta = rotary.frequencies(64, 10_000.0, arch, xp=np)
        close(np.asarray(rotary.frequencies(64, 10_000.0, arch)), theta.astype(np.float32), 1e-6)
        worst = {}
        for position in (0, 1, -3, 4095, 10**5, 10**6, 10**7, 2**31 - 1):
            exact = position * theta
            found = np.asarray(rotary.long_range_angles(jnp.asarray([position]), theta))[0]
            plain = np.asarray(rotary.angles(jnp.asarray([position]), jnp.asarray(theta)))[0]
            wrapped = (np.abs(np.exp(1j * a) - np.exp(1j * exact)).max() for a in (found, plain))
            worst[position] = [float(a) for a in wrapped]
        assert max(far for far, _ in worst.values()) < 5e-5, worst
        assert worst[10**7][1] > 0.1, worst


@marked(ROTATED, slow=("fam,linear",), long=())
def test_linear_layers_rotate_precisely_far_from_the_start(case):
    """A document continues at token 10^7 in float32 as in float64."""
    narrow, exact = runner(case, x64=False), runner(case)
    state = narrow.call(narrow.x, narrow.fresh)[1]
    state = tuple(
        s._replace(length=np.full_like(s.length, 10**7)) if hasattr(s, "s") else s for s in state
    )
    wide = jax.tree.map(lambda a: a.astype(float) if a.dtype == np.float32 else a, state)
    close(narrow.call(narrow.x, state)[0].astype(float), exact.call(exact.x, wide)[0], 3e-4)


# features of rotated keys do not depend on distances only
@kinds(
    ("fam-gated", "fam-smeared", "bswa,fam", "feedback-same_and_lower"),
    without=["linear"],
    also=["linear-relu"],
    long=but("full", "fam-1-3", "delta-smeared", "feedback-all"),
)
def test_a_common_offset_is_an_identity(case):
    """RoPE on queries and keys depends on differences of positions only, so in exact arithmetic an
    offset of a whole row (B.2.2) is the identity; only rounding errors remain.
    """
    r = runner(case)
    offset = np.array([1.0, 4321.5, 62831.0])  # up to the longest wavelength
    close(r.call(r.x, r.fresh, offset=offset), r.whole, 1e-9)


@pytest.mark.parametrize(
    ("case", "remat"),
    [
        *((case, "none") for case in ("full", "swa-2", "bswa-1", "fam-1-3")),
        # S without an offset; test_a_common_offset_is_an_identity has blocks that read one
        *((case, "none") for case in ("linear", "delta-smeared")),
        *(
            pytest.param(case, remat, marks=pytest.mark.long)
            for case, remat in (
                *(("fam-static", "none"), ("fam-gated", "none")),
                ("fam-1-3", "block"),
            )
        ),
        *(
            pytest.param(case, remat, marks=pytest.mark.slow)
            for case, remat in (
                # one pattern with two mixers: all layers have the same offset
                ("fam,linear", "none"),
                *(("delta", "none"), ("fam-smeared", "none")),
                *(("bswa-1", "block"), ("delta-smeared", "block")),
            )
        ),
    ],
)
def test_offsets_apply_by_row_at_every_position(case, remat, monkeypatch):
    """B.2.2 against its transcription, by row, for queries and keys of a block, of its FAM and of
    the memory prompt, with a position embedding that is not relative.
    """

    # composes as rotations do, but depends on the absolute position
    def grow(self, x, positions, *, long_range=False):
        return x * jnp.exp(0.01 * positions)[..., None, None]

    monkeypatch.setattr(QKV, "rotate", grow)
    monkeypatch.setattr(oracle, "rotate", lambda x, position, base: x * np.exp(0.01 * position))
    config = CASES[case]
    r = Runner(replace(config, remat=remat), params=runner(case).params)
    offset, tokens = np.array([0.0, 7.25, 31.0]), TOKENS[:, :W]
    first = np.tile(np.arange(W) == 0, (B, 1))
    fresh = r.run(jit(lambda p, o: r.model(p).init_state(B, o)), offset)
    # an offset of 0 equals none: test_a_common_offset_is_an_identity
    unmoved, _ = r.call(r.x[:, :W], r.fresh, np.zeros_like(first), offset=0 * offset)
    found, end = r.call(r.x[:, :W], fresh, np.zeros_like(first), offset=offset)
    # equal for a document that starts within a call
    begun = jax.tree.map(lambda a: np.zeros_like(a) - 3, r.fresh)
    close(r.call(r.x[:, :W], begun, first, offset=offset)[0], found, 1e-10)

    params = jax.tree.map(np.asarray, nnx.to_pure_dict(r.params))
    for row, at in enumerate(offset):
        logits, memory = transcription.model(config, params, tokens[row], offset=at)
        close(found[row], logits, 1e-9)
        kept = transcription.memory_in_state(config, end, row)
        for a, b in zip(kept, memory, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                close(a, b, 1e-9)
    moved = np.abs(found - unmoved).max((1, 2))
    assert moved[0] < 1e-10
    assert (moved[1:] > 1e-3).all()


@pytest.mark.long
def test_an_offset_moves_learned_positions_of_its_row():
    r = runner("fam-1-3, others")
    size = r.config.capacity
    offset = np.array([0.0, 3.5, size + 3.5])
    moved, _ = r.call(r.x, r.fresh, offset=offset)
    close(moved[0], r.whole[0][0], 1e-9)
    assert (np.abs(moved - r.whole[0]).max((1, 2))[1:] > 1e-3).all()
    # a document that has used three entries of the table
    state = (*r.fresh[:-1], np.full_like(r.fresh[-1], 3))
    close(moved[1], r.call(r.x, state)[0][1], 1e-9)
    again, _ = r.call(r.x, r.fresh, offset=np.full(B, size + 3.5))
    close(again[2], moved[2], 1e-9)


def test_in_float32_an_offset_is_an_identity_but_for_rounding():
    r = runner("fam-1-3", x64=False)
    # float32 holds 62831 radians to 0.004
    for offset, tolerance in [(1.0, 1e-5), (62831.0, 0.03)]:
        moved, state = r.call(r.x, r.fresh, offset=np.full(B, offset, np.float32))
        close((moved, state), r.whole, tolerance)
        assert (moved != r.whole[0]).any()  # the offset was applied


def test_an_offset_of_queries_alone_is_no_identity():
    e = 8
    theta = rotary.frequencies(e, 10_000.0, ArchConfig())
    q, k, v = (jnp.asarray(normal(i, 5, 2, e)) for i in range(3))

    def attended(of_q, of_k):
        def turn(x, offset):
            positions = jnp.arange(5) + offset
            return rotary.rotate(x, rotary.angles(positions, theta)[:, None])

        return attend(turn(q, of_q), turn(k, of_k), v)

    plain = attended(0, 0)
    close(attended(3, 3), plain, 1e-5)
    assert np.abs(attended(3, 0) - plain).max() > 0.1
    assert np.abs(attended(0, 3) - attended(3, 0)).max() > 0.1  # the sign matters


@pytest.mark.parametrize(
    ("update", "grows", "dtype"),
    [
        ("sum", True, "float32"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("gated", False, "bfloat16"), ("static", False, "float32"))
        ),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("sum", True, "bfloat16"),
                ("gated", False, "float32"),
                ("static", False, "bfloat16"),
            )
        ),
    ],
)
def test_only_the_sum_grows(update, grows, dtype):
    """RMS of the FAM after 20 and after 200 blocks, with initial parameters.

    A memory that is not a sum keeps changing, and so does its rounding error: like an RNN's, logits
    in bfloat16 soon differ from those in float32.
    """
    case = replace(CASES["fam-gated"], fam_update=update, dtype=dtype)
    r = Runner(case, x64=False, params=init_params(replace(case, dtype="float32")))
    state, sizes = r.fresh, []
    for call in range(200 * W // LENGTH + 1):
        x = np.random.default_rng(call).integers(VOCAB, size=(B, LENGTH))
        y, state = r.tokens(x, state)
        assert np.isfinite(y).all()
        sizes.append(np.sqrt(np.square(state[0].fam).mean()))
    assert (sizes[-1] > 5 * sizes[20 * W // LENGTH]) == grows
    assert sizes[-1] < 5 or grows


# contract 11


def blocks_200() -> Iterator[Any]:
    """Yield random tokens of 200 blocks, LENGTH at a time."""
    for call in range(200 * W // LENGTH + 1):
        yield np.random.default_rng(call).integers(VOCAB, size=(B, LENGTH))


def error(a: Any, b: Any) -> float:
    """Return the RMS of a - b relative to that of b."""
    return float(np.sqrt(np.square(a - b).mean() / np.square(b).mean()))


BFLOAT16 = ("fam-1-3", "delta-smeared", "linear", "lstm")
BFLOAT16_LONG = ("bswa-1", "fm-2", "block_recurrent", "linear-performer")
BFLOAT16_LONG += ("full", "feedback-all", "transformer-own", "rmt", "autocompressor")
# layers that are among those above, and another composition
BFLOAT16_SLOW = ("swa-2", "fam-static", "bswa,fam", "delta")
BFLOAT16_SLOW += ("feedback-average", "transformer-shared")


@marked((*BFLOAT16, *BFLOAT16_LONG, *BFLOAT16_SLOW), slow=BFLOAT16_SLOW, long=BFLOAT16_LONG)
def test_bfloat16_stays_finite_and_close(case):
    """Over 200 blocks of 4, with initial parameters, whose attention is not sharp."""
    # all of them, which full attention keeps, and of which an AutoCompressor keeps the summaries
    config = replace(CASES[case], capacity=200 * W + LENGTH)
    wide = Runner(config, x64=False, params=init_params(config))
    narrow = Runner(replace(config, dtype="bfloat16"), x64=False, params=wide.params)
    # float32 with weights that are rounded to bfloat16
    narrow_weights = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(a.dtype), wide.params)
    rounded = Runner(config, x64=False, params=narrow_weights)

    a, b, c = narrow.fresh, wide.fresh, rounded.fresh
    for x in blocks_200():
        y, a = narrow.tokens(x, a)
        z, b = wide.tokens(x, b)
        if "delta" in case:
            _, c = rounded.tokens(x, c)
        assert np.isfinite(y).all()
        assert error(y, z) < 0.03
    # like linear attention's, an LSTM's state is a sum over all tokens
    kept = jnp.dtype(np.float32 if narrow.config.stack == "lstm" else jnp.bfloat16)
    if is_segmented(narrow.config):
        # an AutoCompressor keeps keys and values
        assert narrow.config.stack != "rmt" or a.memory.dtype == np.float32
        a, b = a._replace(memory=None), b._replace(memory=None)
    for narrow_layer, wide_layer, rounded_layer in zip(a, b, c, strict=True):
        if narrow.config.stack != "residual":
            assert {x.dtype for x in jax.tree.leaves(narrow_layer)} <= {kept, np.dtype(np.int32)}
        if hasattr(narrow_layer, "s"):
            assert narrow_layer.s.dtype == np.float32
            limit = 0.03
            if "delta" in case:  # a matrix of the associations of single tokens depends on weights
                limit = max(limit, 1.2 * error(rounded_layer.s, wide_layer.s))
            assert error(narrow_layer.s, wide_layer.s) < limit
        if hasattr(narrow_layer, "z"):
            assert narrow_layer.z.dtype == np.float32
        if hasattr(narrow_layer, "states"):
            assert narrow_layer.states.dtype == np.float32
            assert error(narrow_layer.states, wide_layer.states) < 0.03
        if hasattr(narrow_layer, "fam"):
            assert narrow_layer.fam.dtype == np.float32
            assert narrow_layer.k.dtype == jnp.bfloat16
            assert error(narrow_layer.fam, wide_layer.fam) < 0.1


@pytest.mark.long
def test_a_gated_memory_in_bfloat16_is_as_close_as_with_rounded_weights():
    """Over 200 blocks, with initial parameters.

    Errors of the memory come back, as in an RNN (see `test_only_the_sum_grows`), so they are
    compared with those of rounded weights in float32.
    """
    case = CASES["fam-gated"]
    wide = Runner(case, x64=False, params=init_params(case))
    narrow = Runner(replace(case, dtype="bfloat16"), x64=False, params=wide.params)
    weights = jax.tree.map(lambda a: jnp.asarray(jnp.bfloat16(a), a.dtype), wide.params)
    others = [narrow, Runner(case, x64=False, params=weights)]
    state, states, errors = wide.fresh, [r.fresh for r in others], []
    for x in blocks_200():
        expected, state = wide.tokens(x, state)
        ys, states = zip(*map(Runner.tokens, others, [x] * 2, states), strict=True)
        assert np.isfinite(ys[0]).all()
        errors.append([error(y, expected) for y in ys])
    assert states[0][0].fam.dtype == np.float32
    assert states[0][0].k.dtype == jnp.bfloat16
    assert np.max(errors[:5]) < 0.03  # 30 blocks
    of_dtype, of_weights = np.mean(errors, 0)
    assert of_dtype < 3 * of_weights
