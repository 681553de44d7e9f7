"""What an n-gram memory recalls along a document equals a dictionary's answers."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from famjax.cli.analyze_memory import doubling_spans
from famjax.cli.main import main
from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.core.types import Context
from famjax.eval.memory_trace import as_document
from famjax.eval.ngram_trace import by_longest, trace_ngrams
from famjax.train.run import Run

W, N = 8, 6
# few different tokens, so that contexts recur
TOKENS = np.random.default_rng(0).integers(3, size=W * N + 1)
CONTEXTS = (1, 2, 3)


@cache
def run(mixer: str = "bswa") -> Run:
    arguments = {"mixer": mixer, "ngram_memory": len(CONTEXTS)}
    # projections that are not 0, as they are before training
    model = tiny.with_noise(tiny.model(memory_segments=1, **arguments), "ngram_memory", 0.3)
    shape = replace(tiny.SHAPE, **arguments)
    return Run(Config(model=shape), tiny.run().tokenizer, model, 1)


@cache
def trace():
    return trace_ngrams(run(), as_document(TOKENS), quiet=True)


def test_contexts_are_found_as_by_a_dictionary() -> None:
    assert trace().contexts.tolist() == list(CONTEXTS)
    for column, k in enumerate(CONTEXTS):
        followers: dict[tuple[int, ...], int] = {}
        for i in range(W * N):
            context = tuple(TOKENS[max(i + 1 - k, 0) : i + 1].tolist())
            recalled = followers.get(context) if len(context) == k else None
            where = i // W, i % W, column
            assert trace().found[where] == (recalled is not None)
            assert trace().correct[where] == (recalled == TOKENS[i + 1])
            if len(context) == k:
                followers[context] = TOKENS[i + 1]


@jax.jit
def read(tokens, state):
    """Return the outputs of the stack [1 t d], and the state after it."""
    model = run().model
    return model.stack(model.embed(tokens), state, model.with_tokens(Context(), tokens))


@pytest.mark.long
def test_losses_with_an_emptied_table() -> None:
    model, tau = run().model, 4
    x, state = read(jnp.asarray(TOKENS[None, : tau * W]), model.init_state(1))
    block = jnp.asarray(TOKENS[None, tau * W : (tau + 1) * W + 1])
    before = model.losses(x, jnp.asarray(TOKENS[None, 1 : tau * W + 1]))[0]
    np.testing.assert_allclose(trace().losses[:tau].reshape(1, -1), before, rtol=1e-5)

    def losses(state):
        x, _ = read(block[:, :-1], state)
        return np.asarray(model.losses(x, block[:, 1:])[0])[0]

    # the window's state comes first, the n-gram memory's last; its latest tokens stay
    empty = model.init_state(1)[-1]._replace(recent=state[-1].recent)
    emptied = (*state[:-1], empty)
    np.testing.assert_allclose(trace().losses[tau], losses(state), rtol=1e-5)
    gains = losses(emptied) - losses(state)
    np.testing.assert_allclose(trace().gains[tau], gains, atol=1e-5)
    assert np.abs(gains).max() > 1e-3
    assert trace().without[tau] == pytest.approx(gains.mean(), abs=1e-5)
    assert trace().loss[tau] == pytest.approx(losses(state).mean(), rel=1e-5)


def test_rows_are_by_the_longest_context() -> None:
    rows = by_longest(trace())
    assert [row["context"] for row in rows] == [0, *CONTEXTS]
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    longest = trace().found.reshape(-1, 3)[:, 2]
    assert rows[-1]["share"] == pytest.approx(longest.mean())
    assert rows[-1]["right"] == pytest.approx(trace().correct.reshape(-1, 3)[longest, 2].mean())
    assert rows[0]["share"] == pytest.approx(1 - trace().found.any(-1).mean())
    mean = sum(row["share"] * row["loss"] for row in rows)
    assert mean == pytest.approx(trace().losses.mean(), rel=1e-5)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 100])
def test_spans_double_and_hold_each_block_once(n: int) -> None:
    spans = doubling_spans(n)
    assert [i for span in spans for i in span] == list(range(n))
    assert [len(span) for span in spans[:-1]] == [2**k for k in range(len(spans) - 1)]


def test_a_model_without_n_grams_is_rejected() -> None:
    with pytest.raises(UserError, match=r"model\.ngram_memory=0: the model has no n-gram memory"):
        trace_ngrams(tiny.run(), as_document(TOKENS), quiet=True)


@pytest.mark.parametrize("mixer", ["bswa", pytest.param("fam", marks=pytest.mark.long)])
def test_the_command_shows_them(
    mixer: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("famjax.convert.open.open_model", lambda folder: run(mixer))
    (tmp_path / "x.txt").write_text("abcdefgh" * 30)
    command = ["analyze", "ngrams", "--memory", "--tasks", f"text:{tmp_path / 'x.txt'}"]
    command += ["--length", "128"]
    assert main([*command, "--plot", str(tmp_path / "x.png")]) == 0
    shown = capsys.readouterr().out
    assert "3 tokens" in shown
    assert "recalled right" in shown
    assert ("memory tokens whose removal costs most" in shown) == (mixer == "fam")
    assert (tmp_path / "x.png").stat().st_size > 5_000
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["ngrams"]["loss"]) == 15
    assert ("layers" in report) == (mixer == "fam")
    # almost all of a repeated text is recalled
    assert report["ngrams"]["contexts"][-1]["right"] > 0.9
