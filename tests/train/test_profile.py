"""Profiles trace the requested steps; parts of a step sum to its time; results do not change."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
from small import (  # noqa: F401
    PARTS,
    Crash,
    compiled_once,
    config,
    crash_at,
    final,
    make_program,
)

from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.experiment.load import load_config
from famjax.pipeline import Batches
from famjax.train import session as session_module
from famjax.train.hooks import Profiling
from famjax.train.loop import train
from famjax.train.metrics import read_metrics
from famjax.train.profile import Profiler
from famjax.train.session import Session

pytestmark = pytest.mark.usefixtures("compiled_once")


def text(tmp_path: Path, *more: str) -> Config:
    return config(tmp_path / "texts", "lanes", "text", "train.steps=8", *more)


def traced_steps(run: Path) -> list[int]:
    """Return the steps in the run's last trace; check that it has a profile for XProf."""
    trace = max(run.glob("profile/plugins/profile/*/*.trace.json.gz"))
    (xplane,) = trace.parent.glob("*.xplane.pb")
    assert xplane.stat().st_size
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sorted(int(e["args"]["step_num"]) for e in events if e.get("name") == "train")


@pytest.mark.long
def test_the_trace_has_the_requested_steps_and_results_do_not_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = text(tmp_path)
    train(plain, tmp_path / "plain", quiet=True)
    capsys.readouterr()
    run = tmp_path / "run"
    train(text(tmp_path, "profile.steps=3:6", "profile.memory=5"), run, quiet=True)
    *_, memory, trace = capsys.readouterr().err.splitlines()

    assert traced_steps(run) == [3, 4, 5]
    assert trace.startswith("trace of steps 3:6: pip install xprof && xprof --logdir ")
    assert str(run / "profile") in trace
    (held,) = run.glob("profile/*.prof")
    assert memory == f"device memory after step 5: pprof -top {held}"
    assert held.name == "memory_000005.prof"
    # pprof format: a gzipped protocol buffer that names the files whose lines allocated the arrays
    assert b"train/session.py" in gzip.decompress(held.read_bytes())

    (step, (bits, _), rows), (step_, (bits_, _), rows_) = (
        final(folder, plain) for folder in (tmp_path / "plain", run)
    )
    assert (step, rows) == (step_, rows_)
    assert bits == bits_


@pytest.mark.long
def test_a_run_that_ends_within_the_trace_writes_a_partial_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = text(tmp_path, "profile.steps=2:8")
    undo = crash_at(monkeypatch, 5)
    with pytest.raises(Crash):
        train(small, tmp_path / "run", quiet=True)
    undo()
    assert {2, 3, 4} <= set(traced_steps(tmp_path / "run"))
    # resumed from the checkpoint of step 3, the same command traces the remaining steps
    time.sleep(1.1)  # names of traces have a resolution of one second
    train(small, tmp_path / "run", quiet=True)
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 8
    assert len(list(tmp_path.glob("run/profile/plugins/profile/*"))) == 2
    assert traced_steps(tmp_path / "run") == [3, 4, 5, 6, 7]


def test_profiling_completed_steps_is_rejected(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(text(tmp_path, "train.steps=4"), run, quiet=True)
    with pytest.raises(UserError) as steps:
        train(text(tmp_path, "profile.steps=3:6"), run, quiet=True)
    assert str(steps.value) == (
        "profile.steps=3:6: begins before step 4, where the run resumes; choose later steps, or "
        "leave it out"
    )
    with pytest.raises(UserError, match=r"^profile\.memory=3: is before step 4, where the run"):
        train(text(tmp_path, "profile.memory=3"), run, quiet=True)
    train(text(tmp_path, "profile.steps=4:6"), run, quiet=True)
    assert traced_steps(run) == [4, 5]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("profile.steps=12", "profile.steps=12: give two step counts, such as"),
        ("profile.steps=a:b", "profile.steps=a:b: give two step counts"),
        ("profile.steps=-1:3", "profile.steps=-1:3: give two step counts"),
        ("profile.steps=3:3", "profile.steps=3:3: must begin before it ends"),
        ("profile.steps=6:2", "profile.steps=6:2: must begin before it ends"),
        ("profile.steps=6:11", "profile.steps=6:11: ends beyond train.steps=10; take at most 10"),
        ("profile.memory=11", "profile.memory=11: is beyond train.steps=10; take at most 10"),
        ("profile.memory=-1", "profile.memory=-1: must be at least 0"),
    ],
)
def test_invalid_values_are_rejected_in_one_line(given: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config("text_fam", ["train.steps=10", given])
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_the_parts_of_a_step_sum_to_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loader, device and host each delay every step; each delay appears only in its own part."""
    small = text(tmp_path)
    train(small, tmp_path / "warm", quiet=True)
    program, after_step, take = session_module.make_program, Profiling.after_step, Batches.__next__

    def slow_data(self: Batches) -> Any:
        time.sleep(0.06)
        return take(self)

    def slow_device(*args: Any) -> Any:
        found = program(*args)

        def step(state: Any, batch: Any) -> Any:
            time.sleep(0.04)  # as if too many steps were in flight
            return found.step(state, batch)

        return found._replace(step=step)

    def slow_host(self: Profiling, session: Session, is_logged: bool) -> None:
        time.sleep(0.02)
        after_step(self, session, is_logged)

    monkeypatch.setattr(Batches, "__next__", slow_data)
    monkeypatch.setattr(Profiling, "after_step", slow_host)
    monkeypatch.setattr(session_module, "make_program", slow_device)
    train(small, tmp_path / "run", quiet=True)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 2
    for row in rows:
        assert sum(row[part] for part in PARTS) == pytest.approx(row["step_seconds"])
        assert row["step_seconds"] == pytest.approx(64 * 2 / row["tokens_per_second"], rel=0.2)
        assert row["data_seconds"] >= 0.06
        assert row["device_seconds"] >= 0.04
        assert row["host_seconds"] >= 0.02


@pytest.mark.long
def test_the_profiler_is_excluded_from_the_runs_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Profiler, "write_memory", lambda _: time.sleep(2))
    train(text(tmp_path, "profile.memory=5"), tmp_path / "run", quiet=True)
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step_seconds"] < 0.4
