"""A run that is stopped at any moment and resumed is bitwise equal to an uninterrupted run."""

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
from typing import Any

import pytest
from memories import MEMORIES
from small import Crash, assert_same, compiled_once, config, crash_at, rows, texts  # noqa: F401

from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.data.json_lines import parse_record
from famjax.experiment.load import override, to_json
from famjax.train.checkpoint import Checkpoints
from famjax.train.loop import train

pytestmark = pytest.mark.usefixtures("compiled_once")

# each layout and each task; the other pairs are slow
MODES = [("lanes", "text"), pytest.param("packed", "passkey", marks=pytest.mark.long)]
MODES += [
    pytest.param(*mode, marks=pytest.mark.slow)
    for mode in (("lanes", "passkey"), ("packed", "text"))
]
modes = pytest.mark.parametrize(("layout", "task"), MODES)

SAVED = {**MEMORIES, "losses": "train.diversity_loss=0.1 train.reconstruction_loss=0.1"}
# packed rows of these begin without a memory and without an offset
WHOLE_ROWS = ("train.rsp=0", "train.rsp_ramp=0", "train.rpo=false")
QUICK = [("rmt", "lanes"), ("swa", "lanes")]
# in the tests above, or saved like another
LIKE_OTHERS = ("fam", "fam-gated", "fam-between", "bswa", "bswa_sg", "full", "n-grams")
LIKE_OTHERS += ("feedback", "transformer")


# `famjax` on one device, so that it reuses programs that were compiled in this process
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
    """Return the step of the last row while the run continues."""
    path = run / "metrics.jsonl"
    steps = re.findall(r'^{"step": (\d+),.*}$', path.read_text(), re.M) if path.exists() else []
    return int(steps[-1]) if steps else 0


def wait_until(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    """Wait for a condition on files, or for the process to end."""
    while process.poll() is None and not reached():
        time.sleep(0.002)


def send_signal(process: subprocess.Popen[str], number: int) -> tuple[int, str]:
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

    def parse(line: bytes, template: Any) -> Any:
        checked.append(line)
        return parse_record(line, template)

    monkeypatch.setattr("famjax.data.scan.parse_record", parse)
    for steps, expected in ((1, 40), (2, 0)):
        train(override(small, [f"train.steps={steps}"]), tmp_path / "run", quiet=True)
        assert len(checked) == expected
        checked.clear()
    assert not list((tmp_path / "run").glob("*.tmp"))


# one process is killed and one stopped, each at a random moment; the rest runs in this process
@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "task"),
    [("lanes", "text"), pytest.param("packed", "passkey", marks=pytest.mark.slow)],
)
def test_resume_after_sigkill_and_sigterm_is_bitwise_equal(
    tmp_path: Path, layout: str, task: str
) -> None:
    small = config(tmp_path / "texts", layout, task, "train.steps=30")
    reference, resumed = tmp_path / "once", tmp_path / "again"
    train(small, reference, quiet=True)

    process = start(small, resumed)
    wait_until(process, lambda: last_step(resumed) >= 4)
    time.sleep(random.uniform(0, 0.3))
    status, _ = send_signal(process, signal.SIGKILL)
    assert status == -signal.SIGKILL

    process = start(small, resumed)
    before = last_step(resumed)
    wait_until(process, lambda: last_step(resumed) > before)
    status, err = send_signal(process, signal.SIGTERM)
    assert status == 143, err
    said = re.fullmatch(r"famjax: stopped by SIGTERM at step (\d+), saved", err.splitlines()[-1])
    assert said, err
    assert "Traceback" not in err
    assert Checkpoints(resumed / "checkpoints").latest() == int(said[1])

    train(small, resumed, quiet=True)
    assert_same(reference, resumed, small)


@modes
def test_resume_after_crashes_at_any_step_is_bitwise_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, task: str
) -> None:
    """Each call crashes some steps later than the last, before or after logs and saves."""
    small = config(tmp_path / "texts", layout, task, "train.steps=23")
    reference, resumed = tmp_path / "once", tmp_path / "again"
    train(small, reference, quiet=True)
    for count in (2, 4, 5, 6):
        undo = crash_at(monkeypatch, count)
        with pytest.raises(Crash):
            train(small, resumed, quiet=True)
        undo()
    train(small, resumed, quiet=True)
    assert_same(reference, resumed, small)
    if task == "passkey":  # the curriculum has advanced meanwhile, more than once
        longest = [row["longest"] for row in rows(resumed)]
        assert longest == sorted(longest)
        assert len(set(longest)) > 2


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *QUICK,
        *(
            pytest.param(
                *(name, layout),
                marks=pytest.mark.slow if name in LIKE_OTHERS else pytest.mark.long,
            )
            for name in SAVED
            for layout in ("lanes", "packed")
            if (name, layout) not in QUICK
        ),
    ],
)
def test_resume_with_another_memory_is_bitwise_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, layout: str
) -> None:
    keys = SAVED[name].split()
    # rotated keys of linear attention have no offset
    if layout == "packed" and ("model.stack" in SAVED[name] or name == "linear"):
        keys += WHOLE_ROWS
    small = config(tmp_path / "texts", layout, "text", "train.steps=9", *keys)
    reference, resumed = tmp_path / "once", tmp_path / "again"
    train(small, reference, quiet=True)
    undo = crash_at(monkeypatch, 5)
    with pytest.raises(Crash):
        train(small, resumed, quiet=True)
    undo()
    train(small, resumed, quiet=True)
    assert_same(reference, resumed, small)


def wait_for_kill(process: subprocess.Popen[str], run: Path, kind: str, delay: float) -> None:
    """Wait for the moment of a kill, a `delay` of 0 to 1 after an event."""
    if kind == "starting":
        end = time.monotonic() + 8 * delay
        wait_until(process, lambda: time.monotonic() > end)
        return
    before = last_step(run)
    wait_until(process, lambda: last_step(run) > before)
    time.sleep(delay)
    if kind == "saving":
        wait_until(process, lambda: any((run / "checkpoints").glob("tmp-*")))
        time.sleep(delay / 10)


@pytest.mark.slow
@modes
def test_resume_after_twenty_kills_is_bitwise_equal(tmp_path: Path, layout: str, task: str) -> None:
    # enough steps for twenty pauses, also on a fast machine
    small = config(tmp_path / "texts", layout, task, "train.steps=900")
    reference, resumed = tmp_path / "once", tmp_path / "again"
    rng, newest = random.Random(f"{layout} {task}"), 0
    for kill in range(20):
        kind, delay = rng.choice(["running", "running", "saving", "starting"]), rng.random()
        process = start(small, resumed)
        wait_for_kill(process, resumed, kind, delay)
        status, err = send_signal(process, signal.SIGKILL)
        folders = sorted(p.name for p in resumed.glob("checkpoints/*"))
        print(kill, kind, f"{delay:.2f}", last_step(resumed), folders, flush=True)
        assert status == -signal.SIGKILL, err
        before, newest = newest, Checkpoints(resumed / "checkpoints").latest() or 0
        assert newest >= before
    for run in (reference, resumed):
        process = start(small, run)
        _, err = process.communicate()
        assert process.returncode == 0, err
    assert_same(reference, resumed, small)


# continued runs


def test_a_completed_run_is_left_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_train_steps_can_be_raised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a constant rate, as if requested from the start, except for the row of the first end."""
    small = config(tmp_path / "texts", "lanes", "text", "train.steps=6")
    more = override(small, ["train.steps=12"])
    reference, resumed = tmp_path / "once", tmp_path / "again"
    train(more, reference, quiet=True)
    train(small, resumed, quiet=True)
    capsys.readouterr()
    assert train(more, resumed, quiet=True).step == 12
    err = capsys.readouterr().err
    assert err.startswith("continues from step 6 of 12\n")
    assert "learning rate" not in err
    assert [row["step"] for row in rows(resumed)] == [4, 6, 8, 12]
    assert rows(resumed)[-1] == rows(reference)[-1]


@pytest.mark.long
def test_raising_train_steps_reports_the_new_schedule(
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


# runs that must not continue


def test_changed_documents_are_rejected(tmp_path: Path) -> None:
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


def test_a_checkpoint_of_another_config_is_rejected(tmp_path: Path) -> None:
    small = config(tmp_path / "texts", "lanes", "text", "train.steps=6")
    train(small, tmp_path / "run", quiet=True)
    (tmp_path / "run" / "config.json").unlink()
    other = replace(small, seed=1)
    with pytest.raises(UserError, match=r"checkpoints/000000006 holds .*\(seed: 0 -> 1\)"):
        train(other, tmp_path / "run", quiet=True)
