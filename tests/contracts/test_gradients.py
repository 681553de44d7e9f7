"""Contracts 3, 5, 6 and 12, as far as they are about gradients. All in float64."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from .harness import KINDS, VOCAB, B, W, close, normal, runner, stream

all_kinds = pytest.mark.parametrize("case", KINDS)

X = stream(length=4 * W)
PROBE = normal(9, B, 4 * W, VOCAB)


def add(a, b):
    return jax.tree.map(np.add, a, b)


# 3 ------------------------------------------------------------------------------------------------


@all_kinds
@pytest.mark.parametrize("t", [1, W, 2 * W + 1])
def test_no_gradient_flows_back_in_time(case, t):
    """Outputs before t do not depend on what stands from t on; they do on what stands before."""
    before = PROBE * (np.arange(4 * W) < t)[:, None]
    _, _, (_, dx, _) = runner(case).grad(X, before)
    assert (dx[:, t:] == 0).all()
    assert (np.abs(dx[:, :t]).max(-1) > 0).all()


# 5 ------------------------------------------------------------------------------------------------


@all_kinds
def test_behind_a_reset_gradients_are_those_of_a_fresh_stream(case):
    """The FAM prompt among them: a document within a call begins from the learned memory."""
    r, half = runner(case), 2 * W
    _, dirty = r.step(normal(1, B, W, X.shape[-1]), r.fresh)
    reset = np.tile(np.arange(4 * W) == half, (B, 1))
    behind = PROBE * (np.arange(4 * W) >= half)[:, None]
    value, state, (params, dx, dstate) = r.grad(X, behind, dirty, reset)
    alone, fresh_state, (fresh_params, fresh_dx, _) = r.grad(X[:, half:], PROBE[:, half:])
    close((value, state, params, dx[:, half:]), (alone, fresh_state, fresh_params, fresh_dx))
    assert (dx[:, :half] == 0).all()
    assert all((g == 0).all() for g in jax.tree.leaves(dstate))
    prompt = params["stack"]["prompt"]
    if "fam" in r.config.mixer:
        assert np.abs(np.asarray(jax.tree.leaves(prompt)[0])).max() > 1e-3


# 6 ------------------------------------------------------------------------------------------------


@all_kinds
def test_gradients_through_carried_state_are_those_of_one_long_call(case):
    r = runner(case)
    value, _, (params, dx, _) = r.grad(X, PROBE)
    close(r.grad_segments(X, PROBE, 2, cut=False), (value, params, dx))


@all_kinds
def test_a_cut_state_gives_the_sum_of_the_segments_gradients(case):
    r, half = runner(case), 2 * W
    # from a state that is given, so that the first segment's is cut as well
    one = r.grad(X[:, :half], PROBE[:, :half], r.fresh)
    two = r.grad(X[:, half:], PROBE[:, half:], one[1])
    whole = (
        add(one[0], two[0]),
        add(one[2][0], two[2][0]),
        np.concatenate([one[2][1], two[2][1]], 1),
    )
    cut = r.grad_segments(X, PROBE, 2, cut=True)
    close(cut, whole)
    through = r.grad_segments(X, PROBE, 2, cut=False)
    close(through[0], cut[0])  # the values do not change, but what is learned does
    differs = np.abs(through[2] - cut[2]).max((0, 2)) > 1e-6
    assert not differs[half:].any()
    assert differs[:half].any() == (case != "bswa_sg-2")


@pytest.mark.parametrize(
    ("case", "mixer"), [("bswa_sg-2", "bswa_sg"), ("bswa_sg-2", "bswa"), ("fam-1-3", "fam")]
)
def test_the_gradient_at_memory_segments_is_cut_where_asked(case, mixer):
    """Of the loss on one block, with respect to the blocks before it."""
    r = runner(case, mixer=mixer)
    last = PROBE * (np.arange(4 * W) >= 3 * W)[:, None]
    _, _, (_, dx, _) = r.grad(X, last)
    reach = np.abs(dx).max((0, 2)).reshape(4, W) > 0
    assert reach[3].all()
    # two layers of two segments reach further back than the stream is long
    assert (~reach[:3] if mixer == "bswa_sg" else reach[:3]).all()


def test_a_stopped_gradient_changes_no_value():
    r, plain = runner("bswa_sg-2"), runner("bswa_sg-2", mixer="bswa")
    close(r.grad(X, PROBE)[:2], plain.grad(X, PROBE)[:2], 1e-13)


@pytest.mark.parametrize("mixer", ["bswa_sg", "bswa"])
def test_a_stopped_gradient_is_cut_at_carried_keys_and_values_too(mixer):
    r = runner("bswa_sg-2", mixer=mixer)
    _, state = r.step(normal(1, B, W, X.shape[-1]), r.fresh)
    _, _, (_, _, dstate) = r.grad(X, PROBE, state)
    flows = [np.abs(g).max() > 0 for g in (dstate[0].k, dstate[0].v)]
    assert flows == [mixer == "bswa"] * 2


# 12 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["swa-2", "fam-1-3", "bswa,fam"])
@pytest.mark.parametrize(
    "changes",
    [{"scan_layers": False}, {"remat": "layer"}, {"remat": "block"}],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_scan_and_remat_change_no_number(case, changes):
    x, probe = X[:, : 2 * W], PROBE[:, : 2 * W]
    close(runner(case, **changes).grad(x, probe), runner(case).grad(x, probe))
