"""Training features of Feedback Transformers: learned spans, sweeps, dropout, initial weights."""

from __future__ import annotations

import functools
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contracts.harness import jit
from flax import nnx

from famjax.config.schema import Config, ModelConfig
from famjax.core.errors import UserError
from famjax.eval.generate import Generator
from famjax.eval.streaming import Streamer
from famjax.experiment.checks import validate
from famjax.experiment.load import load_config, override
from famjax.models.language_model import LanguageModel
from famjax.models.remap_params import remap_params
from famjax.parallel import sharding
from famjax.train.hooks import AttentionSpans
from famjax.train.loop import train
from famjax.train.metrics import read_metrics
from famjax.train.run import open_run
from famjax.train.step import clip_spans

SHAPE = [
    "model.stack=feedback",
    "model.block_len=1",
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "model.mlp_width=32",
    "model.mlp=relu",
    "model.norm=layernorm",
    "model.feedback.span=16",
    "data.task=blocked_walk",
    "data.tokenizer=task",
    "data.toy.episodes=64",
    "data.toy.steps=20",
    "data.batch=4",
    "data.length=16",
    "optimizer.warmup_steps=0",
    "optimizer.schedule=constant",
    "train.log_every=2",
    "train.checkpoint_every=4",
]
SPANS = ["model.feedback.adaptive_span=true", "model.feedback.span_ramp=4"]


@pytest.mark.parametrize(
    ("changes", "is_stale"),
    [
        ((), False),
        (("train.log_every=20",), True),
        (("train.log_every=1",), False),
    ],
)
def test_spans_get_room_to_grow_until_the_next_log_of_a_continued_run(
    monkeypatch: pytest.MonkeyPatch, changes: tuple[str, ...], is_stale: bool
) -> None:
    updated = []
    monkeypatch.setattr(AttentionSpans, "_update", lambda self, session: updated.append(1))
    hook = AttentionSpans()
    session: Any = SimpleNamespace(
        config=config(*SPANS, *changes), set_attention_span=lambda _: None
    )
    hook.load_state_dict(session, {"looked": [8], "config": asdict(config(*SPANS))})
    hook.before_first_step(session)
    assert bool(updated) == is_stale


def config(*more: str) -> Config:
    return override(Config(), [*SHAPE, *more])


@pytest.fixture(autouse=True)
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    make_mesh = functools.partial(sharding.make_mesh, devices=jax.devices()[:1])
    monkeypatch.setattr(sharding, "make_mesh", make_mesh)


def flat(tree: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.long
def test_learned_spans_are_trimmed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(config(*SPANS, "model.feedback.span=128", "train.steps=1"), tmp_path / "run")
    # spans start at 0: tokens attend only to the ramp and the possible growth
    assert "step 0: layers attend to up to 64 tokens" in capsys.readouterr().err
    assert run.model.stack.spec.spans == (64,)


@pytest.mark.slow
def test_trimmed_spans_are_restored(tmp_path: Path) -> None:
    given = config(*SPANS, "model.feedback.span=128", "train.steps=4", "model.dropout.hidden=0.1")
    train(given, tmp_path / "run", quiet=True)
    assert "mean_span" in read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    opened = open_run(tmp_path / "run")
    assert opened.model.stack.spec.spans == (64,)
    tokens = jnp.arange(20)[None] % 5
    whole = open_run(tmp_path / "run").model
    whole.stack.set_attention_span(())
    for model in (opened.model, whole):
        assert model.stack.spec.model.dropout == type(given.model.dropout)()
    logits = [
        jit(lambda tokens, model=model: model(tokens, model.init_state(1))[0])(tokens)
        for model in (opened.model, whole)
    ]
    np.testing.assert_allclose(*logits, atol=1e-5)
    # resumed, it ends bitwise equal to an uninterrupted run
    longer = override(given, ["train.steps=7"])
    train(longer, tmp_path / "run", quiet=True)
    train(longer, tmp_path / "other", quiet=True)
    ends = [flat(nnx.state(open_run(tmp_path / name).model)) for name in ("run", "other")]
    for name, leaf in ends[0].items():
        assert (leaf == ends[1][name]).all(), name


def test_spans_are_clipped_to_0_and_1() -> None:
    tree = {"layer": {"span": jnp.array([-0.5, 0.5, 1.5])}, "other": jnp.array([2.0])}
    bounded = clip_spans(tree)
    np.testing.assert_array_equal(bounded["layer"]["span"], [0, 0.5, 1])
    assert bounded["other"] == 2


@pytest.mark.long
def test_sweeps_are_used_in_training_only(tmp_path: Path) -> None:
    given = config("model.feedback.sweeps=2", "model.feedback.tolerance=1", "train.steps=2")
    run = train(given, tmp_path / "run", quiet=True)
    row = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert 0 < row["sweep_change"] < 1
    assert not run.model.stack.is_approximate
    assert not open_run(tmp_path / "run").model.stack.is_approximate
    swept = LanguageModel(replace(given.model, vocab_size=9), rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match="sweeps=0"):
        Streamer(swept, 1)


@pytest.mark.slow
def test_small_cache_generates_the_same_text(tmp_path: Path) -> None:
    given = config("train.steps=1", "data.task=text", "data.tokenizer=bytes")
    train(given, tmp_path / "run", quiet=True)
    texts, sizes = [], []
    for small in (False, True):
        run = open_run(tmp_path / "run")
        run = run.with_small_cache() if small else run
        texts.append("".join(Generator(run).generate("def", 12)))
        state = run.model.init_state(1)
        sizes.append(sum(leaf.nbytes for leaf in jax.tree.leaves(state.slots)))
    assert texts[0] == texts[1]
    assert sizes[1] * 2 == sizes[0]


# ft.from_transformer

BASE = ModelConfig(
    vocab_size=11, layers=4, width=16, heads=4, kv_heads=2, mlp_width=24, mixer="bswa,bswa_sg"
)
ROTARY = override(
    Config(), ["model.feedback.positions=rotary", "model.feedback.span=6"]
).model.feedback
STACKS = {
    "residual": BASE,
    "transformer": replace(BASE, stack="transformer", feedback=replace(ROTARY, shared_kv=False)),
    "feedback": replace(BASE, stack="feedback", feedback=ROTARY),
    "previous": replace(
        BASE, stack="feedback", feedback=replace(ROTARY, shared_kv=False, composition="previous")
    ),
}


def logits(model: ModelConfig, params: Any) -> np.ndarray:
    graph, _ = nnx.split(nnx.eval_shape(lambda: LanguageModel(model, rngs=nnx.Rngs(1))))

    def apply(params: Any) -> jax.Array:
        made = nnx.merge(graph, params)
        return made(jnp.arange(22).reshape(2, 11) % 11, made.init_state(2))[0]

    return np.asarray(jit(apply)(params))


@pytest.mark.long
def test_transformer_params_are_remapped_to_feedback() -> None:
    params = nnx.state(LanguageModel(BASE, rngs=nnx.Rngs(0)), nnx.Param)
    transformer = remap_params(params, BASE, STACKS["transformer"])
    # the layers keep their order for any layer pattern
    q = "['stack']['layers'][0]['{}qkv']['q']['kernel'].value"
    before = flat(params)
    there = [before[q.format("mixer']['").replace("[0]", f"[{i % 2}]")][i // 2] for i in range(2)]
    np.testing.assert_array_equal(flat(transformer)[q.format("")][:2], np.stack(there))
    # composition=previous (memories are the layers' inputs) computes the same function
    previous = remap_params(transformer, STACKS["transformer"], STACKS["previous"])
    same = logits(STACKS["transformer"], transformer), logits(STACKS["previous"], previous)
    np.testing.assert_allclose(*same, atol=1e-5)
    feedback = remap_params(transformer, STACKS["transformer"], STACKS["feedback"])
    made = flat(feedback)
    assert not made["['stack']['mix'].value"].any()
    first = flat(transformer)["['stack']['layers'][0]['qkv']['k']['kernel'].value"][0]
    np.testing.assert_array_equal(made["['stack']['keys']['k']['kernel'].value"], first)
    assert np.isfinite(logits(STACKS["feedback"], feedback)).all()
    # converted back, layers are the same except for the shared keys
    back = remap_params(feedback, STACKS["feedback"], STACKS["transformer"])
    keys = flat(back)["['stack']['layers'][0]['qkv']['k']['kernel'].value"]
    np.testing.assert_array_equal(keys, np.broadcast_to(first, keys.shape))


@pytest.mark.long
def test_a_vocabulary_of_another_task_is_rejected(tmp_path: Path) -> None:
    train(config("train.steps=1"), tmp_path / "old", quiet=True)
    for given in ("data.task=text", "data.task=copy"):
        with pytest.raises(
            UserError, match=r"its vocabulary is that of data\.task=blocked_walk"
        ) as caught:
            load_config("text_fam", [f"init={tmp_path / 'old'}", given])
        assert "\n" not in str(caught.value)


def test_relative_positions_are_remapped_to_another_span() -> None:
    old = replace(STACKS["feedback"], feedback=replace(ROTARY, positions="learned"))
    params = nnx.state(LanguageModel(old, rngs=nnx.Rngs(0)), nnx.Param)
    name = "['stack']['distances'].value"
    table = flat(params)[name]
    for span in (4, 9):
        new = replace(old, feedback=replace(old.feedback, span=span))
        found = flat(remap_params(params, old, new))[name]
        near = min(span, 6)
        np.testing.assert_array_equal(found[:, -near:], table[:, -near:])
        np.testing.assert_array_equal(found[:, :-near], table[:, :1].repeat(span - near, 1))


def test_learned_spans_are_as_many_tokens_in_a_model_with_another_span() -> None:
    learned = replace(ROTARY, adaptive_span=True, span_start=0.5)
    old = replace(STACKS["feedback"], feedback=learned)
    params = nnx.state(LanguageModel(old, rngs=nnx.Rngs(0)), nnx.Param)
    name = "['stack']['layers'][0]['span'].value"
    # 3 of 6 tokens
    for span, share in ((12, 0.25), (6, 0.5), (2, 1.0)):
        new = replace(old, feedback=replace(learned, span=span))
        np.testing.assert_allclose(flat(remap_params(params, old, new))[name], share)


@pytest.mark.long
def test_training_starts_from_a_converted_model(tmp_path: Path) -> None:
    """Start from a folder with a residual model; `load_config` makes its layers feedback layers."""
    residual = [
        *("model.stack=residual", "model.mixer=full", "model.block_len=8", "model.capacity=16"),
        *("data.layout=packed", "train.steps=2"),
    ]
    old = train(config(*residual), tmp_path / "old", quiet=True)
    experiment = tmp_path / "experiment.py"
    experiment.write_text(
        "from famjax.config.schema import *\n"
        "def config(): return Config(model=ModelConfig(dropout=DropoutConfig(hidden=0.1)))"
    )
    given = load_config(
        str(experiment),
        [
            *(f"init={tmp_path / 'old'}", "model.stack=feedback", "model.block_len=1"),
            *("model.feedback.positions=rotary", "model.feedback.span=16"),
            *(line for line in SHAPE if line.startswith(("data", "optimizer", "train"))),
            *("data.tokenizer=task", "train.steps=1", "optimizer.learning_rate=1e-9"),
        ],
    )
    assert given.model.dropout.hidden == 0.1
    new = train(given, tmp_path / "new", quiet=True)
    before, after = (flat(nnx.state(run.model, nnx.Param)) for run in (old, new))
    name = "['stack']['layers'][0]{}['qkv']['q']['kernel'].value"
    np.testing.assert_allclose(after[name.format("")], before[name.format("['mixer']")], atol=1e-6)
    with pytest.raises(UserError, match=r"model\.width=32: the given weights have 16"):
        train(override(given, ["model.width=32"]), tmp_path / "wrong", quiet=True)


@pytest.mark.parametrize(
    ("stack", "other", "told"),
    [
        (BASE, replace(BASE, stack="lstm"), "no parameters in common"),
        (BASE, replace(BASE, stack="feedback"), r"set model\.feedback\.positions=rotary"),
        (replace(BASE, stack="feedback"), BASE, r"set model\.stack=feedback"),
    ],
)
def test_incompatible_stacks_cannot_be_remapped(
    stack: ModelConfig, other: ModelConfig, told: str
) -> None:
    params = nnx.state(LanguageModel(stack, rngs=nnx.Rngs(0)), nnx.Param)
    with pytest.raises(UserError, match=told) as caught:
        remap_params(params, stack, other)
    assert "\n" not in str(caught.value)


# bad input


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("model.feedback.layer=2", r"model\.layers=1"),
        ("model.block_len=8", r"set model\.block_len=1"),
        ("data.layout=packed model.feedback.span=17", "take at most 16"),
        ("model.stack=transformer model.feedback.composition=top", r"set model\.stack=feedback"),
        ("model.stack=transformer model.feedback.sweeps=2", "set 0"),
        ("model.feedback.span_loss=1e-6", r"model\.feedback\.adaptive_span=true"),
        ("model.feedback.span_start=2", "from 0 to 1"),
        ("model.feedback.span=0", "at least 1"),
        ("model.dropout.hidden=1", "less than 1"),
        ("model.stack=lstm model.dropout.hidden=0.1", "no such dropout"),
        ("model.stack=lstm model.arch.pre_norm=false", r"model\.arch\.pre_norm=true"),
        ("model.lora.rank=2 model.lora.dropout=0.1", "has none; set 0"),
        ("model.arch.positions=learned", "relative positions only; set none$"),
        ("model.arch.positions=sinusoidal", "relative positions only; set none$"),
        (
            "model.encoder.layers=1 model.arch.positions=learned",
            "set none or, for the encoder, sinusoidal$",
        ),
        ("data.toy.start_steps=5", r"data\.toy\.concatenate=false"),
        ("model.feedback.composition=tops", "did you mean"),
    ],
)
def test_invalid_configs_are_rejected(given: str, told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        validate(config(*given.split()))
    assert "\n" not in str(caught.value)


def test_episodes_grow_with_the_curriculum(tmp_path: Path) -> None:
    given = config(
        "data.toy.concatenate=false",
        "data.toy.start_steps=5",
        "data.toy.threshold=0",
        "train.steps=4",
    )
    train(given, tmp_path / "run", quiet=True)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["longest"] for row in rows] == [10, 20]
