"""Progress of reading: silent at first, then tokens, their rate and the remaining time."""

from __future__ import annotations

import io
import itertools
import re
import time

import pytest

from famjax.eval import progress
from famjax.eval.progress import TokenProgress


def lines(
    steps: list[tuple[float, int]],
    total: int | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    quiet: bool = False,
) -> list[str]:
    """Return the output when tokens are read at these seconds."""
    times = iter(itertools.chain([0.0], (time for time, _ in steps)))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(times))
    with TokenProgress("reading", total, quiet) as shown:
        for _, tokens in steps:
            shown.advance(tokens)
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_short_work_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lines([(1, 10), (4.9, 10)], 20, monkeypatch, capsys) == []
    assert lines([(1, 10), (60, 10)], 20, monkeypatch, capsys, quiet=True) == []


def test_rate_and_remaining_time_exclude_compilation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [(4.0, 100), (6.0, 200), (10.0, 200), (17.0, 800)]
    assert lines(steps, 2600, monkeypatch, capsys) == [
        "reading: 300 tokens, 100 tokens/s, 12%, 0:00:23 left",
        "reading: 1,300 tokens, 92 tokens/s, 50%, 0:00:14 left",
    ]


def test_unknown_total_and_a_slow_first_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lines([(30.0, 100), (41.0, 110)], None, monkeypatch, capsys) == [
        "reading: 100 tokens",
        "reading: 210 tokens, 10 tokens/s",
    ]


def test_a_later_compilation_is_excluded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with TokenProgress("reading", 400) as shown:
        shown.advance(100)
        clock[0] = 2.0
        shown.advance(100)
        with shown.compiling():
            clock[0] = 32.0
        clock[0] = 34.0
        shown.advance(100)
    line = "reading: 300 tokens, 50 tokens/s, 75%, 0:00:02 left"
    assert capsys.readouterr().err.splitlines() == [line]


def test_long_compilation_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with TokenProgress("reading") as shown, shown.compiling():
        pass
    with TokenProgress("reading", quiet=True, patience=0.1) as shown, shown.compiling():
        time.sleep(0.3)
    assert capsys.readouterr().err == ""
    with TokenProgress("reading", patience=0.1) as shown, shown.compiling():
        time.sleep(0.7)
        assert capsys.readouterr().err == "reading: compiling\n"
    assert re.fullmatch(r"reading: compiled in [\d.]+ s\n", capsys.readouterr().err)


def test_compilation_shows_a_spinner_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with TokenProgress("reading", patience=0.1) as shown, shown.compiling():
        time.sleep(0.8)
    text = terminal.getvalue()
    assert "reading: compiling, 0." in text
    assert len(set(re.findall("[\u2801-\u28ff]", text))) > 1
    assert "reading: compiled in " in text


def test_answers_are_counted_and_estimated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])

    def at(seconds: float) -> TokenProgress:
        clock[0] = seconds
        return shown

    with TokenProgress("reading", 400, answers=40) as shown:
        at(1).advance(100)
        at(11).advance(100)
        at(12).answer(5)
        at(22).answer(5)
        at(33).answer(0)
    assert capsys.readouterr().err.splitlines() == [
        "reading: 200 tokens, 10 tokens/s, 50%, 0:00:20 left to read, 0 of 40 answers",
        # 20 seconds to read, and 30 answers of 1.1 seconds
        "reading: 200 tokens, 10 tokens/s, 50%, 0:00:53 left, 10 of 40 answers",
        "reading: 200 tokens, 10 tokens/s, 50%, 0:01:26 left, 10 of 40 answers",
    ]
