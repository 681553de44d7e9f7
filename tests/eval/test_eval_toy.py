"""Evaluation of toy tasks: on the command line after training, and against direct counts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import Mesh
from small import COMMAND

from famjax.cli.main import main
from famjax.config.schema import DataConfig, MeshConfig, ToyConfig
from famjax.core.errors import UserError
from famjax.eval import toy
from famjax.eval.toy import evaluate_toy
from famjax.parallel import sharding
from famjax.tasks.task import Request
from famjax.tasks.toy import ToySource, episode_answers, task_tokenizer
from famjax.train.run import Run, open_run


@pytest.fixture(autouse=True)
def small_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the compilation cache of the tests and one device; let episodes span many calls."""
    monkeypatch.setattr("famjax.processes.runtime.setup", lambda: None)
    original = sharding.make_mesh

    def make_mesh(config: MeshConfig, devices: Any = None) -> Mesh:
        return original(config, jax.devices()[:1])

    monkeypatch.setattr(sharding, "make_mesh", make_mesh)
    monkeypatch.setattr(toy, "CHUNK", 32)


def make_run(task: str, mixer: str = "fam", **sizes: Any) -> Run:
    """Return a run of a task with random parameters."""
    config = ToyConfig(episodes=30, **sizes)
    words = task_tokenizer(task, config)
    run = tiny.run_with(mixer, vocab_size=words.vocab_size)
    data = DataConfig(task=task, tokenizer="task", toy=config)  # type: ignore[arg-type]
    return replace(run, config=replace(run.config, data=data), tokenizer=words)


def direct_accuracies(run: Run, task: str, length: int, examples: int) -> tuple[float, float]:
    """Return accuracies of answers and of episodes, each episode in one call."""
    config = replace(run.config.data.toy, steps=length, episodes=examples)
    source = ToySource(task, config, run.tokenizer, run.config.seed, "holdout")
    right = []
    for piece in source.episodes():
        said = tiny.logits(run.model, piece.tokens[None])[0].argmax(-1)
        at = np.flatnonzero(piece.weights) - (piece.targets is None)
        right.append(said[at] == episode_answers(piece))
    return float(np.concatenate(right).mean()), float(np.mean([r.all() for r in right]))


@pytest.mark.parametrize(
    ("task", "mixer", "length"),
    [("random_walk", "bswa", 2), ("counting", "full", 3)],
)
def test_separate_episodes_count_every_answer(task: str, mixer: str, length: int) -> None:
    run = make_run(task, mixer, concatenate=False, size=2)
    (row,) = evaluate_toy(run, task, [length], examples=25, batch=4, quiet=True)["rows"]
    accuracy, whole = direct_accuracies(run, task, length, 25)
    assert row["examples"] == 25
    assert row["accuracy"] == pytest.approx(accuracy)
    assert row["episode_accuracy"] == pytest.approx(whole)


@pytest.mark.parametrize("concatenate", [True, False])
@pytest.mark.parametrize("batch", [1, 4, 50])
def test_every_episode_is_evaluated_once(
    batch: int, concatenate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # an oracle with one wrong answer in every third episode
    seen: list[np.ndarray] = []

    def batch_losses(self: Any, read: Any) -> tuple[Any, Any]:
        seen.append(read["targets"][read["weights"] > 0])
        return read["weights"], read["targets"] != wrong

    run = make_run("copy", concatenate=concatenate)
    wrong = run.tokenizer.encode("7")[0]
    monkeypatch.setattr("famjax.eval.streaming.Streamer.batch_losses", batch_losses)
    (row,) = evaluate_toy(run, "copy", [5], examples=20, batch=batch, quiet=True)["rows"]
    source = ToySource(
        "copy", replace(run.config.data.toy, steps=5, episodes=20), run.tokenizer, 0, "holdout"
    )
    expected = [episode_answers(piece) for piece in source.episodes()]
    assert row["answers"] == 100
    assert row["examples"] == 20
    assert row["episode_accuracy"] == pytest.approx(np.mean([wrong not in a for a in expected]))
    assert row["accuracy"] == pytest.approx(np.mean(np.concatenate(expected) != wrong))
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.sort(np.concatenate(expected)))


def test_programs_that_print_nothing_are_not_counted_as_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # every answer is wrong
    monkeypatch.setattr(
        "famjax.eval.streaming.Streamer.batch_losses",
        lambda self, read: (read["weights"], np.zeros(read["weights"].shape, bool)),
    )
    run = make_run("algorithmic")
    (row,) = evaluate_toy(run, "algorithmic", [3], examples=20, quiet=True)["rows"]
    config = replace(run.config.data.toy, steps=3, episodes=20)
    episodes = ToySource("algorithmic", config, run.tokenizer, 0, "holdout").episodes()
    counts = np.array([len(episode_answers(piece)) for piece in episodes])
    assert 0 < (counts == 0).sum() < 20
    assert row["examples"] == 20
    assert row["answers"] == counts.sum()
    assert row["accuracy"] == row["episode_accuracy"] == 0
    # a guess that is always wrong, too
    assert row["chance_episodes"] <= 0.1


def test_episodes_without_an_answer_are_an_error() -> None:
    run = make_run("algorithmic")
    with pytest.raises(UserError, match=r"^algorithmic: 5 test episodes of 1 step without an answ"):
        evaluate_toy(run, "algorithmic", [1], examples=5, quiet=True)


def test_a_trial_looks_at_the_episodes_of_later_evaluations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "famjax.eval.streaming.Streamer.batch_losses",
        lambda self, read: (read["weights"], np.ones(read["weights"].shape, bool)),
    )
    run = make_run("algorithmic")
    # the first test program of this seed prints nothing
    seed = next(seed for seed in range(99) if silent(run, seed))
    run = replace(run, config=replace(run.config, seed=seed))
    request = Request("algorithmic", lengths=[3], examples=1, quiet=True, is_trial=True)
    assert toy.evaluate(run, request)["rows"][0]["answers"] == 0
    with pytest.raises(UserError, match="algorithmic: 1 test episode of 3 steps without an answer"):
        toy.evaluate(run, request._replace(is_trial=False))


def silent(run: Run, seed: int) -> bool:
    """Return whether the first test program of three statements prints nothing."""
    config = replace(run.config.data.toy, steps=3, episodes=1)
    source = ToySource("algorithmic", config, run.tokenizer, seed, "holdout")
    return not any(piece.weights.any() for piece in source.episodes())


def test_invalid_requests_are_rejected() -> None:
    with pytest.raises(UserError, match="copy: tokenizer bytes has other words than the task"):
        evaluate_toy(tiny.run(), "copy", quiet=True)
    with pytest.raises(UserError, match=r"the model: .* tokens do not fit its cache of 64"):
        evaluate_toy(make_run("copy", "full", concatenate=False), "copy", [40], 4, quiet=True)
    with pytest.raises(UserError, match="examples=0, batch=8: must be at least 1"):
        evaluate_toy(make_run("copy"), "copy", examples=0)


@pytest.mark.long
def test_a_trained_run_is_evaluated_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    given = ["data.task=blocked_walk", "data.tokenizer=task", "data.toy.episodes=50"]
    given += ["data.toy.steps=20", "model.mixer=bswa", "train.steps=2"]
    shape = [key for key in COMMAND if not key.startswith("model.fam_len=")]
    argv = ["train", "text_fam", *shape, *given]
    assert main([*argv, "--run", run]) == 0
    assert "blocked_walk: 50 episodes of 20 steps" in capsys.readouterr().err
    assert open_run(run).tokenizer.words[:5] == ("<s>", "<unk>", "<eos>", "east", "south")
    ask = ["eval", run, "--examples", "10", "--batch", "2"]
    assert main(ask) == 0
    out = capsys.readouterr().out
    assert "blocked_walk (guessing gets 11.1% of answers)" in out
    assert "whole" in out
    assert main([*ask, "--tasks", "blocked_walk", "--lengths", "7,12", "--json", "--plot"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["toy"]
    assert [row["length"] for row in found["rows"]] == [7, 12]
    assert [row["answers"] for row in found["rows"]] == [80, 130]
    assert (tmp_path / "run" / "plots" / "blocked_walk.png").exists()
    assert main([*ask, "--tasks", "copy"]) == 2
    assert capsys.readouterr().err.startswith("famjax: copy: tokenizer")
    assert main([*argv, "data.toy.episodes=51", "--run", run]) == 2
    assert "data.toy.episodes: 50 -> 51" in capsys.readouterr().err
