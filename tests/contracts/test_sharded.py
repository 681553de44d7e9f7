"""Contract 9: results on a mesh of eight devices equal those on one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from famjax.config.schema import MeshConfig
from famjax.core.types import Context
from famjax.parallel import sharding, traced

from .harness import CASES, VOCAB, Runner, W, but, close, jit, marked

LANES = 4


# rows, heads and parameters on several devices
SHARDED = ("full", "swa-2", "bswa_sg-2", "fam-1-3", "fam-gated", "delta-smeared", "bswa,fam")
SHARDED += ("block_recurrent", "fam-static", "fam-zero", "fm-2", "linear", "linear-rfa")
SHARDED += ("feedback-all", "feedback-same_and_lower", "transformer-shared", "lstm")
SHARDED += ("rmt", "autocompressor", "bswa-conv", "bswa-ngrams")
MORE = ("fam-gated", "fam-static", "fam-zero", "bswa,fam", "linear-rfa", "feedback-same_and_lower")


# one of each kind of state
FEW = ("fam-1-3", "linear", "feedback-all", "lstm")


# those in MORE have the parameters and states of others, but for a few that are replicated
@marked(SHARDED, slow=MORE, long=but(*FEW))
def test_sharded_equals_unsharded(case):
    """Shard lanes over data and fsdp, heads over tensor; run a call with a reset, then a step."""
    # vocabulary and heads are divisible, so that everything that can be sharded is
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
        with_mesh = jit(f, out_shardings=(None, None, lies[3]))(*placed)

    specs = [place.spec for place in jax.tree.leaves(lies[3])]
    assert all(("data", "fsdp") in spec for spec in specs)
    # all heads read the memory vectors
    assert any("tensor" in spec for spec in specs) == (config.feedback.cache != "memory")
    assert all(
        a.sharding == b
        for a, b in zip(jax.tree.leaves(with_mesh[2]), jax.tree.leaves(lies[3]), strict=True)
    )
    close(jax.tree.map(np.asarray, with_mesh), jax.tree.map(np.asarray, on_one))


def call_and_loss(r: Runner, params: Any, tokens: Any, ctx: Context, state: Any) -> Any:
    """Return the valid outputs of a call, the state after it, and one loss of both."""
    y, state = r.model(params)(tokens, state, ctx)
    y = jnp.where(ctx.valid[..., None], y, 0)
    wide = [a for a in jax.tree.leaves(state) if a.dtype == y.dtype]
    return sum((jnp.square(a).mean() for a in wide), jnp.square(y).mean()), (y, state)


# tokens on several devices; one case of each communication: several hops, a ring with shared
# parameters and one without, a mask by distance, gathered tensors
# FAM's is in tests/train/test_sharded.py too
QUICK = ("bswa-3", "linear", "lstm")
LONG = ("delta-smeared", "full")
SLOW = ("swa-6", "bswa_sg-2", "bswa-0", "fam-0-1", "bswa,fam", "fam,linear", "linear-rfa")
SLOW += ("fam-1-3", "fam-gated", "fam-smeared", "fam-static", "fam-zero", "fm-1", "fm-2")
SLOW += ("bswa-smeared", "bswa-conv", "bswa-ngrams")
SLOW += ("delta", "block_recurrent", "block_recurrent-lstm")
SLOW += ("feedback-all", "feedback-same_and_lower", "transformer-shared")
SLOW += ("rmt", "autocompressor")


@marked((*QUICK, *LONG, *SLOW), slow=SLOW, long=LONG)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain"),
        pytest.param({"remat": "block"}, id="remat", marks=pytest.mark.slow),
    ],
)
def test_tokens_on_many_devices(case: str, changes: dict[str, Any]) -> None:
    """With one block per device, outputs, state and gradients of params and initial state agree."""
    config = replace(CASES[case], capacity=16 * W, **changes)
    r = Runner(config)
    rng = np.random.default_rng(0)
    tokens = rng.integers(VOCAB, size=(LANES, 8 * W))
    # documents end within the call; blocks of padding follow; one lane is all padding
    reset, valid = np.zeros(tokens.shape, bool), np.ones(tokens.shape, bool)
    reset[0, [3 * W, 5 * W]] = reset[1, 2 * W] = True
    valid[1, 4 * W + 1 :] = valid[2] = False
    ctx = Context(reset, valid)

    def f(params: Any, tokens: Any, ctx: Context, state: Any) -> Any:
        grad = jax.value_and_grad(
            lambda params, state: call_and_loss(r, params, tokens, ctx, state),
            argnums=(0, 1),
            has_aux=True,
            allow_int=True,
        )
        return grad(params, state)

    with jax.enable_x64(True):
        mesh = sharding.make_mesh(MeshConfig(data=1, sequence=8))
        fresh = jit(lambda params: r.model(params).init_state(LANES))(r.params)
        tokens_lie = sharding.batch_sharding(mesh, *tokens.shape)
        everywhere = sharding.replicated(mesh)
        lies = (everywhere, tokens_lie, tokens_lie, everywhere)
        on_one, on_mesh = jit(f), jit(traced.with_mesh(mesh, f), in_shardings=lies)
        state = fresh
        # from the start and from the middle of a stream
        for masks in (ctx._replace(valid=valid | True), ctx):
            found, expected = (of(r.params, tokens, masks, state) for of in (on_mesh, on_one))
            floats = [
                [np.asarray(a) for a in jax.tree.leaves(of) if a.dtype != jax.dtypes.float0]
                for of in (found, expected)
            ]
            close(*floats)
            (_, (_, state)), _ = jax.tree.map(np.asarray, expected)
