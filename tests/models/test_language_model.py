"""The language model around the stack: embedding gradients, heads, and checks of calls."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from famjax.config.schema import AdaptiveConfig, ModelConfig
from famjax.core.errors import UserError
from famjax.core.types import Context
from famjax.mixers.full import shorten_caches
from famjax.models.language_model import LanguageModel
from famjax.ops.lookup import look_up


@pytest.mark.parametrize(
    ("platform", "vocab_size", "products"),
    [("cpu", 11, 0), ("tpu", 11, 1), ("tpu", 5000, 0)],
    ids=["by scatter on CPU", "by one-hot product", "by scatter"],
)
def test_the_embedding_gradient_is_that_of_a_gather(platform, vocab_size, products, monkeypatch):
    device = SimpleNamespace(platform=platform)
    monkeypatch.setattr("famjax.ops.lookup.target_device", lambda: device)
    table = jnp.asarray(np.random.default_rng(0).normal(size=(vocab_size, 5)), jnp.float32)
    tokens = jnp.asarray([[3, 3, 0], [10, 3, 7]])

    def loss(look):
        return lambda table: jnp.sin(look(table, tokens)).sum()

    expected = jax.grad(loss(lambda table, tokens: table[tokens]))(table)
    np.testing.assert_allclose(jax.grad(loss(look_up))(table), expected, rtol=1e-6)
    program = str(jax.make_jaxpr(jax.grad(loss(look_up)))(table))
    assert program.count("dot_general") == products


@pytest.mark.parametrize("scan", [True, False])
def test_full_attention_rejects_a_call_beyond_its_capacity(scan):
    config = ModelConfig(
        vocab_size=20, layers=2, width=16, heads=2, mixer="full", capacity=8, scan_layers=scan
    )
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)
    logits, state = jax.jit(lambda p, *args: nnx.merge(graph, p)(*args))(
        params, jnp.zeros((1, 8), jnp.int32), model.init_state(1)
    )
    assert jnp.isfinite(logits).all()
    with pytest.raises(UserError, match=r"token 9 of a document does not fit its cache of 8"):
        model.step(jnp.zeros((1, 1), jnp.int32), state)
    with pytest.raises(UserError, match=r"token 9 of a document"):
        model(jnp.zeros((1, 9), jnp.int32), model.init_state(1))


@pytest.mark.parametrize("overrides", [{}, {"tied": False}, {"adaptive": AdaptiveConfig("16")}])
def test_logits_of_bfloat16_models_are_not_rounded(overrides):
    config = ModelConfig(vocab_size=64, layers=1, width=16, heads=2, dtype="bfloat16", **overrides)
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 16)), jnp.bfloat16)
    logits = model.logits(x)
    assert logits.dtype == jnp.float32
    assert len(np.unique(logits)) == logits.size
    if not overrides:
        rows = np.asarray(model.embedding[...].astype(jnp.bfloat16), np.float64)
        normalized = np.asarray(model.norm(x, jnp.bfloat16), np.float64)
        np.testing.assert_allclose(logits, normalized @ rows.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scan", [True, False])
def test_a_single_call_needs_no_cache(scan):
    config = ModelConfig(
        vocab_size=20, layers=2, width=16, heads=2, mixer="full", capacity=8, scan_layers=scan
    )
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    tokens = jnp.arange(16).reshape(2, 8)
    reset = jnp.zeros((2, 8), bool).at[1, 3].set(True)
    ctx = Context(reset, jnp.ones((2, 8), bool).at[0, 6:].set(False))
    state = model.init_state(2)
    short = shorten_caches(state, 0)
    assert max(a.size for a in jax.tree.leaves(short)) == 4  # the lengths of two lanes
    x = model.embed(tokens)
    expected, found = (
        jax.jit(lambda s: model.stack(x, s, ctx))(each)[0] for each in (state, short)
    )
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("scan", [True, False])
def test_program_size_is_independent_of_depth_with_scanned_layers(scan):
    """Compile time depends on program size; a scanned stack has the program of one layer."""

    def lines(layers: int) -> int:
        config = ModelConfig(
            vocab_size=20, layers=layers, width=16, heads=2, mixer="bswa,fam", scan_layers=scan
        )
        graph, params = nnx.split(nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0))))

        def loss(params, tokens):
            model = nnx.merge(graph, params)
            return model(tokens, model.init_state(1))[0].sum()

        tokens = jax.ShapeDtypeStruct((1, config.block_len), jnp.int32)
        return len(jax.jit(jax.grad(loss)).lower(params, tokens).as_text().splitlines())

    assert (lines(4) == lines(12)) == scan


def test_a_call_that_ends_within_a_block_is_rejected():
    config = ModelConfig(vocab_size=20, layers=1, width=16, heads=2, mixer="fam", block_len=8)
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match="a call of 12 tokens: not a multiple of block_len=8"):
        model(jnp.zeros((1, 12), jnp.int32), model.init_state(1))


@pytest.mark.parametrize(
    ("capacity", "sizes"), [(100, (100,)), (128, (128,)), (129, (128, 129)), (500, (128, 256, 500))]
)
def test_sizes_of_a_part_of_the_cache(capacity: int, sizes: tuple[int, ...]) -> None:
    assert tiny.run_with("full", capacity=capacity).model.stack.cache_sizes() == sizes


def test_a_model_without_a_cache_has_no_parts() -> None:
    assert tiny.run_with("bswa").model.stack.cache_sizes() == (0,)
