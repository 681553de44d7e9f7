"""`eval.tasks` and `eval.best`: what a run scores while it trains, and its best checkpoint."""

import errno
import math
import os
import re
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import small
import tiny
from flax import nnx
from small import compiled_once  # noqa: F401

from famjax.config.keys import replace_values
from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.eval.passkey import evaluate_passkey
from famjax.eval.text import evaluate_text
from famjax.experiment.load import load_config, override
from famjax.tasks import TASKS
from famjax.tasks.task import Request
from famjax.train import best, task_scores
from famjax.train.loop import train
from famjax.train.metrics import read_metrics
from famjax.train.run import Run, open_run
from famjax.train.task_scores import measure

SETTINGS = ["eval.every=4", "eval.lengths=250,300", "eval.examples=6", "train.steps=8"]
PASSKEY = [*SETTINGS, "eval.tasks=passkey", "eval.best=passkey"]


def rows(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "metrics.jsonl")


@pytest.mark.usefixtures("compiled_once")
def test_scores_equal_famjax_eval_and_change_no_bit_of_the_run(tmp_path: Path) -> None:
    config = small.config(tmp_path / "texts", "lanes", "passkey", *PASSKEY)
    run = train(config, tmp_path / "run", quiet=True)
    found = evaluate_passkey(run, [250, 300], 6, quiet=True)
    last = rows(tmp_path / "run")[-1]
    scores = [row["key_accuracy"] for row in found]
    assert [last["passkey_250"], last["passkey_300"]] == scores
    assert last["passkey"] == pytest.approx(sum(scores) / 2)
    assert "heldout_bits_per_byte" not in last  # the run reads no text
    off = ["eval.every=0", "eval.tasks=", "eval.best=", "eval.lengths=", "eval.examples=20"]
    train(override(config, off), tmp_path / "plain", quiet=True)
    ends = [small.final(tmp_path / name, config) for name in ("run", "plain")]
    assert ends[0][1][0] == ends[1][1][0]


@pytest.mark.long
@pytest.mark.usefixtures("compiled_once")
def test_the_best_checkpoint_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept where the loss is lowest, also if the run was stopped and resumed."""
    values = {4: 3.0, 8: 1.0, 12: 2.0}
    before_log = best.Best.before_log

    def measured(self: best.Best, session: Any, row: dict[str, float]) -> dict[str, float]:
        return before_log(self, session, {**row, "heldout_bits_per_byte": values[session.step]})

    monkeypatch.setattr(best.Best, "before_log", measured)
    keys = ["eval.every=4", "data.holdout=3", "eval.best=heldout_bits_per_byte"]
    keys += ["train.steps=12", "train.log_every=4", "train.checkpoint_every=12", "train.keep=1"]
    config = small.config(tmp_path / "texts", "lanes", "text", *keys)
    train(override(config, ["train.steps=4"]), tmp_path / "run", quiet=True)
    assert open_run(tmp_path / "run" / "best").step == 4
    train(config, tmp_path / "run", quiet=True)
    kept = open_run(tmp_path / "run" / "best")
    assert (kept.step, open_run(tmp_path / "run").step) == (8, 12)
    assert not (tmp_path / "run" / "best" / "metrics.jsonl").exists()
    assert not list((tmp_path / "run").glob("*.partial"))
    assert kept.fingerprint() != open_run(tmp_path / "run").fingerprint()


def test_a_full_disk_is_told_and_the_best_checkpoint_kept_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tmp_path / "checkpoints" / "000000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "params").write_text("best")
    (tmp_path / "config.json").write_text("{}")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(best, "_link", full)
        with pytest.raises(UserError, match=r"cannot write .*best: .*No space left.*and resume"):
            best.keep(tmp_path, checkpoint)
    best.keep(tmp_path, checkpoint)
    assert (tmp_path / "best" / "checkpoints" / "000000004" / "params").read_text() == "best"
    assert not (tmp_path / "best.partial").exists()


def test_a_value_that_is_no_number_is_never_the_best() -> None:
    hook, session = best.Best([]), SimpleNamespace(config=override(Config(), ["eval.best=text"]))
    kept = []
    for value in (math.nan, 2.0, math.nan, 1.5, 1.7):
        hook._is_new = False
        hook.before_log(session, {"text": value})  # type: ignore[arg-type]
        kept.append(hook._is_new)
    assert kept == [False, True, False, True, False]


@pytest.mark.long
@pytest.mark.parametrize("last", [4, 8])
@pytest.mark.usefixtures("compiled_once")
def test_a_best_checkpoint_that_a_kill_kept_from_its_folder_is_kept_on_resuming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    before_log = best.Best.before_log

    def measured(self: best.Best, session: Any, row: dict[str, float]) -> dict[str, float]:
        return before_log(self, session, {**row, "heldout_bits_per_byte": float(session.step)})

    def killed(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(best.Best, "before_log", measured)
    keys = ["eval.every=4", "data.holdout=3", "eval.best=heldout_bits_per_byte"]
    keys += [f"train.steps={last}", "train.log_every=4", "train.checkpoint_every=8"]
    config = small.config(tmp_path / "texts", "lanes", "text", *keys)
    with monkeypatch.context() as patch:
        patch.setattr(best, "keep", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "best").exists()
    train(config, tmp_path / "run", quiet=True)
    assert open_run(tmp_path / "run" / "best").step == 4
    report = tmp_path / "run" / "best" / "eval"
    report.mkdir()
    train(config, tmp_path / "run", quiet=True)
    assert report.exists()


def test_a_value_of_another_search_is_another_measure() -> None:
    tasks = {"eval.every": 4, "eval.tasks": "translate:a=b", "eval.best": "translate"}
    greedy = asdict(replace_values(Config(), tasks))
    beam = asdict(replace_values(Config(), {**tasks, "eval.beam": 5}))
    tokenized = asdict(replace_values(Config(), {**tasks, "eval.tokenized": True}))
    searches = [
        asdict(replace_values(Config(), {**tasks, "eval.beam": 5, key: value}))
        for key, value in (("eval.length_penalty", 0.6), ("eval.no_repeat_ngram", 3))
    ]
    measures = [
        best._measurement_settings(config) for config in (greedy, beam, tokenized, *searches)
    ]
    assert len(set(measures)) == 5
    cut = asdict(replace_values(Config(), {**tasks, "data.source_words": 400}))
    assert best._measurement_settings(cut) not in measures
    # they do not matter to a score of other tasks
    passkeys = {**tasks, "eval.tasks": "translate:a=b,passkey", "eval.best": "passkey"}
    one, five = (asdict(replace_values(Config(), {**passkeys, "eval.beam": n})) for n in (1, 5))
    assert best._measurement_settings(one) == best._measurement_settings(five)
    # a checkpoint from before the keys
    keys = ("beam", "length_penalty", "no_repeat_ngram", "tokenized")
    older = {**greedy, "eval": {k: v for k, v in greedy["eval"].items() if k not in keys}}
    assert best._measurement_settings(older) == measures[0]


def test_of_equal_values_the_first_is_the_best() -> None:
    hook = best.Best([])
    for name, better, worse in (("translate", 2.0, 1.0), ("heldout_bits_per_byte", 1.0, 2.0)):
        hook._value = None
        assert hook._is_better(name, worse)
        hook._value = worse
        assert hook._is_better(name, better)
        assert not hook._is_better(name, worse)


@pytest.mark.long
@pytest.mark.usefixtures("compiled_once")
def test_a_best_value_of_another_measure_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every document of 250 tokens is answered, none of 300."""
    before_log = best.Best.before_log

    def measured(self: best.Best, session: Any, row: dict[str, float]) -> dict[str, float]:
        score = 1.0 if session.config.eval.lengths == "250" else 0.0
        return before_log(self, session, {**row, "passkey": score})

    monkeypatch.setattr(best.Best, "before_log", measured)
    keys = [*PASSKEY, "eval.lengths=250", "eval.examples=1", "train.log_every=4"]
    config = small.config(tmp_path / "texts", "lanes", "passkey", *keys)
    train(override(config, ["train.steps=4"]), tmp_path / "run", quiet=True)
    # measured in the same way: the value counts, and no later one is better
    train(override(config, ["eval.batches=2"]), tmp_path / "run", quiet=True)
    assert open_run(tmp_path / "run" / "best").step == 4
    capsys.readouterr()
    train(override(config, ["train.steps=12", "eval.lengths=300"]), tmp_path / "run")
    assert open_run(tmp_path / "run" / "best").step == 12
    assert "passkey is not measured as before" in "".join(capsys.readouterr())


@pytest.mark.long
@pytest.mark.usefixtures("compiled_once")
def test_a_text_that_is_named_is_scored_in_bits(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("a text of its own, " * 40)
    keys = ["eval.every=4", f"eval.tasks=text:{tmp_path / 'own.txt'}", "eval.best=text"]
    keys += ["train.steps=8"]
    config = small.config(tmp_path / "texts", "lanes", "text", *keys, "data.holdout=3")
    run = train(config, tmp_path / "run", quiet=True)
    found = evaluate_text(run, str(tmp_path / "own.txt"), quiet=True)
    row = [row for row in rows(tmp_path / "run") if "text" in row][-1]
    assert row["text"] == pytest.approx(found["bits_per_byte"], rel=1e-6)
    assert "heldout_bits_per_byte" in row


def test_a_missing_text_is_reported_before_anything_is_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["eval.every=4", "eval.tasks=text:/no/such"]
    config = small.config(tmp_path / "texts", "lanes", "text", *keys)
    with pytest.raises(UserError, match=r"^eval\.tasks: no such file or folder: /no/such"):
        train(config, tmp_path / "run")
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["eval.tasks=paskey"], "unknown task 'paskey'; did you mean 'passkey'?"),
        (["eval.lengths=a"], "eval.lengths a: write whole numbers"),
        (["eval.tasks=passkey,passkey"], "names a task twice"),
        (["eval.tasks=text:holdout"], "write text:FILES"),
        (["eval.tasks=copy"], "copy has its own vocabulary; train on it"),
        (["eval.best=vt"], "eval.best=vt: is not measured; take one of"),
        (["eval.every=0"], "eval.tasks: has no effect with eval.every=0"),
        (["eval.tasks="], "data.task=passkey has none; name eval.tasks, or set eval.every=0"),
    ],
)
def test_mistakes_are_one_line_errors(given: list[str], message: str) -> None:
    keys = ["eval.every=4", "eval.tasks=passkey", "eval.lengths=100", "train.steps=8"]
    config = [*small.COMMAND, "data.task=passkey", *keys, "train.log_every=4", *given]
    with pytest.raises(UserError, match=re.escape(message)):
        load_config("text_fam", config)


def test_a_length_that_the_task_has_no_document_of_is_told_before_the_first_step(
    tmp_path: Path,
) -> None:
    config = small.config(tmp_path / "texts", "lanes", "passkey", *PASSKEY, "eval.lengths=5")
    with pytest.raises(UserError, match="5"):
        train(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "given", "lengths"),
    [
        ("passkey", "", [1024]),
        ("niah_single_1", "300,250", [250, 300]),
        ("copy", "", None),  # data.toy.test_steps
        ("copy", "20", [20]),
        ("text", "20", None),
    ],
)
def test_lengths_of_tasks(name: str, given: str, lengths: list[int] | None) -> None:
    assert task_scores._lengths(name, given) == lengths


@pytest.mark.parametrize(("examples", "asked"), [(3, 3), (0, None)])
def test_no_number_of_examples_is_all_of_them(
    examples: int, asked: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.run().config
    config = override(config, ["eval.every=1", "eval.tasks=passkey", f"eval.examples={examples}"])
    session = SimpleNamespace(config=config, clock=SimpleNamespace(stopped=nullcontext))
    monkeypatch.setattr(task_scores, "evaluates_at", lambda _: True)
    monkeypatch.setattr(task_scores, "measure", lambda _, given: {"given": given})
    assert task_scores.TaskScores().before_log(session, {}) == {"given": asked}


def test_an_evaluation_does_not_cast_the_weights_that_are_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On accelerators, tasks that decode cast the weights of their model in place."""
    run = tiny.run_with("fam", dtype="bfloat16")
    graph, params, frozen = nnx.split(run.model, lambda path, _: "embedding" in path, ...)
    config = replace(run.config, eval=replace(run.config.eval, tasks="casts"))
    evaluated = []

    def evaluate(run: Run, request: Request) -> None:
        run.for_inference()
        evaluated.append(nnx.state(run.model, nnx.Param))

    device = SimpleNamespace(platform="gpu")
    monkeypatch.setattr("famjax.train.run.target_device", lambda: device)
    task = SimpleNamespace(
        options=(),
        needs_files=False,
        reads_sources=False,
        evaluate=evaluate,
        scores=lambda _: {None: 1.0},
    )
    monkeypatch.setitem(TASKS, "casts", task)
    session = SimpleNamespace(
        config=config,
        given_config=config,
        state=SimpleNamespace(params=params, frozen=(frozen,)),
        program=SimpleNamespace(inference_graph=graph),
        tokenizer=run.tokenizer,
        step=1,
        base="",
    )
    assert measure(session, 1) == {"casts": 1.0}
    assert jnp.dtype("bfloat16") in {a.dtype for a in jax.tree.leaves(evaluated)}
    assert {a.dtype for a in jax.tree.leaves((params, frozen))} == {jnp.dtype("float32")}
