"""Contract 9: on a mesh of eight devices the numbers are those of one."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from famjax.core import sharding
from famjax.core.config import MeshConfig
from famjax.core.types import Context

from .harness import CASES, VOCAB, Runner, W, close, jit

LANES = 4


@pytest.mark.parametrize(
    "case",
    [
        *("full", "swa-2", "bswa_sg-2", "fam-1-3", "bswa,fam", "linear", "linear-rfa"),
        *("feedback-all", "feedback-same_and_lower", "transformer-shared", "lstm"),
    ],
)
def test_sharded_equals_unsharded(case):
    """Lanes over data and fsdp, heads over tensor; a call with a reset, then a step."""
    # vocabulary and heads that divide, so that all that can be sharded is
    config = replace(CASES[case], vocab_size=VOCAB + 1, kv_heads=max(2, CASES[case].kv_heads))
    r = Runner(config)
    tokens = np.random.default_rng(0).integers(VOCAB, size=(LANES, 2 * W + 1))
    reset = np.tile(np.arange(2 * W) == W, (LANES, 1)) & (np.arange(LANES) % 2 == 0)[:, None]

    def f(params, tokens, reset, state):
        model = r.model(params)
        y, state = model(tokens[:, :-1], state, Context(reset))
        last, state = model.step(tokens[:, -1:], state)
        return y, last, state

    with jax.enable_x64(True):
        mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
        model = r.model(r.params)
        fresh = jit(lambda params: r.model(params).init_state(LANES))(r.params)
        lies = (
            sharding.parameter_shardings(mesh, r.params),
            sharding.batch_sharding(mesh, LANES),
            sharding.batch_sharding(mesh, LANES),
            sharding.state_shardings(mesh, model.state_axes(), fresh),
        )
        on_one = jit(f)(r.params, tokens, reset, fresh)
        placed = jax.device_put((r.params, tokens, reset, fresh), lies)
        on_mesh = jit(f, out_shardings=(None, None, lies[3]))(*placed)

    specs = [place.spec for place in jax.tree.leaves(lies[3])]
    assert all(("data", "fsdp") in spec for spec in specs)
    # vectors of memory are read by all heads
    assert any("tensor" in spec for spec in specs) == (config.feedback.cache != "memory")
    assert all(
        a.sharding == b
        for a, b in zip(jax.tree.leaves(on_mesh[2]), jax.tree.leaves(lies[3]), strict=True)
    )
    close(jax.tree.map(np.asarray, on_mesh), jax.tree.map(np.asarray, on_one))
