"""Contracts 3, 5, 6 and 12 for gradients, in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from famjax.config.resolved import resolve_model
from famjax.config.schema import ModelConfig
from famjax.core.types import Context
from famjax.stacks.residual import ResidualStack

from .harness import VOCAB, B, Runner, W, but, close, kinds, normal, runner, stream

# quick runs have one of each kind of state
LONG = but("bswa-1", "fam-1-3", "fm-2", "delta-smeared", "linear", "feedback-all", "lstm")
# beside each mixer and stack, CI has what a memory begins with: a prompt or a prefix
all_kinds = kinds(("fam-gated", "fam-smeared", "bswa,fam", "feedback-same_and_lower"), long=LONG)
# swa is bswa with another mask
most_kinds = kinds(without=("swa-2",), long=LONG)

# a scan over calls compiles as long as a call; kinds of state with a gradient, and without one
SEGMENTED = ("bswa-1", "bswa_sg-2", "fam-1-3", "delta-smeared", "feedback-all")
segmented = kinds(but(*SEGMENTED), without=("swa-2",), long=but("fam-1-3", "feedback-all"))

X = stream(length=4 * W)
PROBE = normal(9, B, 4 * W, VOCAB)
HALF = 2 * W
BEGIN = np.arange(4 * W) == HALF
SECOND = (np.arange(4 * W) >= HALF)[:, None]


def used(r: Runner) -> Any:
    """Return the state after one call, computed by the program that is differentiated."""
    return r.grad(normal(1, *X.shape), PROBE)[1]


# contract 3


@all_kinds
@pytest.mark.parametrize("t", [1, W, 2 * W + 1])
def test_no_gradient_flows_back_in_time(case, t):
    """Outputs before t do not depend on inputs from t on; they do on earlier ones."""
    before = PROBE * (np.arange(4 * W) < t)[:, None]
    _, _, (_, dx, _) = runner(case).grad(X, before)
    assert (dx[:, t:] == 0).all()
    assert (np.abs(dx[:, :t]).max(-1) > 0).all()


# contract 5


@all_kinds
def test_after_a_reset_gradients_are_those_of_a_fresh_stream(case):
    """This includes the memory prompt: a document within a call starts from the learned memory."""
    r = runner(case)
    dirty = used(r)
    value, _, (params, dx, dstate) = r.grad(X, PROBE * SECOND, dirty, np.tile(BEGIN, (B, 1)))
    turned = np.roll(X, HALF, 1), np.roll(PROBE * SECOND, HALF, 1)
    alone, _, (fresh_params, fresh_dx, _) = r.grad(*turned)
    close((value, params, dx), (alone, fresh_params, np.roll(fresh_dx, HALF, 1)))
    assert (dx[:, :HALF] == 0).all()
    assert all((g == 0).all() for g in jax.tree.leaves(dstate))
    if "fam" in r.mixers:
        has_prefix = r.config.fam_init == "prefix"
        first = params["stack"]["layers"][0]["mixer"]["prefix"] if has_prefix else None
        first = params["stack"]["prompt"] if first is None else first
        assert np.abs(jax.tree.leaves(first)[0]).max() > 1e-3


# contract 6


@most_kinds
def test_gradients_through_carried_state_are_those_of_one_long_call(case):
    """By the chain rule: that of the second call by its state goes into that of the first."""
    r = runner(case)
    value, _, (params, dx, _) = r.grad(X, PROBE)
    # each call is half of a longer one, whose program there is: the rest is padding
    half = np.tile(~SECOND[:, 0], (B, 1))
    first, second = X, np.roll(X, HALF, 1)
    probes = PROBE * ~SECOND, np.roll(PROBE * SECOND, HALF, 1)
    one, middle, _ = r.grad(first, probes[0], valid=half)
    two, _, (params_2, dx_2, end) = r.grad(second, probes[1], middle, valid=half)
    _, _, (params_1, dx_1, _) = r.grad(first, probes[0], valid=half, end=end)
    both = np.concatenate([dx_1[:, :HALF], dx_2[:, :HALF]], 1)
    close((one + two, jax.tree.map(np.add, params_1, params_2), both), (value, params, dx))


@segmented
def test_gradients_within_a_scan_are_those_of_one_long_call(case):
    r = runner(case)
    value, _, (params, dx, _) = r.grad(X, PROBE)
    close(r.grad_segments(X, PROBE, 2, cut=False), (value, params, dx))


@segmented
def test_a_cut_state_gives_the_sum_of_the_segments_gradients(case):
    r = runner(case)
    # both start from given states, which do not depend on the parameters
    no, yes = np.zeros((B, HALF), bool), np.ones((B, HALF), bool)
    _, middle = r.call(X[:, :HALF], r.fresh, no, yes)
    one, _, (params_1, dx_1, _) = r.grad(X, PROBE * ~SECOND, r.fresh)
    turned = np.roll(X, HALF, 1), np.roll(PROBE * SECOND, HALF, 1)
    two, _, (params_2, dx_2, _) = r.grad(*turned, middle)
    added = jax.tree.map(np.add, (one, params_1), (two, params_2))
    cut = r.grad_segments(X, PROBE, 2, cut=True)
    close(cut, (*added, np.concatenate([dx_1[:, :HALF], dx_2[:, :HALF]], 1)))
    # uncut, values are the same, and gradients flow to earlier segments unless the mixer stops them
    through = r.grad_segments(X, PROBE, 2, cut=False)
    close(through[0], cut[0])
    differs = np.abs(through[2] - cut[2]).max((0, 2)) > 1e-6
    assert not differs[HALF:].any()
    assert differs[:HALF].any() == (case != "bswa_sg-2")


@pytest.mark.parametrize(
    ("case", "mixer"), [("bswa_sg-2", "bswa_sg"), ("bswa_sg-2", "bswa"), ("fam-1-3", "fam")]
)
def test_bswa_sg_stops_the_gradient_at_memory_segments(case, mixer):
    """Take the loss of one block, and gradients with respect to the blocks before it."""
    r = runner(case, mixer=mixer)
    last = PROBE * (np.arange(4 * W) >= 3 * W)[:, None]
    _, _, (_, dx, _) = r.grad(X, last)
    receptive_field = np.abs(dx).max((0, 2)).reshape(4, W) > 0
    assert receptive_field[3].all()
    # with two layers of two segments, the receptive field is longer than the stream
    assert (~receptive_field[:3] if mixer == "bswa_sg" else receptive_field[:3]).all()


def test_a_stopped_gradient_changes_no_value():
    r, plain = runner("bswa_sg-2"), runner("bswa_sg-2", mixer="bswa")
    close(r.grad(X, PROBE)[:2], plain.grad(X, PROBE)[:2], 1e-13)


@pytest.mark.parametrize("mixer", ["bswa_sg", "bswa"])
def test_a_stopped_gradient_is_cut_at_carried_keys_and_values_too(mixer):
    r = runner("bswa_sg-2", mixer=mixer)
    _, _, (_, _, dstate) = r.grad(X, PROBE, used(r))
    flows = [np.abs(g).max() > 0 for g in (dstate[0].k, dstate[0].v)]
    assert flows == [mixer == "bswa"] * 2


# contract 12

# one case of each mixer and stack that remat or a scan changes: gradients, or values alone
GRADIENTS = ("fam-1-3", "delta-smeared", "fm-2", "block_recurrent", "linear", "bswa_sg-2")
GRADIENTS += ("feedback-all", "rmt", "autocompressor")
VALUES = {
    "swa-2": {"scan_layers": False, "remat": "layer"},
    "transformer-shared": {"remat": "layer"},
    "bswa-1": {"remat": "block"},
    "full": {"scan_layers": False},
    "bswa,fam": {"scan_layers": False, "remat": "block"},
}
# one of the residual stack, and one of a stack of its own
QUICK_VALUES = ("swa-2", "transformer-shared")


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("fam-1-3", {"remat": "attention"}),
        pytest.param("fam-1-3", {"scan_layers": False}, marks=pytest.mark.long),
        *(pytest.param(case, {"remat": "layer"}, marks=pytest.mark.long) for case in GRADIENTS[1:]),
        *(
            pytest.param(case, {"scan_layers": False}, marks=pytest.mark.long)
            for case in ("block_recurrent", "rmt", "autocompressor")
        ),
        *(
            pytest.param(case, {"remat": "layer"}, marks=pytest.mark.slow)
            for case in ("fam-1-3", "fam-gated")
        ),
        *(
            pytest.param(case, changes, marks=pytest.mark.slow)
            for case in ("fam-gated", "fam-smeared", "fam-static", "fm-2", "delta")
            for changes in ({"scan_layers": False}, {"remat": "block"})
        ),
    ],
    ids=str,
)
def test_scan_and_remat_change_no_number(case, changes):
    close(runner(case, **changes).grad(X, PROBE), runner(case).grad(X, PROBE))


@pytest.mark.parametrize(
    "case",
    [
        *("fam-1-3", "delta-smeared"),
        *(pytest.param(case, marks=pytest.mark.long) for case in ("bswa_sg-2", "fm-2")),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (
                *("swa-2", "bswa-1", "bswa-smeared", "fam-gated", "fam-smeared", "fam-static"),
                "delta",
            )
        ),
    ],
)
def test_sequential_blocks_have_the_same_gradients(case):
    """Also gradients of carried memory, with a document that starts within the call."""
    r, plain = runner(case, remat="attention"), runner(case)
    state = used(plain)
    reset = np.zeros((B, 4 * W), bool)
    reset[0, HALF] = True
    close(r.grad(X, PROBE, state, reset), plain.grad(X, PROBE, state, reset))


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        pytest.param(case, changes, marks=() if case in QUICK_VALUES else pytest.mark.long)
        for case, changes in VALUES.items()
    ],
    ids=str,
)
def test_scan_and_remat_change_no_value(case, changes):
    close(runner(case, **changes).whole, runner(case).whole)


@pytest.mark.parametrize("remat", ["none", "layer"])
def test_residuals_are_products_and_attention_weights_only(remat):
    """Other values are cheap to recompute, and would more than double the memory."""
    b, n, w, d, h, c = 2, 4, 16, 32, 2, 128
    config = ModelConfig(
        vocab_size=8,
        mixer="bswa",
        layers=1,
        width=d,
        heads=h,
        mlp_width=c,
        block_len=w,
        remat=remat,
    )
    graph, params = nnx.split(ResidualStack(resolve_model(config), rngs=nnx.Rngs(0)))

    def read(params, x):
        stack = nnx.merge(graph, params)
        return stack(x, stack.init_state(b), Context())[0]

    x = jnp.ones((b, n * w, d))
    backward = jax.eval_shape(lambda *args: jax.vjp(read, *args)[1], params, x)
    kept = sum(a.size for a in jax.tree.leaves(backward))
    kept -= sum(a.size for a in jax.tree.leaves(params))
    state = (
        2 * b * w * d * 2 + 2 * b
    )  # carried keys and values and their counters are arguments too
    # x, q, k, v, the attention output, the projection; up and gate; and the attention weights
    products = b * n * w * (6 * d + 2 * c) + b * n * h * w * 2 * w
    need = products if remat == "none" else x.size
    assert need <= kept <= need + state
