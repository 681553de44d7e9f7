"""Weights in the compute dtype: the model computes the same, bit by bit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from contracts.harness import BASE, CASES, FAST, TOKENS, W
from flax import nnx
from xla_flags import known_flags

from famjax.config.schema import AdaptiveConfig, EncoderConfig, LoraConfig
from famjax.core.types import Context
from famjax.eval.state_file import model_fingerprint
from famjax.models.cast_weights import cast_weights
from famjax.models.seq2seq import Seq2Seq, make_model

# otherwise XLA on CPU computes with unrounded weights
_EXACT = {**FAST, **known_flags({"xla_allow_excess_precision": False})}

MODELS = {
    "adapters": replace(CASES["fam-1-3"], lora=LoraConfig(rank=2, alpha=4.0), tied=False),
    "delta": CASES["delta-smeared"],
    "linear": CASES["linear"],
    "adaptive": replace(BASE, mixer="full", adaptive=AdaptiveConfig(cutoffs="5")),
    "encoder": replace(BASE, mixer="full", encoder=EncoderConfig(layers=1, shared=False)),
    "lstm": CASES["lstm"],
    "feedback": CASES["feedback-all"],
}


@pytest.mark.parametrize(
    "name",
    [
        *("delta", "encoder"),
        *(pytest.param(x, marks=pytest.mark.long) for x in ("adapters", "linear", "adaptive")),
        *(pytest.param(x, marks=pytest.mark.long) for x in ("lstm", "feedback")),
    ],
)
def test_cast_weights_compute_the_same(name):
    model = make_model(replace(MODELS[name], dtype="bfloat16"), rngs=nnx.Rngs(0))
    for path, param in nnx.iter_graph(model):
        if isinstance(param, nnx.Param):  # adapters are 0 at first
            draws = np.random.default_rng(len(path)).normal(size=param.shape)
            param.set_value(param[...] + 0.1 * draws.astype(param.dtype))
    before = jax.tree.leaves(_run(model))
    floats = nnx.state(model, nnx.Param)

    cast_weights(model)
    for a, b in zip(before, jax.tree.leaves(_run(model)), strict=True):
        np.testing.assert_array_equal(a, b)
    # all large parameters are narrow
    sizes = dict.fromkeys(("bfloat16", "float32"), 0)
    for param in jax.tree.leaves(nnx.state(model, nnx.Param)):
        sizes[param.dtype.name] += param.size
    assert sizes["bfloat16"] > 5 * sizes["float32"]
    assert sum(sizes.values()) == sum(x.size for x in jax.tree.leaves(floats))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_only_accelerators_have_cast_weights(platform, monkeypatch):
    device = SimpleNamespace(platform=platform)
    monkeypatch.setattr("famjax.train.run.target_device", lambda: device)
    run = tiny.run_with("fam", dtype="bfloat16")
    run = replace(run, model=nnx.clone(run.model))  # other tests use the original
    expected = model_fingerprint(run)
    run = replace(run, original_fingerprint=expected).for_inference()
    narrow = [a.dtype == jnp.bfloat16 for a in jax.tree.leaves(nnx.state(run.model, nnx.Param))]
    assert any(narrow) == (platform == "gpu")
    # a state file still belongs to the run as it was
    assert model_fingerprint(run) == expected
    changed = replace(run, original_fingerprint="")
    assert (model_fingerprint(changed) == expected) == (platform == "cpu")


def _run(model):
    """Return logits of a call and of a step, and the state."""
    graph, params = nnx.split(model)

    def run(params):
        model = nnx.merge(graph, params)
        source, tokens = None, jnp.asarray(TOKENS)
        if isinstance(model, Seq2Seq):
            source = model.read_source(tokens[:, :5], jnp.ones((len(tokens), 5), jnp.int32))
        ctx = Context(source=source)
        logits, state = model(tokens[:, : 4 * W], model.init_state(len(tokens)), ctx)
        return logits, model.step(tokens[:, 4 * W :][:, :1], state, ctx)

    return jax.jit(run, compiler_options=_EXACT)(params)
