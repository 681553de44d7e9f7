"""A run that is stopped at any moment and resumed ends bit for bit as one that was not."""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from small import Crash, assert_same, compiled_once, config, crash_at, rows, texts  # noqa: F401

from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.data.scan import Scanner
from famjax.experiment.load import override, to_json
from famjax.train.checkpoint import Checkpoints
from famjax.train.loop import train

pytestmark = pytest.mark.usefixtures("compiled_once")

MODES = [(layout, task) for layout in ("lanes", "packed") for task in ("text", "passkey")]
modes = pytest.mark.parametrize(("layout", "task"), MODES)


# `famjax`, on one device as here: so that it finds what was compiled here
FAMJAX = """
import functools, sys
import jax
from famjax.cli.main import main
from famjax.parallel import sharding
sharding.make_mesh = functools.partial(sharding.make_mesh, devices=jax.devices()[:1])
sys.exit(main())
"""


def start(config: Config, run: Path) -> subprocess.Popen[str]:
    """Run `famjax train` in another process."""
    path = run.parent / f"{run.name}.json"
    path.write_text(to_json(config))
    command = [sys.executable, "-c", FAMJAX, "train", str(path), "--run", str(run)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def last_step(run: Path) -> int:
    """Return the step of the last row, while the run continues."""
    path = run / "metrics.jsonl"
    steps = re.findall(r'^{"step": (\d+),.*}$', path.read_text(), re.M) if path.exists() else []
    return int(steps[-1]) if steps else 0


def until(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    """Wait for something that happens on the disk, or for the process to end."""
    while process.poll() is None and not reached():
        time.sleep(0.002)


def end(process: subprocess.Popen[str], number: int) -> tuple[int, str]:
    """Send a signal, and return the exit status and standard error."""
    if process.poll() is None:
        process.send_signal(number)
    _, err = process.communicate(timeout=300)
    return process.returncode, err


def test_a_resumed_run_parses_no_line_of_unchanged_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(f'{{"text": "line {i} of the text"}}\n' for i in range(40)))
    small = override(config(tmp_path / "texts"), [f"data.files={lines}"])
    checked: list[bytes] = []
    monkeypatch.setattr(Scanner, "_check", lambda _, line: checked.append(line))
    for steps, expected in ((1, 40), (2, 0)):
        train(override(small, [f"train.steps={steps}"]), tmp_path / "run", quiet=True)
        assert len(checked) == expected
        checked.clear()
    assert not list((tmp_path / "run").glob("*.tmp"))


# one process killed, one told to stop, each at a random moment, and the rest here
@pytest.mark.parametrize(
    ("layout", "task"),
    [("lanes", "text"), pytest.param("packed", "passkey", marks=pytest.mark.slow)],
)
def test_killed_then_stopped_then_resumed(tmp_path: Path, layout: str, task: str) -> None:
    small = config(tmp_path / "texts", layout, task, "train.steps=30")
    once, again = tmp_path / "once", tmp_path / "again"
    train(small, once, quiet=True)

    process = start(small, again)
    until(process, lambda: last_step(again) >= 4)
    time.sleep(random.uniform(0, 0.3))
    status, _ = end(process, signal.SIGKILL)
    assert status == -signal.SIGKILL

    process = start(small, again)
    before = last_step(again)
    until(process, lambda: last_step(again) > before)
    status, err = end(process, signal.SIGTERM)
    assert status == 143, err
    said = re.fullmatch(r"famjax: stopped by SIGTERM at step (\d+), saved", err.splitlines()[-1])
    assert said, err
    assert "Traceback" not in err
    assert Checkpoints(again / "checkpoints").latest() == int(said[1])

    train(small, again, quiet=True)
    assert_same(once, again, small)


@modes
def test_a_crash_at_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, task: str
) -> None:
    """Each call crashes some steps later than the one before, before or after logs and saves."""
    small = config(tmp_path / "texts", layout, task, "train.steps=23")
    once, again = tmp_path / "once", tmp_path / "again"
    train(small, once, quiet=True)
    for count in (2, 4, 5, 6):
        undo = crash_at(monkeypatch, count)
        with pytest.raises(Crash):
            train(small, again, quiet=True)
        undo()
    train(small, again, quiet=True)
    assert_same(once, again, small)
    if task == "passkey":  # the curriculum has advanced in the meantime, more than once
        longest = [row["longest"] for row in rows(again)]
        assert longest == sorted(longest)
        assert len(set(longest)) > 2


def wait(process: subprocess.Popen[str], run: Path, kind: str, delay: float) -> None:
    """Wait for the moment of a kill: a `delay` of 0 to 1 after an event."""
    if kind == "starting":
        end = time.monotonic() + 8 * delay
        until(process, lambda: time.monotonic() > end)
        return
    before = last_step(run)
    until(process, lambda: last_step(run) > before)
    time.sleep(delay)
    if kind == "saving":
        until(process, lambda: any((run / "checkpoints").glob("tmp-*")))
        time.sleep(delay / 10)


@pytest.mark.slow
@modes
def test_twenty_kills(tmp_path: Path, layout: str, task: str) -> None:
    # more than twenty pauses take, on a fast machine too
    small = config(tmp_path / "texts", layout, task, "train.steps=900")
    once, again = tmp_path / "once", tmp_path / "again"
    rng, newest = random.Random(f"{layout} {task}"), 0
    for kill in range(20):
        kind, delay = rng.choice(["running", "running", "saving", "starting"]), rng.random()
        process = start(small, again)
        wait(process, again, kind, delay)
        status, err = end(process, signal.SIGKILL)
        folders = sorted(p.name for p in again.glob("checkpoints/*"))
        print(kill, kind, f"{delay:.2f}", last_step(again), folders, flush=True)
        assert status == -signal.SIGKILL, err
        before, newest = newest, Checkpoints(again / "checkpoints").latest() or 0
        assert newest >= before
    for run in (once, again):
        process = start(small, run)
        _, err = process.communicate()
        assert process.returncode == 0, err
    assert_same(once, again, small)


# going on


def test_a_run_that_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = config(tmp_path / "texts", "lanes", "text", "train.steps=6")
    run = tmp_path / "run"
    first = train(small, run, quiet=True)
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in run.rglob("0*/*") if p.is_file()}
    metrics = (run / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    second = train(small, run, quiet=True)
    assert capsys.readouterr().err == (
        "nothing to do: step 6 of train.steps=6 is done; raise it to continue\n"
    )
    assert first.step == second.step == 6
    assert before == {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in before}
    assert metrics == (run / "metrics.jsonl").read_bytes()


def test_more_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A constant rate: as if requested from the start, except for the row of the first end."""
    small = config(tmp_path / "texts", "lanes", "text", "train.steps=6")
    more = override(small, ["train.steps=12"])
    once, again = tmp_path / "once", tmp_path / "again"
    train(more, once, quiet=True)
    train(small, again, quiet=True)
    capsys.readouterr()
    assert train(more, again, quiet=True).step == 12
    err = capsys.readouterr().err
    assert err.startswith("continues from step 6 of 12\n")
    assert "learning rate" not in err
    assert [row["step"] for row in rows(again)] == [4, 6, 8, 12]
    assert rows(again)[-1] == rows(once)[-1]


def test_more_steps_move_a_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cosine = "optimizer.schedule=cosine"
    small = config(tmp_path / "texts", "lanes", "text", "train.steps=6", cosine)
    run = tmp_path / "run"
    train(small, run, quiet=True)
    crash_at(monkeypatch, 0)
    with pytest.raises(Crash):
        train(override(small, ["train.steps=12"]), run, quiet=True)
    said = "train.steps: 6 -> 12; the cosine schedule follows, the learning rate goes from 0.0003 "
    assert said in capsys.readouterr().err


# what must not go on


def test_documents_that_changed(tmp_path: Path) -> None:
    small = config(tmp_path / "texts", "lanes", "text", "train.steps=6")
    run = tmp_path / "run"
    train(small, run, quiet=True)
    more = override(small, ["train.steps=8"])
    changes: list[Callable[[Path], object]] = [
        lambda folder: (folder / "3.txt").open("a").write("one word more"),
        lambda folder: (folder / "3.txt").rename(folder / "9.txt"),
        lambda folder: (folder / "new.txt").write_text("new"),
        lambda folder: (folder / "3.txt").unlink(),
    ]
    for change in changes:
        shutil.rmtree(tmp_path / "texts")
        texts(tmp_path / "texts")
        change(tmp_path / "texts")
        with pytest.raises(UserError, match="the documents changed since the run was saved") as e:
            train(more, run, quiet=True)
        assert "\n" not in str(e.value)
    shutil.rmtree(tmp_path / "texts")
    texts(tmp_path / "texts")
    assert train(more, run, quiet=True).step == 8


def test_a_checkpoint_of_another_config(tmp_path: Path) -> None:
    small = config(tmp_path / "texts", "lanes", "text", "train.steps=6")
    train(small, tmp_path / "run", quiet=True)
    (tmp_path / "run" / "config.json").unlink()
    other = replace(small, seed=1)
    with pytest.raises(UserError, match=r"checkpoints/000000006 holds .*\(seed: 0 -> 1\)"):
        train(other, tmp_path / "run", quiet=True)
