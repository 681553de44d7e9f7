"""The loop never blocks between logs, compiles once, donates its buffers and logs every field."""

from __future__ import annotations

import functools
import logging
import re
import signal
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import compiled_once, config, make_program, rows  # noqa: F401

from famjax import replace_values
from famjax.bench.steps import prepare_step
from famjax.config.schema import Config, MeshConfig, ModelConfig
from famjax.core.errors import StopRequested, UserError
from famjax.data import lanes
from famjax.experiment.load import override
from famjax.parallel.sharding import make_mesh
from famjax.train import hosts
from famjax.train.checkpoint import Checkpoints
from famjax.train.clock import Clock
from famjax.train.loop import train
from famjax.train.metrics import read_metrics
from famjax.train.program import TrainProgram
from famjax.train.resolve import resolve
from famjax.train.session import Session
from famjax.train.startup import describe_epochs

pytestmark = pytest.mark.usefixtures("compiled_once")


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Collect the states before and after each step."""
    found: list[tuple[Any, Any]] = []
    run_step = Session.run_step

    def spy(self: Session, inspect: bool) -> Any:
        before = self.state
        about = run_step(self, inspect)
        found.append((before, self.state))
        return about

    monkeypatch.setattr(Session, "run_step", spy)
    return found


def test_the_state_is_donated_and_sharded_as_declared(
    tmp_path: Path, states: list[tuple[Any, Any]]
) -> None:
    small = config(tmp_path / "texts", "lanes", "text", "train.steps=6")
    train(small, tmp_path / "run", quiet=True)
    assert len(states) == 6
    for before, after in states:
        kept = [
            path
            for path, leaf in jax.tree_util.tree_leaves_with_path(before)
            if not leaf.is_deleted() and leaf.size
        ]
        assert kept == []
        assert all(leaf.committed for leaf in jax.tree.leaves(after))


@pytest.mark.parametrize("layout", ["lanes", pytest.param("packed", marks=pytest.mark.long)])
def test_one_program_is_compiled(
    tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing compiles after the first step and the first log, nor after resuming."""
    small = config(tmp_path / "texts", layout, "text", "train.steps=9", "train.log_every=2")
    train(small, tmp_path / "warm", quiet=True)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        train(small, tmp_path / "run", quiet=True)
        train(override(small, ["train.steps=12"]), tmp_path / "run", quiet=True)
    compiled = [r.getMessage() for r in caplog.records if "XLA compilation" in r.getMessage()]
    assert not [line for line in compiled if re.search(r"jit\((step|inspect|start|zeros)\)", line)]
    vocabulary = override(small, ["model.vocab_size=258"])
    program = make_program(vocabulary, np.ones(258, np.float32))
    assert program.step._cache_size() == 1  # type: ignore[attr-defined]
    assert program.inspect._cache_size() == 1  # type: ignore[attr-defined]


def test_implicit_transfers_in_a_step_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NumPy array passed to the compiled step would be copied while the device waits."""
    small = config(tmp_path / "texts", "lanes", "text", "train.steps=6")
    monkeypatch.setattr(jax, "device_put", lambda batch, _: batch)
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        train(small, tmp_path / "run", quiet=True)


@pytest.mark.parametrize("mixer", ["fam", "linear"])
def test_the_step_captures_no_array_of_the_device(mixer: Any) -> None:
    """Compiling one that does fetches it, which GPUs and TPUs wait for and the guard refuses."""
    model = ModelConfig(
        vocab_size=32, mixer=mixer, layers=2, width=16, heads=2, mlp_width=16, block_len=4
    )
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    program, state, batch = prepare_step(model, 2, 16, mesh)
    captured = program.step.trace(state, batch).jaxpr.consts  # type: ignore[attr-defined]
    assert [array for array in captured if isinstance(array, jax.Array)] == []


def test_no_device_value_is_fetched_between_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetches are counted: on CPU the transfer guard sees none, as nothing is copied."""
    small = config(tmp_path / "texts", "lanes", "text", "train.steps=12", "train.log_every=6",
                   "train.checkpoint_every=12")  # fmt: skip
    reads: list[int] = []
    done = [0]
    run_step, get = Session.run_step, jax.device_get

    def counting(self: Session, inspect: bool) -> Any:
        done[0] += 1
        before = len(reads)
        found = run_step(self, inspect)
        assert len(reads) == before
        return found

    def read(tree: Any) -> Any:
        reads.append(done[0])
        return get(tree)

    array = type(jnp.zeros(()))
    value = array._value
    seen = property(lambda self: (reads.append(done[0]), value.fget(self))[1])
    monkeypatch.setattr(Session, "run_step", counting)
    monkeypatch.setattr(jax, "device_get", read)
    monkeypatch.setattr(array, "_value", seen)
    train(small, tmp_path / "run", quiet=True)
    assert set(reads) == {6, 12}


def test_loading_continues_while_the_device_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch takes 30 ms to load and a step 60: the loop waits only for the first batch."""
    small = config(
        tmp_path / "texts", "lanes", "text", "train.steps=12", "train.checkpoint_every=99"
    )
    make, program = lanes.RowsIterator.__next__, make_program

    def slow(self: lanes.RowsIterator) -> Any:
        time.sleep(0.03)
        return make(self)

    def slower(
        config: Config, token_bytes: np.ndarray, attention_span: tuple[int, ...] = ()
    ) -> TrainProgram:
        found = program(config, token_bytes)

        def step(state: Any, batch: Any) -> Any:
            time.sleep(0.06)
            return found.step(state, batch)

        return found._replace(step=step)

    train(small, tmp_path / "warm", quiet=True)
    monkeypatch.setattr(lanes.RowsIterator, "__next__", slow)
    monkeypatch.setattr("famjax.train.session.make_program", slower)
    train(small, tmp_path / "run", quiet=True)
    waits = [row["data_wait"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert min(waits) < 0.2  # about a third without prefetching


def test_rows_have_every_field(tmp_path: Path) -> None:
    """A row has every documented field, with plausible values."""
    small = config(tmp_path / "texts", "lanes", "text", "train.steps=9")
    train(small, tmp_path / "run", quiet=True)
    table = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in table] == [4, 8, 9]
    for row in table:
        assert 0 < row["loss"] < 10
        assert row["bits_per_byte"] == pytest.approx(row["loss"] / np.log(2), rel=0.1)
        assert 0 <= row["accuracy"] <= 1
        assert row["grad_norm"] > 0
        assert row["state_norm"] > 0
        assert 0 < row["fam_attention"] < 1
        assert row["learning_rate"] == pytest.approx(3e-3)
        assert row["tokens_per_second"] > 0
        assert 0 < row["model_flops_utilization"] < 1
        assert 0 <= row["data_wait"] <= 1
    tokens = [row["tokens"] for row in table]
    assert tokens == sorted(tokens)
    assert tokens[-1] <= 9 * 2 * 64


def test_seconds_are_those_of_all_calls(tmp_path: Path) -> None:
    """A resumed run counts on from its checkpoint, without the time between calls."""
    small = config(tmp_path / "texts", "lanes", "text", "train.steps=4")
    train(small, tmp_path / "run", quiet=True)
    file = tmp_path / "run" / "metrics.jsonl"
    (first,) = read_metrics(file)
    time.sleep(1.0)
    begin = time.perf_counter()
    train(replace_values(small, {"train.steps": 6}), tmp_path / "run", quiet=True)
    took = time.perf_counter() - begin
    last = read_metrics(file)[-1]
    # the checkpoint was saved after the row
    assert first["train_seconds"] < last["train_seconds"]
    assert last["train_seconds"] < first["train_seconds"] + took + 0.9
    before = last["train_seconds"]
    train(replace_values(small, {"train.steps": 6}), tmp_path / "run", quiet=True)
    assert read_metrics(file)[-1]["train_seconds"] == before


def test_rates_count_timed_steps_only() -> None:
    """The step that compiles is neither timed nor counted; an interval of only it has no rate."""
    clock = Clock()
    config = resolve(override(Config(), ["model.vocab_size=32"]), None, 1)
    assert clock.lap(100.0, config) == {}
    clock.steps, clock.begin = 3, time.perf_counter() - 2
    clock.waited = {"data": 0.5, "device": 0.9}
    lap = clock.lap(100.0, config)
    assert lap["tokens_per_second"] == pytest.approx(150, rel=0.05)
    assert lap["data_wait"] == pytest.approx(0.25, rel=0.05)
    assert lap["step_seconds"] == pytest.approx(2 / 3, rel=0.05)
    assert lap["data_seconds"] == pytest.approx(0.5 / 3)
    assert lap["device_seconds"] == pytest.approx(0.3)
    assert lap["host_seconds"] == pytest.approx(0.2, rel=0.05)
    assert (clock.steps, clock.waited) == (0, {"data": 0, "device": 0})


@pytest.mark.long
def test_the_progress_line_shows_time_by_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = config(tmp_path / "texts", "packed", "passkey", "train.steps=4")
    train(small, tmp_path / "run")
    out, err = capsys.readouterr()
    assert out == ""
    what, many, data, *compiled, last = err.splitlines()
    number = r"[\d.]+"
    assert re.fullmatch(r"run: [\d,]+ parameters, float32, on 8 x cpu", what)
    assert many == "4 steps of 128 tokens, 2 rows x 64; 512 tokens in all"
    assert data.startswith("passkey documents")
    assert re.fullmatch(
        "initial weights: random\n"
        f"compiling the first state\ncompiled in {number} s\n"
        f"compiling the training step\ncompiled in {number} s",
        "\n".join(compiled),
    )
    line = (
        rf"4/4 loss {number}, accuracy {number}%, longest {number}, {number}k? tokens/s, "
        rf"data {number}% step {number}%, 0:00 left"
    )
    assert re.fullmatch(line, last)


@pytest.mark.parametrize("layout", ["lanes", "packed"])
def test_a_new_run_says_how_often_it_reads_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    small = config(tmp_path / "texts", layout, "text", "data.holdout=0", "train.steps=4")
    small = override(small, ["data.repeat_len=0"])
    train(small, tmp_path / "run")
    sizes = [18 * (5 + 9 * i) + 2 for i in range(6)]
    if layout == "lanes":
        sizes = [-(-size // 8) * 8 for size in sizes]
    said = capsys.readouterr().err.splitlines()
    assert said[2].startswith("6 documents, 3.0 kB")
    assert said[3] == f"reads about {4 * 2 * 64 / sum(sizes):.0%} of the text"
    train(override(small, ["train.steps=5"]), tmp_path / "run")
    assert "of the text" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("epochs", "line"),
    [
        (1e-5, "reads less than 1% of the text"),
        (0.994, "reads about 99% of the text"),
        (0.996, "reads the text about 1.0 times"),
        (6.14, "reads the text about 6.1 times"),
        (9.99, "reads the text about 10 times"),
        (123.4, "reads the text about 120 times"),
        (12345.6, "reads the text about 12,000 times"),
    ],
)
def test_how_often_a_text_is_read_has_two_digits(epochs: float, line: str) -> None:
    assert describe_epochs(epochs) == line


# not finite


def poison_step_six(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the parameters not finite before step 6."""
    run_step = Session.run_step

    def poison(self: Session, inspect: bool) -> Any:
        if self.step == 5:
            params = jax.tree.map(lambda a: a * jnp.nan, self.state.params)
            self.state = self.state._replace(params=params)
        return run_step(self, inspect)

    monkeypatch.setattr(Session, "run_step", poison)


@pytest.mark.parametrize(
    ("every", "noticed", "kept"),
    [(5, 8, "the last valid checkpoint is step 5"), (20, 8, "nothing was saved yet")],
)
def test_a_loss_that_is_not_finite_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, noticed: int, kept: str
) -> None:
    """Detected at the next log or save; the error names the step where it occurred first."""
    poison_step_six(monkeypatch)
    more = ["train.steps=40", "train.log_every=8", f"train.checkpoint_every={every}"]
    small = config(tmp_path / "texts", "lanes", "text", *more)
    run = tmp_path / "run"
    with pytest.raises(UserError, match=f"the loss is not finite at step 6; {kept} in ") as error:
        train(small, run, quiet=True)
    assert "\n" not in str(error.value)
    assert Checkpoints(run / "checkpoints").steps() == ([5] if every == 5 else [])
    assert [row["step"] for row in rows(run)] == [noticed]


def test_a_checkpoint_before_the_first_log_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_step_six(monkeypatch)
    more = ["train.steps=40", "train.log_every=40", "train.checkpoint_every=5"]
    with pytest.raises(UserError, match="the last valid checkpoint is step 5"):
        train(config(tmp_path / "texts", "lanes", "text", *more), tmp_path / "run", quiet=True)
    assert Checkpoints(tmp_path / "run" / "checkpoints").steps() == [5]


def test_a_run_resumes_after_a_loss_that_was_not_finite(tmp_path: Path) -> None:
    small = config(tmp_path / "texts", "lanes", "text", "train.steps=9")
    train(small, tmp_path / "once", quiet=True)
    with pytest.MonkeyPatch.context() as patch:
        poison_step_six(patch)
        with pytest.raises(UserError, match="not finite at step 6"):
            train(small, tmp_path / "again", quiet=True)
    train(small, tmp_path / "again", quiet=True)
    assert rows(tmp_path / "again") == rows(tmp_path / "once")


def test_a_stop_saves_the_steps_since_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C once saves; twice stops immediately."""
    small = config(
        tmp_path / "texts", "lanes", "text", "train.steps=9", "train.checkpoint_every=50"
    )
    run_step = Session.run_step

    def interrupt(self: Session, inspect: bool, times: int) -> Any:
        found = run_step(self, inspect)
        if self.step == 5:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return found

    before = signal.getsignal(signal.SIGINT)
    for times, error in ((1, StopRequested), (2, KeyboardInterrupt)):
        patched = functools.partialmethod(interrupt, times=times)
        monkeypatch.setattr(Session, "run_step", patched)
        run = tmp_path / str(times)
        with pytest.raises(error):
            train(small, run, quiet=True)
        assert Checkpoints(run / "checkpoints").latest() == (5 if times == 1 else None)
        assert signal.getsignal(signal.SIGINT) is before


def test_a_stop_that_waits_for_an_evaluation_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = hosts.StopSignal()
    with stop.catch_signals():  # the step ends in time
        signal.raise_signal(signal.SIGTERM)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(hosts, "_PATIENCE_SECONDS", 0.01)
    stop, shown = hosts.StopSignal(), ""
    with stop.catch_signals():
        signal.raise_signal(signal.SIGTERM)
        for _ in range(1000):
            if shown := capsys.readouterr().err:
                break
            time.sleep(0.01)
    assert shown.startswith("famjax: stopping: saves as soon as this step")
