"""RMT and AutoCompressors; contracts of all stacks are in `tests/contracts`."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
import tiny
from contracts.harness import CASES, LENGTH, TOKENS, VOCAB, B, Runner, W, close, runner, same
from flax import nnx

from famjax.config.resolved import resolve_model
from famjax.config.schema import Config, DataConfig, LoraConfig, ModelConfig
from famjax.core.errors import UserError
from famjax.core.types import Context
from famjax.eval.lane_stream import LaneStream
from famjax.experiment.load import load_config
from famjax.models.language_model import LanguageModel
from famjax.models.remap_params import init_fam_prompt, remap_params
from famjax.parallel.sharding import path_name
from famjax.train import flops
from famjax.train.objective import NextToken
from famjax.train.partition import partition_trainable

STACKS = ["rmt", "autocompressor"]
FULL = replace(CASES["full"], fam_len=3)
ALL = np.ones((B, LENGTH), bool)


@pytest.mark.parametrize("case", STACKS)
def test_a_segment_knows_the_last_ones_by_their_memory_alone(case):
    """Equal memories and segments give equal outputs, to the bit."""
    r = runner(case)
    x = np.random.default_rng(0).normal(size=r.x.shape)
    _, one = r.call(r.x[:, :W], r.fresh)
    _, other = r.call(x[:, :W], r.fresh)
    expected, _ = r.call(r.x[:, W : 2 * W], one)
    assert (np.abs(r.call(r.x[:, W : 2 * W], other)[0] - expected).max((1, 2)) > 1e-3).all()
    # in the middle of a segment, none of it is in the memory
    _, partial = r.step(r.x[:, W : W + 3], one)
    passed = r.run(lambda p, *states: r.model(p).stack.pass_state(*states), r.fresh, partial)
    same(passed, one)
    same(r.call(r.x[:, W : 2 * W], passed)[0], expected)


@pytest.mark.parametrize("case", STACKS)
def test_packed_rows_start_with_the_memory_of_a_new_document(case):
    """It is in a KV cache, and rows that are packed leave out empty caches of full attention."""
    r = runner(case)
    objective = NextToken(Config(data=DataConfig(layout="packed")), np.ones(VOCAB))
    key, step = jax.random.key(0), np.int32(0)
    start = r.run(lambda p: objective.initial_state(r.model(p), (), B, None, key, step))
    same(start, r.fresh)


def test_the_memory_of_rmt_does_not_grow():
    """It is normalized, so that its size is the norm's scale, after any number of segments."""
    r = Runner(replace(CASES["rmt"], norm="rmsnorm"), x64=False)
    scale = np.asarray(nnx.to_pure_dict(r.params)["stack"]["memory_norm"]["scale"])
    state = r.fresh
    for _ in range(20):
        _, state = r.tokens(TOKENS, state)
        size = np.square(state.memory / scale).mean(-1)
        np.testing.assert_allclose(size, 1, rtol=1e-4)


@pytest.mark.long
def test_a_document_beyond_the_segments_of_an_autocompressor():
    """A `UserError`, or under jit NaN from the first token on that is beyond; not after a reset."""
    case = replace(CASES["autocompressor"], capacity=2 * W)
    r = Runner(case, params=runner("autocompressor").params)
    whole, _ = runner("autocompressor").whole
    _, full = r.call(r.x[:, : 2 * W], r.fresh)
    reset = np.tile(np.arange(2 * W) == W, (B, 1))
    for read in (r.call, r.step):
        y, end = read(r.x[:, : 2 * W], full, reset, ALL[:, : 2 * W])
        assert np.isnan(y[:, :W]).all()
        close(y[:, W:], r.call(r.x[:, W : 2 * W], r.fresh)[0])
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(end))
        # padding has no loss, which NaN would be
        assert np.isfinite(read(r.x[:, :W], full, ~ALL[:, :W], ~ALL[:, :W])[0]).all()
        close(read(r.x[:, : 2 * W], r.fresh)[0], whole[:, : 2 * W])
    stack = r.model(r.params).stack
    assert stack.capacity == 2 * W
    with jax.enable_x64(True):
        for read, count in ((stack, W), (stack.step, 1)):
            with pytest.raises(UserError, match=rf"token {2 * W + count} of a document is beyond"):
                read(r.x[:, :count], full, Context())
    with pytest.raises(UserError, match=r"a call of 3 tokens: not a multiple of block_len=4"):
        stack(r.x[:, :3], r.fresh, Context())


# weights


def test_a_pretrained_model_reads_the_first_segment_as_before():
    """An AutoCompressor has no memory there; its summaries begin as rows of the embedding."""
    old, new = FULL, replace(FULL, stack="autocompressor")
    before = Runner(old, x64=False)
    params = remap_params(before.params, old, new)
    given = nnx.to_pure_dict(before.params)
    after = Runner(new, x64=False, params=params)
    tokens = TOKENS[:, :W]
    close(after.tokens(tokens, after.fresh)[0], before.tokens(tokens, before.fresh)[0], 1e-5)
    own = nnx.to_pure_dict(params)["stack"]
    same(own["memory_norm"], given["norm"])
    # arrays that are donated together must not be one
    assert own["memory_norm"]["scale"] is not nnx.to_pure_dict(params)["norm"]["scale"]
    same(own["prompt"], init_fam_prompt(given["embedding"], new))
    # and back
    same(remap_params(params, new, old), before.params)


def test_adapters_are_trained_with_what_is_remembered():
    config = resolve_model(ModelConfig(vocab_size=VOCAB, stack="rmt", lora=LoraConfig(rank=2)))
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    _, trained, _ = partition_trainable(config, model)
    names = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(trained)]
    own = {name for name in names if "/lora/" not in name}
    assert own == {"stack/prompt", "stack/memory_norm/scale"}
    assert len(names) == len(own) + 2 * 7


# arithmetic and evaluation


@pytest.mark.parametrize(("stack", "memory"), [("rmt", 5), ("autocompressor", 5 * (1 + 4) / 2)])
def test_flops_count_what_reads_and_writes_the_memory(stack, memory):
    """A segment of 10 and twice 5 tokens, each with half of its own and with the memory's keys."""
    shape = {"vocab_size": 100, "layers": 3, "width": 8, "heads": 2, "mlp_width": 16, "mlp": "gelu"}
    model = ModelConfig(**shape, stack=stack, block_len=10, fam_len=5, capacity=40)
    token = 2 * (8 * 8 * 4 + 2 * 8 * 16) + 4 * 8 * (memory + 15 / 2)
    assert flops.forward_flops(resolve_model(model)) == 3 * token * (10 + 2 * 5) / 10 + 2 * 8 * 100


@pytest.mark.parametrize("stack", STACKS)
def test_without_memory_a_segment_is_a_documents_first(stack):
    run = tiny.run_with("fam", stack=stack)
    text = np.random.default_rng(0).integers(256, size=(1, 30))
    found = {}
    for name in ("", "memory", "reset"):
        stream = LaneStream(run.model, 1, 8, name)
        stream.read_lanes(np.pad(text, ((0, 0), (0, 2))), np.array([30]), np.array([True]))
        found[name] = np.asarray(stream.logits)
    same(found["memory"], found["reset"])
    assert np.abs(found[""] - found["memory"]).max() > 1e-3
    with pytest.raises(UserError, match="--ablate segments: the model has no memory segments"):
        LaneStream(run.model, 1, 8, "segments")


# bad input


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("stack=rmt model.capacity=64", "model.capacity: has no effect with model.stack=rmt"),
        ("stack=rmt model.mixer=bswa", "model.mixer: has no effect with model.stack=rmt"),
        ("stack=rmt model.fam_previous=2", "model.fam_previous: has no effect with"),
        ("stack=rmt model.dropout.hidden=0.1", "no such dropout; set 0"),
        ("stack=rmt model.lora.rank=2 model.lora.dropout=0.1", "has none; set 0"),
        ("stack=rmt model.arch.positions=learned", "relative positions only; set none"),
        ("stack=rmt model.arch.pre_norm=false", r"set .* model\.arch\.pre_norm=true"),
        ("stack=rmt data.layout=packed train.rpo=true", "an offset does nothing; set false"),
        ("stack=rmt data.layout=packed train.rsp=0.5", "passes memories between steps, .* set 0"),
        ("stack=rmt model.scan_layers=false model.layers=10000", "unrolled layers would take"),
        ("stack=autocompressor model.capacity=4000", "take 3968 or 4032"),
        ("stack=autocompressor model.capacity=256", r"set model\.capacity=512"),
    ],
)
def test_invalid_configs_are_rejected(given: str, told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        load_config("text_fam", f"model.{given}".split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        "stack=rmt model.fam_len=4 model.scan_layers=false model.rope_base=1e5 model.remat=layer",
        "stack=autocompressor model.fam_len=4 model.capacity=2048 model.lora.rank=2",
    ],
)
def test_settings_of_segments_are_accepted(given: str) -> None:
    load_config("text_fam", f"model.{given}".split())
