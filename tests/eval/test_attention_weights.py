"""Attention weights equal those the models use, and their measures are those of the papers."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from contracts import transcription
from contracts.harness import B, close, jit, runner, stream
from flax import nnx
from oracles import attention as oracle

from famjax.config.resolved import resolve_model
from famjax.config.schema import ArchConfig, FeedbackConfig, LinearConfig, ModelConfig
from famjax.core.errors import UserError
from famjax.core.types import Context
from famjax.eval.attention import analyze, attention_weights, distance, entropy, text_spans
from famjax.models.language_model import LanguageModel
from famjax.train.run import Run

CASES = ["full", "full, families", "swa-6", "bswa-0", "bswa_sg-2", "bswa-3, families", "linear"]
CASES += ["linear, families", "linear-rfa", "linear-performer"]


@pytest.mark.parametrize("case", CASES)
def test_weights_times_values_equal_the_mixers_output(case: str) -> None:
    r = runner(case)

    def both(params: Any, x: Any) -> Any:
        layers = r.model(params).stack.layers[0]
        graph, stacked = nnx.split(layers)
        layer = nnx.merge(graph, jax.tree.map(lambda a: a[0], stacked))
        mixer = layer.mixer
        out, _ = mixer(x, mixer.init_state(B), Context(), layer.mlp)
        weights, v = mixer.attention_map(x), mixer.qkv.project(x)[2]
        v = jnp.repeat(v, weights.shape[1] // v.shape[2], axis=2)
        return mixer.qkv.output_projection(jnp.einsum("bhts,bshe->bthe", weights, v), x), out

    close(*r.run(jit(both), stream()))


@pytest.mark.parametrize("case", ["swa-6", "bswa-1", "fam,linear"])
@pytest.mark.parametrize("length", [20, 22])
def test_layers_have_the_inputs_of_the_model(case: str, length: int) -> None:
    """Blocks have 4 tokens: the last one may be incomplete."""
    r, tokens = runner(case), np.arange(length) * 7 % 11
    with jax.enable_x64(True):
        found = [
            None if a is None else np.asarray(a)
            for a in attention_weights(r.model(r.params), tokens)
        ]
    params = jax.tree.map(np.asarray, nnx.to_pure_dict(r.params))
    expected = _oracle(r.config, params, tokens)
    assert [a is None for a in found] == [a is None for a in expected]
    for a, b in zip(found, expected, strict=True):
        if b is not None:
            close(a, b)


def test_layers_come_after_positions_and_the_norm_of_embeddings() -> None:
    """The weights depend on a scale that the norm of BART has."""
    arch = ArchConfig(positions="sinusoidal", embed_norm=True)
    config = ModelConfig(
        mixer="swa", window=4, block_len=4, layers=1, width=8, heads=2, vocab_size=11, arch=arch
    )
    model = LanguageModel(resolve_model(config), rngs=nnx.Rngs(0))
    tokens = np.arange(8) * 7 % 11
    (before,) = attention_weights(model, tokens)
    model.stack.embed_norm.scale[...] *= np.arange(1, 9)
    (after,) = attention_weights(model, tokens)
    assert np.abs(np.asarray(after) - np.asarray(before)).max() > 1e-3


def _oracle(config: Any, params: Any, tokens: np.ndarray) -> list[np.ndarray | None]:
    layers = transcription.residual_layers(config, params["stack"])
    x = params["embedding"][tokens] * config.width**0.5
    return oracle.of_model(layers, params["stack"].get("prompt"), x)


# measures


def test_entropy_and_distance_of_rows() -> None:
    rows = np.array([[1, 0, 0, 0], [0.25] * 4, [0.1, 0.3, 0, 0], [0, 0, 0, 0], [0.9, 0.2, -0.1, 0]])
    with jax.enable_x64(True):
        found = entropy(rows), distance(rows, rows[::-1])
    expected = [oracle.entropy(row) for row in rows]
    np.testing.assert_allclose(found[0], expected, atol=1e-12)
    assert expected[:2] == pytest.approx([0, np.log(4)])
    assert np.isnan(found[0]).tolist() == [False, False, False, True, True]
    pairs = zip(rows, rows[::-1], strict=True)
    np.testing.assert_allclose(
        found[1], [oracle.distance(*two_runs) for two_runs in pairs], atol=1e-12
    )


LENGTH = 20
PAIRS = {
    "relu": {"linear": LinearConfig(features=6)},
    "rfa": {"linear": LinearConfig(map="rfa", features=6)},
}


def input_of(run: Run) -> Any:
    return jax.tree.map(
        lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(nnx.state(run.model, nnx.Param))
    )


@functools.cache
def two_runs(name: str) -> tuple[Run, Run]:
    return tiny.run_with("full,linear", **PAIRS[name]), tiny.run_with("swa,full", seed=1, window=5)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(tiny.TEXT, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", PAIRS)
def test_report_is_the_mean_of_the_oracle(name: str, text: Path) -> None:
    runs = two_runs(name)
    report = analyze(*runs, str(text), LENGTH, examples=2, quiet=True)
    whole = [runs[0].tokenizer.bos_id, *runs[0].tokenizer.encode(tiny.TEXT)]
    spans = np.array(whole[: 2 * LENGTH]).reshape(2, LENGTH)
    assert (report["length"], report["examples"]) == (LENGTH, 2)
    # [of a run][of an example][of a layer] [h t t]
    read: Any = [[_oracle(run.config.model, input_of(run), span) for span in spans] for run in runs]
    for i, row in enumerate(report["layers"]):
        weights, others = (np.stack([example[i] for example in of]) for of in read)
        found = {
            "entropy": np.apply_along_axis(oracle.entropy, -1, weights),
            "distance": np.sqrt(np.square(weights - others).sum(-1)),
        }
        assert row["mixer"] == ("full", "linear")[i]
        for measure, values in found.items():  # [2 h t]
            heads, last = np.nanmean(values, (0, 2)), values[..., -1]
            np.testing.assert_allclose(row[measure]["heads"], heads, rtol=1e-4, atol=1e-6)
            assert row[measure]["mean"] == pytest.approx(heads.mean(), rel=1e-4)
            if np.isnan(last).all():
                assert row[measure]["last"] is None
            elif not np.isnan(last).any():
                np.testing.assert_allclose(
                    row[measure]["last_heads"], last.mean(0), rtol=1e-4, atol=1e-6
                )
        assert row["entropy"]["undefined"] == np.isnan(found["entropy"]).mean()
    for measure in ("entropy", "distance"):
        for key in ("mean", "last"):
            layers = [row[measure][key] for row in report["layers"]]
            known = [value for value in layers if value is not None]
            assert report[measure][key] == pytest.approx(np.mean(known))
    equal = np.tril(np.ones((LENGTH, LENGTH))) / np.arange(1, LENGTH + 1)[:, None]
    teachers = np.stack([np.stack(example) for example in read[1]])
    distances = np.sqrt(np.square(equal - teachers).sum(-1))
    assert report["uniform"]["entropy"]["last"] == pytest.approx(np.log(LENGTH), rel=1e-5)
    assert report["uniform"]["distance"]["last"] == pytest.approx(
        distances[..., -1].mean(), rel=1e-4
    )


def test_the_distance_of_a_run_to_itself_is_zero(text: Path) -> None:
    run = two_runs("relu")[0]
    report = analyze(run, run, str(text), LENGTH, examples=1)
    assert report["distance"] == {"mean": 0, "last": 0}
    alone = analyze(run, None, str(text), LENGTH, examples=1)
    assert alone["distance"] is None
    assert alone["entropy"] == report["entropy"]


def test_the_number_of_examples_is_limited_by_the_text(text: Path) -> None:
    run = tiny.run_with("full")
    size = 2 + len(tiny.TEXT.encode())
    assert analyze(run, None, str(text), LENGTH)["examples"] == size // LENGTH


def test_examples_are_of_all_documents(tmp_path: Path) -> None:
    run, folder = tiny.run_with("full"), tmp_path / "texts"
    folder.mkdir()
    for letter, size in (("a", 90), ("b", 5), ("c", 90)):
        (folder / f"{letter}.txt").write_text(letter * size)
    spans = text_spans(run, str(folder), LENGTH, 4)
    assert sorted(chr(span[-1]) for span in spans) == ["a", "a", "c", "c"]
    assert len(text_spans(run, str(folder), LENGTH, 100)) == 8


# invalid requests


def assert_rejected(said: str, *args: Any, **named: Any) -> None:
    with pytest.raises(UserError, match=said):
        analyze(*args, **named)


def test_invalid_requests_are_rejected(text: Path) -> None:
    full = tiny.run_with("full")
    files = str(text)
    assert_rejected("no such file", full, None, "/no/such/file", LENGTH)
    assert_rejected("no document has 64 tokens|the longest has", full, None, _short(text), 64)
    assert_rejected("--length 65: the run has full attention of 64 tokens", full, None, files, 65)
    assert_rejected("--length 0: must be at least 1", full, None, files, 0)
    assert_rejected("--examples 0: must be at least 1", full, None, files, LENGTH, 0)
    assert_rejected(
        "the run has model.mixer=fam, whose layers also read a memory",
        tiny.run_with("fam"),
        None,
        files,
        LENGTH,
    )
    lstm = tiny.run_with("full", stack="lstm", block_len=1)
    assert_rejected("the teacher has model.stack=lstm", full, lstm, files, LENGTH)
    feedback = tiny.run_with("full", stack="feedback", feedback=FeedbackConfig(span=6))
    assert_rejected("the run has model.stack=feedback", feedback, None, files, LENGTH)


def test_incompatible_models_are_rejected(text: Path) -> None:
    full = tiny.run_with("full")
    for shape in ({"heads": 4}, {"layers": 4}, {"vocab_size": 300}):
        key, value = next(iter(shape.items()))
        other = tiny.run_with("full", **shape)
        assert_rejected(f"--teacher: model.{key}={value}, but", full, other, str(text), LENGTH)

    class Other:
        name, fingerprint = "other.model", "x"

    other = replace(full, tokenizer=Other())  # type: ignore[arg-type]
    assert_rejected(
        "its tokenizer other.model is not the run's bytes", full, other, str(text), LENGTH
    )


def _short(text: Path) -> str:
    path = text.parent / "short.txt"
    path.write_text("short", encoding="utf-8")
    return str(path)
