"""A live line on a terminal, sparse lines elsewhere."""

from __future__ import annotations

import io
import re
import time
from types import SimpleNamespace

import pytest

from famjax.config.schema import Config, OptimizerConfig, TrainConfig
from famjax.train import progress
from famjax.train.progress import Progress
from famjax.train.startup import startup_lines


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_plain_lines_are_sparse_except_the_first_and_last(capsys, clock):
    with Progress(total=100) as shown:
        for step in range(10, 101, 10):
            shown.update(step, loss=1 / step)
            clock.now += 3
    steps = [line.split("/")[0] for line in capsys.readouterr().err.splitlines()]
    assert steps == ["10", "50", "90", "100"]


def test_an_interrupted_run_shows_its_last_step(capsys, clock):
    def run():
        with Progress(total=100) as shown:
            shown.update(1)
            shown.update(2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert capsys.readouterr().err.splitlines()[-1].startswith("2/100")


def test_a_line_has_every_field(capsys, clock):
    with Progress(total=100, start=40) as shown:
        shown.update(50, loss=2.0)
        clock.now += 20
        shown.update(
            60,
            loss=1.23456,
            accuracy=0.5,
            tokens_per_second=81234,
            data_wait=0.03,
            grad_norm=0.123456,
        )
    first, second = capsys.readouterr().err.splitlines()
    assert first == "50/100 loss 2.0000"
    assert second == (
        "60/100 loss 1.2346, accuracy 50.0%, 81.2k tokens/s, data 3% step 97%, "
        "grad_norm 0.1235, 1:20 left"
    )


def test_compilation_is_reported_and_not_timed(capsys, clock):
    """It is shown before and after, and excluded from the estimate of the remaining time."""
    with Progress(total=100) as shown:
        with shown.compiling("the training step", 0):
            assert capsys.readouterr().err == "compiling the training step\n"
            clock.now += 75
        clock.now += 10
        shown.update(10)
        with shown.compiling("the training step anew", 10):
            clock.now += 300
        clock.now += 10
        shown.update(20)
    assert capsys.readouterr().err.splitlines() == [
        "compiled in 75 s",
        "10/100 1:30 left",
        "compiling the training step anew",
        "compiled in 5:00 minutes",
        "20/100 1:20 left",
    ]


def test_a_failed_compilation_is_not_reported_as_compiled(capsys):
    def run():
        with Progress(total=100) as shown, shown.compiling("the training step", 0):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert capsys.readouterr().err == "compiling the training step\n"


def test_compilation_shows_a_spinner_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Progress(total=10) as shown, shown.compiling("the training step", 0):
        time.sleep(0.5)
    text = terminal.getvalue()
    assert "compiling the training step, 0." in text
    assert len(set(re.findall("[⠁-⣿]", text))) > 1  # the spinner advances
    assert "compiled the training step in 0." in text


def test_quiet_still_prints_notes(capsys):
    with Progress(total=10, quiet=True) as shown:
        with shown.compiling("the training step", 0):
            shown.note_unless_quiet("what is trained")
        shown.update(5, loss=1.0)
        shown.note("checkpoint [3] is damaged")
    captured = capsys.readouterr()
    assert captured.err == "checkpoint [3] is damaged\n"
    assert captured.out == ""


def test_long_notes_are_not_wrapped(capsys):
    with Progress(total=10) as shown:
        shown.note("x" * 500)
    assert capsys.readouterr().err == "x" * 500 + "\n"


def test_the_live_line_is_updated_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Progress(total=10) as shown:
        shown.update(1, loss=2.5)
        shown.note("a note that stays")
        shown.update(10, loss=1.5)
    text = terminal.getvalue()
    assert "10/10" in text
    assert "loss 1.5000" in text
    assert "a note that stays" in text
    assert "\x1b[" in text


def test_long_durations_are_formatted():
    assert progress._duration(3 * 3600 + 61) == "3:01:01"
    assert [progress._short(x) for x in (12, 1.5e3, 2e6, 3e9)] == ["12", "1.5k", "2.0M", "3.0G"]


@pytest.mark.parametrize(("steps", "reaches"), [(2, "6e-07"), (4999, "0.003"), (5000, "")])
def test_a_warm_up_longer_than_the_run_is_reported(steps, reaches):
    optimizer = OptimizerConfig(learning_rate=3e-3, warmup_steps=5000, schedule="cosine")
    config = Config(optimizer=optimizer, train=TrainConfig(steps=steps))
    said = "\n".join(startup_lines(config, SimpleNamespace(params={}, frozen=())))
    line = f"warm-up (5,000 steps) is longer than the run: the rate reaches {reaches} of 0.003"
    assert said.endswith(line) if reaches else "warm-up" not in said
