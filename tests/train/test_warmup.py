"""BPTT warm-up: the same tokens in longer rows, with continuing memory."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from small import Crash, assert_same, compiled_once, config, crash_at, make_program, rows  # noqa: F401

from famjax.config.schema import Config
from famjax.experiment.load import override
from famjax.pipeline import halve_lanes, make_batches, make_source
from famjax.tokenizers.load import load_tokenizer
from famjax.train.checkpoint import Checkpoints
from famjax.train.loop import train
from famjax.train.session import Session
from famjax.train.warmup import row_length_at, with_row_length

pytestmark = pytest.mark.usefixtures("compiled_once")

WARM = ("model.mixer=bswa", "train.bptt_start=16", "train.bptt_double_every=4")


def warmup_config(tmp_path: Path, task: str = "text", steps: int = 10) -> Config:
    """Use 8 rows of 16 tokens for 4 steps, 4 rows of 32 for 4, then 2 rows of 64."""
    return config(tmp_path / "texts", "lanes", task, *WARM, f"train.steps={steps}")


def test_row_lengths_are_those_of_the_paper() -> None:
    given = ["data.length=256", "data.batch=512", "model.block_len=32"]
    warming = ["train.bptt_start=32", "train.bptt_double_every=50000"]
    paper = override(Config(), [*given, *warming])
    steps = [0, 49_999, 50_000, 100_000, 149_999, 150_000, 10**9]
    assert [row_length_at(paper, step) for step in steps] == [32, 32, 64, 128, 128, 256, 256]
    for step in steps:
        data = with_row_length(paper, row_length_at(paper, step)).data
        assert data.batch * data.length == 512 * 256
    plain = override(Config(), given)
    assert row_length_at(plain, 7) == 256
    assert with_row_length(plain, 256) == plain


def on_host(state: Any) -> Any:
    return jax.tree.map(lambda a: np.array(a), state)


class Step(NamedTuple):
    """Host copies of the states around one step."""

    before: Any
    after: Any
    shape: tuple[int, ...]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Collect the state before and after each step."""
    found: list[Step] = []
    run_step = Session.run_step

    def spy(self: Session, inspect: bool) -> Any:
        before = on_host(self.state)
        about = run_step(self, inspect)
        found.append(Step(before, on_host(self.state), (self.rows, self.length)))
        return about

    monkeypatch.setattr(Session, "run_step", spy)
    return found


def assert_equal(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.long
def test_memory_continues_and_nothing_else_changes(
    tmp_path: Path, steps: list[Step], capsys: pytest.CaptureFixture[str]
) -> None:
    train(warmup_config(tmp_path), tmp_path / "run")
    assert [step.shape for step in steps] == [(8, 16)] * 4 + [(4, 32)] * 4 + [(2, 64)] * 2
    for i, (last, this) in enumerate(itertools.pairwise(steps), 1):
        kept = last.after.memory
        if i in (4, 8):
            kept = jax.tree.map(lambda a: a[:, ::2], kept)
        assert {leaf.shape[1] for leaf in jax.tree.leaves(this.before.memory)} == {this.shape[0]}
        assert_equal(this.before.memory, kept)
        if i % 4:  # otherwise a row was logged and the metric sums were reset
            assert_equal(this.before.totals, last.after.totals)
        assert_equal(this.before._replace(memory=(), totals=()),
                     last.after._replace(memory=(), totals=()))  # fmt: skip
    assert [row["length"] for row in rows(tmp_path / "run")] == [16, 32, 64]
    err = capsys.readouterr().err
    assert "step 4: rows of 32 tokens, 4 of them (were 16 and 8)\n" in err
    assert "step 8: rows of 64 tokens, 2 of them (were 32 and 4)\n" in err
    assert re.search(r"10/10 loss .*, rows of 64 tokens, .* left", err)


@pytest.mark.long
def test_a_run_equals_its_steps_by_hand(tmp_path: Path, steps: list[Step]) -> None:
    """The run equals three programs applied in turn to rows that continue the lanes."""
    given = override(warmup_config(tmp_path), ["model.vocab_size=258", "train.log_every=99"])
    train(given, tmp_path / "run", quiet=True)
    tokenizer = load_tokenizer("bytes")
    state, data = None, None
    for length, count in ((16, 4), (32, 4), (64, 2)):
        now = with_row_length(given, length)
        program = make_program(now, tokenizer.token_bytes)
        batches = make_batches(now, make_source(now, tokenizer), tokenizer, 8)
        if state is None:
            state = program.start()
        else:
            memory = jax.tree.map(lambda a: a[:, ::2], state.memory)
            state = jax.device_put(state._replace(memory=memory), program.shardings)
            batches.set_state(data)
        for _ in range(count):
            state = program.step(state, jax.device_put(next(batches), program.batch))
        data = halve_lanes(batches.get_state())
        batches.release()
    assert_equal(on_host(state), steps[-1].after)


@pytest.mark.parametrize("task", ["text", pytest.param("passkey", marks=pytest.mark.long)])
def test_resume_after_a_crash_around_a_change_is_bitwise_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    """Save every three steps and crash at each length, also right before and after a change."""
    small = warmup_config(tmp_path, task, steps=13)
    reference, resumed = tmp_path / "once", tmp_path / "again"
    train(small, reference, quiet=True)
    # steps done by each call, which resumes from 0, 3, 3, 3, 6, 6 and 9
    for count in (4, 1, 2, 3, 2, 4, 3):
        undo = crash_at(monkeypatch, count)
        with pytest.raises(Crash):
            train(small, resumed, quiet=True)
        undo()
    train(small, resumed, quiet=True)
    assert_same(reference, resumed, small)


@pytest.mark.parametrize("every", [4, 8])
def test_resume_at_a_change_is_bitwise_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    small = override(warmup_config(tmp_path), [f"train.checkpoint_every={every}"])
    reference, resumed = tmp_path / "once", tmp_path / "again"
    train(small, reference, quiet=True)
    for steps in (4, 8, 10):  # end at a change, then continue
        train(override(small, [f"train.steps={steps}"]), resumed, quiet=True)
    assert rows(resumed) == rows(reference)
    assert_same(reference, resumed, small)


def test_the_newest_good_checkpoint_may_have_shorter_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = override(warmup_config(tmp_path), ["train.checkpoint_every=7"])
    reference, resumed = tmp_path / "once", tmp_path / "again"
    for run in (reference, resumed):
        train(small, run, quiet=True)
    assert Checkpoints(resumed / "checkpoints").steps() == [7, 10]
    (resumed / "checkpoints" / "000000010" / "extra.json").unlink()
    train(small, resumed, quiet=True)
    assert "000000010 is damaged" in capsys.readouterr().err
    assert_same(reference, resumed, small)
