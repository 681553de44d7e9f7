"""Measures of a memory along a document equal those computed from the states of each block."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from famjax.cli.analyze_memory import _helped, _name_token, _opened
from famjax.cli.main import main
from famjax.config.schema import Config, DataConfig
from famjax.core.errors import UserError
from famjax.core.types import Context
from famjax.eval import memory_trace
from famjax.eval.memory_trace import (
    TracedDocument,
    as_document,
    gradient_by_distance,
    layers_with_memory,
    open_document,
    trace_memory,
)
from famjax.stacks import memory_measures
from famjax.train.run import Run

W, N = 8, 5
TOKENS = np.random.default_rng(0).integers(258, size=W * N + 3)


@cache
def run(update: str = "gated") -> Run:
    """Return a run whose layers alternate a windowed one and a FAM layer, twice."""
    model = tiny.model("bswa,fam", layers=4, fam_len=3, fam_update=update, memory_segments=1)
    shape = replace(tiny.SHAPE, mixer="bswa,fam", layers=4, fam_len=3, fam_update=update)
    return Run(Config(model=shape), tiny.run().tokenizer, model, 1)


@cache
def states() -> list[Any]:
    """Return the states before each block and after the last one."""
    held = [run().model.init_state(1)]
    for tau in range(N):
        held.append(read(tau, held[-1])[1])
    return held


def read(tau: int, state: Any) -> tuple[Any, Any]:
    """Return the mean loss of a block and the state after it."""
    return _read(nnx.split(run().model)[1], jnp.asarray(TOKENS[tau * W : (tau + 1) * W + 1]), state)


@jax.jit
def _read(params: Any, block: Any, state: Any) -> tuple[Any, Any]:
    model = nnx.merge(nnx.split(run().model)[0], params)
    x, after = model.stack(model.embed(block[None, :-1]), state, Context())
    return model.losses(x, block[None, 1:])[0].mean(), after


def memories(state: Any) -> np.ndarray:
    """Return [l f d]; only the second layer of the pattern has a memory."""
    return np.asarray(state[1].fam[:, 0], np.float64)


@cache
def trace():
    return trace_memory(run(), as_document(TOKENS), quiet=True)


@pytest.mark.long
def test_norm_and_rotation() -> None:
    assert trace().rms.shape == (N, 2)
    for tau in range(N):
        before, after = memories(states()[tau]), memories(states()[tau + 1])
        np.testing.assert_allclose(trace().rms[tau], np.sqrt((after**2).mean((1, 2))), rtol=1e-5)
        norms = np.linalg.norm(before, axis=-1) * np.linalg.norm(after, axis=-1)
        degrees = np.rad2deg(np.arccos((before * after).sum(-1) / norms))
        np.testing.assert_allclose(trace().rotation[tau], degrees.mean(-1), rtol=1e-3)


def test_rank_and_similarity_of_open_document() -> None:
    fam = memories(states()[N])[0]
    s = np.linalg.svd(fam)[1]
    share = s / s.sum()
    assert trace().rank[-1, 0] == pytest.approx(np.exp(-(share * np.log(share)).sum()), rel=1e-4)
    unit = fam / np.linalg.norm(fam, axis=-1, keepdims=True)
    pairs = [unit[i] @ unit[j] for i in range(3) for j in range(i)]
    assert trace().similarity[-1, 0] == pytest.approx(np.mean(pairs), rel=1e-4)


def test_loss_equals_one_call() -> None:
    model = run().model
    x, _ = tiny.read(model, TOKENS[None, : W * N], states()[0])
    nll = np.asarray(model.losses(x, jnp.asarray(TOKENS[None, 1 : W * N + 1]))[0])
    np.testing.assert_allclose(trace().loss, nll.reshape(N, W).mean(1), rtol=1e-5)


def test_gates_interpolate_the_update() -> None:
    """An open gate replaces its token, a closed one keeps it."""
    assert (trace().gates[0] == 1).all()  # the first update has no gate
    graph, params = nnx.split(run().model)
    for bias, opening in ((50.0, 1.0), (-50.0, 0.0)):
        changed = jax.tree_util.tree_map_with_path(
            lambda path, a, bias=bias: (
                jnp.full_like(a, bias) if "memory_gate" in str(path) and "bias" in str(path) else a
            ),
            params,
        )
        found = trace_memory(
            replace(run(), model=nnx.merge(graph, changed)), as_document(TOKENS), quiet=True
        )
        np.testing.assert_allclose(found.gates[1:], opening, atol=1e-6)
        assert (found.rotation[1:] == 0).all() == (opening == 0)


@pytest.mark.long
def test_the_sum_update_has_no_gates() -> None:
    assert trace_memory(run("sum"), as_document(TOKENS), quiet=True).gates.shape == (N, 0, 3)


def test_loss_without_open_document() -> None:
    """In the first block, all memory tokens still have their initial value."""
    np.testing.assert_allclose(trace().without_each[0], 0, atol=1e-6)
    np.testing.assert_allclose(trace().without[0], 0, atol=1e-6)
    model, state, initial = run().model, states()[3], states()[0]

    def loss(memory: Any) -> float:
        return float(read(3, model.stack.replace_memories(state, [memory]))[0])

    own = state[1].fam
    one = own.at[:, :, 2].set(initial[1].fam[:, :, 2])
    assert trace().without_each[3, 2] == pytest.approx(loss(one) - loss(own), abs=1e-6)
    assert trace().without[3] == pytest.approx(loss(initial[1].fam) - loss(own), abs=1e-6)


def test_a_replaced_memory_token_is_replaced_in_all_previous_fams() -> None:
    """Else the loss without it would still be that of a block that sees what it was before."""
    model = tiny.model("fam", fam_len=3, fam_previous=2)
    initial = model.init_state(1)
    _, state = tiny.read(model, TOKENS[None, : 3 * W], initial)
    (own,), (first,) = (model.stack.memories(s) for s in (state, initial))
    replaced = model.stack.replace_memories(state, [own.at[:, :, 2].set(first[:, :, 2])])[0]
    for now, before, new in (
        (getattr(s[0], f) for s in ([replaced], state, initial)) for f in "kv"
    ):
        assert now.shape[2] == 2  # [repeats b p f g e]
        for age in range(2):
            np.testing.assert_allclose(now[:, :, age, 2], new[:, :, -1, 2], atol=1e-5)
            np.testing.assert_allclose(now[:, :, age, :2], before[:, :, age, :2], atol=1e-5)
            assert (np.abs(now[:, :, age, 2] - before[:, :, age, 2]) > 1e-3).any()


def test_replacing_a_memory_by_itself_changes_nothing() -> None:
    state = states()[2]
    same = run().model.stack.replace_memories(state, run().model.stack.memories(state))
    for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_gains_are_those_of_the_tokens() -> None:
    np.testing.assert_allclose(trace().gains.mean(1), trace().without, atol=1e-6)
    assert np.abs(trace().gains[1:]).max() > 1e-5


def test_tokens_are_named_with_the_block_that_predicts_them() -> None:
    gains = np.zeros((N, W))
    gains[1, W - 1], gains[2, 3] = 2.0, 1.0
    first, second = _helped(run(), TOKENS, gains)[:2]
    assert [row["block"] for row in (first, second)] == [1, 2]
    assert [row["gain"] for row in (first, second)] == [2.0, 1.0]
    assert first["token"] == _name_token(run().tokenizer, int(TOKENS[2 * W]))
    assert second["token"] == _name_token(run().tokenizer, int(TOKENS[2 * W + 4]))


def test_the_first_block_never_opened_gates() -> None:
    """Although a document has no more blocks than are named."""
    opened = _opened(run(), TOKENS, trace())
    assert sorted(row["block"] for row in opened) == [1, 2, 3, 4]
    for row in opened:
        assert row["gates"] == pytest.approx(trace().gates[row["block"]].mean(), rel=1e-5)
        token = int(TOKENS[row["block"] * W + trace().reads[row["block"]].argmax()])
        assert row["read"][0] == _name_token(run().tokenizer, token)


def test_reads_are_weighted_by_the_gates() -> None:
    """They equal those computed in float64 from the attention weights of a block's update."""
    model, tau = run().model, 3
    block = jnp.asarray(TOKENS[None, tau * W : (tau + 1) * W])
    x = model.embed(block)
    weights = memory_measures.block_weights(model.stack, x, states()[tau], Context())
    by_memory_token = np.asarray(weights[1].from_memory, np.float64)[:, 0, :, :, -W:].mean(1)
    gates = trace().gates[tau]  # [l f], and [l f w] above
    expected = (gates[..., None] * by_memory_token).sum((0, 1)) / gates.sum()
    np.testing.assert_allclose(trace().reads[tau], expected, rtol=1e-5)


def test_a_passkey_ends_with_a_block() -> None:
    document = open_document(tiny.run(), None, 600, passkey=True)
    n, w = 75, tiny.SHAPE.block_len
    assert w == 8
    assert len(document.tokens) == n * w + 1
    assert document.tokens[-1] == tiny.run().tokenizer.eos_id
    answer = np.flatnonzero(document.answer)
    assert tiny.run().tokenizer.decode(document.tokens[answer]).isdigit()
    assert answer[-1] == n * w - 1
    same = open_document(tiny.run(), None, n * w + 1, passkey=True)
    np.testing.assert_array_equal(same.tokens, document.tokens)


@pytest.mark.long
def test_the_loss_of_the_last_block_is_that_of_the_answer() -> None:
    document, w = open_document(tiny.run(), None, 600, passkey=True), tiny.SHAPE.block_len
    n, answer = len(document.tokens) // w, np.flatnonzero(document.answer)
    found = trace_memory(tiny.run(), document, quiet=True)
    model = tiny.run().model
    x, _ = tiny.read(model, document.tokens[None, :-1], model.init_state(1))
    losses = np.asarray(model.losses(x, jnp.asarray(document.tokens[None, 1:]))[0])[0]
    in_last = answer[answer > (n - 1) * w]
    assert 0 < len(in_last) < w
    assert found.loss[-1] == pytest.approx(losses[in_last - 1].mean(), rel=1e-4)
    own = found.gains[-1][in_last - 1 - (n - 1) * w]
    assert found.without[-1] == pytest.approx(own.mean(), abs=1e-6)


@pytest.mark.long
def test_gradient_by_distance_equals_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """It equals differences of the loss by each memory component three blocks before."""
    model = run().model
    found = gradient_by_distance(run(), as_document(TOKENS))
    assert found.shape == (N - 1, 2)
    state = states()[N - 3]

    def last_loss(fam: Any) -> Any:
        after = model.stack.replace_memories(state, [fam])
        for tau in (N - 3, N - 2, N - 1):
            loss, after = read(tau, after)
        return loss

    own = state[1].fam
    grad = np.asarray(jax.grad(last_loss)(own))[:, 0]
    expected = np.linalg.norm(grad, axis=(1, 2)) * np.linalg.norm(memories(state), axis=(1, 2))
    np.testing.assert_allclose(found[2], expected, rtol=1e-3)
    # of longer documents as many blocks as GRADIENT_BLOCKS
    monkeypatch.setattr(memory_trace, "GRADIENT_BLOCKS", 2)
    np.testing.assert_allclose(
        gradient_by_distance(run(), as_document(TOKENS)), found[:2], rtol=1e-3
    )
    # the gradient of an answer that is the block's last token
    answer = np.zeros(len(TOKENS), bool)
    answer[N * W] = True
    assert gradient_by_distance(run(), TracedDocument(TOKENS, answer)).shape == (2, 2)
    other = gradient_by_distance(run(), TracedDocument(TOKENS, answer))
    assert np.abs(other / found[:2] - 1).max() > 0.01


def test_documents_that_are_too_short_are_rejected() -> None:
    passkey = tiny.run()
    with pytest.raises(UserError, match="no document has 9,999,999 tokens"):
        open_document(passkey, None, 9_999_999)
    for call in (partial(trace_memory, quiet=True), gradient_by_distance):
        with pytest.raises(UserError, match=r"16 tokens are too few: two blocks of 8 and .* 17;"):
            call(run(), as_document(TOKENS[:16]))
    for length in (0, -1):
        with pytest.raises(UserError, match=f"--length {length}: must be at least 1"):
            open_document(passkey, None, length)


@pytest.mark.long
def test_a_document_beyond_the_cache_of_full_attention_is_rejected() -> None:
    """Its measures would be NaN."""
    hybrid = tiny.run_with("full,fam", capacity=32)
    for call in (partial(trace_memory, quiet=True), gradient_by_distance):
        with pytest.raises(UserError, match="40 tokens do not fit its cache of 32"):
            call(hybrid, as_document(TOKENS[:41]))
    assert np.isfinite(trace_memory(hybrid, as_document(TOKENS[:40]), quiet=True).loss).all()


def test_a_model_without_memory_is_rejected() -> None:
    shape = replace(tiny.SHAPE, mixer="bswa")
    other = Run(Config(model=shape), tiny.run().tokenizer, tiny.model("bswa"), 1)
    with pytest.raises(UserError, match="--memory: bswa has no memory in its layers; give"):
        trace_memory(other, as_document(TOKENS), quiet=True)


@pytest.mark.long
def test_the_command_prints_the_measures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = tmp_path / "x.txt"
    text.write_text(tiny.TEXT * 9)
    command = ["analyze", str(tiny.folder()), "--memory", "--tasks", f"text:{text}"]
    command += ["--length", "128"]
    assert main([*command, "--plot", str(tmp_path / "x.png")]) == 0
    said = capsys.readouterr()
    assert "memory tokens whose removal costs most" in said.out
    assert (tmp_path / "x.png").stat().st_size > 10_000
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["rms"]) == len(report["loss"]) == 15
    assert len(report["rms"][0]) == len(report["layers"])
    assert main([*command, "--teacher", "x"]) == 2
    assert "--memory measures one run" in capsys.readouterr().err
    assert main([*command, "--examples", "16"]) == 2
    assert "--memory reads one document; leave out --examples" in capsys.readouterr().err


@cache
def delta_run() -> Run:
    """Return a run of windowed and delta-rule layers in turn, with memories that are read."""
    arguments = {"mixer": "bswa,delta", "layers": 4, "kv_heads": 2}
    # rates that depend on the token; at first they are equal
    model = tiny.with_noise(tiny.model(memory_segments=1, **arguments), "rate_weight", 0.1)
    shape = replace(tiny.SHAPE, **arguments)
    return Run(Config(model=shape), tiny.run().tokenizer, model, 1)


@cache
def delta_states() -> list[Any]:
    """Return the states of `delta_run` before each block and after the last one."""
    model = delta_run().model
    held = [model.init_state(1)]
    for tau in range(N):
        held.append(tiny.read(model, TOKENS[None, tau * W : (tau + 1) * W], held[-1])[1])
    return held


@pytest.mark.long
def test_measures_of_a_delta_rule_memory() -> None:
    trace = trace_memory(delta_run(), as_document(TOKENS), quiet=True)
    s = np.asarray(delta_states()[3][1].s[:, 0], np.float64)  # [l g k e]
    before = np.asarray(delta_states()[2][1].s[:, 0], np.float64)
    assert trace.rms.shape == (N, 2)
    assert trace.gates.shape == (N, 2, 2)
    np.testing.assert_allclose(trace.rms[2], np.sqrt((s**2).mean((1, 2, 3))), rtol=1e-5)
    for layer in range(2):
        rotations, ranks = [], []
        for a, b in zip(before[layer], s[layer], strict=True):
            cosine = (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)
            rotations.append(np.rad2deg(np.arccos(cosine)))
            share = np.linalg.svd(b)[1]
            share = share[share > 0] / share.sum()
            ranks.append(np.exp(-(share * np.log(share)).sum()))
        assert trace.rotation[2, layer] == pytest.approx(np.mean(rotations), rel=1e-3)
        assert trace.rank[2, layer] == pytest.approx(np.mean(ranks), rel=1e-3)
    assert (trace.rotation[0] == 0).all()  # nothing was there to rotate


@pytest.mark.long
def test_rates_are_those_of_the_tokens() -> None:
    trace = trace_memory(delta_run(), as_document(TOKENS), quiet=True)
    assert trace.rates.shape == (N, W)
    np.testing.assert_allclose(trace.rates.mean(1), trace.gates.mean((1, 2)), rtol=1e-5)
    assert trace.rates.std() > 0
    graph, params = nnx.split(delta_run().model)
    closed = jax.tree_util.tree_map_with_path(
        lambda path, a: jnp.full_like(a, -50.0) if "rate_bias" in str(path) else a, params
    )
    run = replace(delta_run(), model=nnx.merge(graph, closed))
    found = trace_memory(run, as_document(TOKENS), quiet=True)
    # nothing was written, and nothing is missed
    zeros = (found.rates, found.gates, found.rms, found.rotation, found.similarity, found.mass)
    for measure in (*zeros, found.without):
        assert (measure == 0).all()
    assert (found.rank == 1).all()


@pytest.mark.long
def test_the_token_with_a_high_rate_is_shown_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a newline, an indent, and a token without text."""
    monkeypatch.setattr("famjax.convert.open.open_model", lambda folder: delta_run())
    text = "".join(f"if {c}:\n    {c} = {c}\n" for c in "abcdefgh")
    (tmp_path / "x.py").write_text(text)
    tokens = np.frombuffer(text.encode(), np.uint8)
    newline, bos = int(np.flatnonzero(tokens == 10)[1]), 0

    def trace(run: Run, document: TracedDocument) -> Any:
        found = trace_memory(run, document, quiet=True)
        rates = np.zeros_like(found.rates)
        rates.flat[newline + 1], rates.flat[bos] = 0.9, 0.8  # bos is before the text
        return found._replace(rates=rates)

    monkeypatch.setattr("famjax.eval.memory_trace.trace_memory", trace)
    command = ["analyze", "delta", "--memory", "--tasks", f"text:{tmp_path / 'x.py'}"]
    assert main([*command, "--length", "64"]) == 0
    said = capsys.readouterr().out
    assert r"opened gates by 0.90: a = a '\n'" in said
    assert "opened gates by 0.80:  '<256>'" in said


def test_layers_are_numbered_among_all_layers() -> None:
    assert layers_with_memory(delta_run()) == [1, 3]
    assert layers_with_memory(tiny.run()) == list(range(tiny.SHAPE.layers))


@pytest.mark.long
def test_loss_without_a_head_of_the_memory() -> None:
    trace = trace_memory(delta_run(), as_document(TOKENS), quiet=True)
    model, state = delta_run().model, delta_states()[3]
    block = jnp.asarray(TOKENS[3 * W : 4 * W + 1])

    def loss(s: Any) -> float:
        state_without = model.stack.replace_memories(state, [s])
        x, _ = tiny.read(model, block[None, :-1], state_without)
        return float(model.losses(x, block[None, 1:])[0].mean())

    own = state[1].s
    assert trace.loss[3] == pytest.approx(loss(own), rel=1e-5)
    assert trace.without[3] == pytest.approx(loss(0 * own) - loss(own), abs=1e-6)
    one = loss(own.at[:, :, 1].set(0)) - loss(own)
    assert trace.without_each[3, 1] == pytest.approx(one, abs=1e-6)
    assert abs(one) > 1e-5


@pytest.mark.parametrize(("gain", "low", "high"), [(0.0, 0, 0), (0.3, 0.01, 0.9), (1e6, 0.999, 1)])
def test_memory_share_of_what_a_delta_layer_reads(gain: float, low: float, high: float) -> None:
    graph, params = nnx.split(delta_run().model)
    scaled = jax.tree_util.tree_map_with_path(
        lambda path, a: jnp.full_like(a, gain) if "gain" in str(path[-2:]) else a, params
    )
    model, state = nnx.merge(graph, scaled), delta_states()[3]
    x = model.embed(jnp.asarray(TOKENS[None, 3 * W : 4 * W]))
    found = np.asarray(memory_measures.attention_mass(model.stack, x, state, Context()))
    assert found.shape == (4,)
    assert (found[::2] == 0).all()
    assert (low <= found[1::2]).all()
    assert (found[1::2] <= high).all()


def test_memories_of_different_shapes_are_rejected() -> None:
    shape = replace(tiny.SHAPE, mixer="fam,delta", layers=2)
    mixed = Run(Config(model=shape), tiny.run().tokenizer, tiny.model("fam,delta", layers=2), 1)
    with pytest.raises(UserError, match="fam,delta has memories of different shapes"):
        trace_memory(mixed, as_document(TOKENS), quiet=True)


def test_the_document_of_a_text_run_can_be_a_passkey() -> None:
    text = replace(tiny.run(), config=replace(tiny.run().config, data=DataConfig(task="text")))
    tokens = open_document(text, None, 600, passkey=True).tokens
    assert len(tokens) == 601
    assert "What is the pass key?" in text.tokenizer.decode(tokens)
