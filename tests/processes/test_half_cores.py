"""Work shared by two processes, and work in a process of its own."""

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from famjax.core.errors import StopRequested, UserError
from famjax.processes import runtime
from famjax.processes.half_cores import run_in_halves, run_in_process


def write(folder: Path, fails: bool, name: str, quiet: bool) -> None:
    """Write a file; the first process waits until the other one has begun."""
    if quiet:
        (folder / "other").touch()
        if fails:
            raise ValueError("this one fails")
    deadline = time.monotonic() + 120
    while not (folder / "other").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (folder / name).write_text(f"{os.getpid()} {quiet}")


def leave(status: int) -> int:
    return status


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, also where the tests may use a single core."""
    monkeypatch.setattr(runtime, "count_cores", lambda: 2)


@pytest.mark.usefixtures("two_cores")
def test_every_item_is_done_once_by_two_processes(tmp_path: Path) -> None:
    names = [f"item{i}" for i in range(20)]
    cores = os.sched_getaffinity(0)
    run_in_halves(functools.partial(write, tmp_path, False), names, tmp_path / "log", Console())
    assert os.sched_getaffinity(0) == cores
    assert {path.name for path in tmp_path.iterdir()} == {*names, "log", "other"}
    quiet = {name: (tmp_path / name).read_text().split() for name in names}
    assert {flag for _, flag in quiet.values()} == {"True", "False"}
    for process, flag in quiet.values():
        assert (int(process) == os.getpid()) == (flag == "False")


def test_a_single_core_has_one_process(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    done: list[tuple[str, bool]] = []
    os.sched_setaffinity(0, {min(cores)})
    try:
        run_in_halves(lambda *call: done.append(call), ["one", "two"], tmp_path / "log", Console())
    finally:
        os.sched_setaffinity(0, cores)
    assert done == [("one", False), ("two", False)]


def test_an_accelerator_has_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "DEVICES", tmp_path)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    (tmp_path / "nvidiactl").touch()
    assert not runtime.has_accelerator()
    (tmp_path / "accel3").touch()
    assert runtime.has_accelerator()
    done: list[tuple[str, bool]] = []
    run_in_halves(lambda *call: done.append(call), ["one", "two"], tmp_path / "log", Console())
    assert done == [("one", False), ("two", False)]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert not runtime.has_accelerator()


@pytest.mark.usefixtures("two_cores")
def test_the_other_process_fails(tmp_path: Path) -> None:
    work, log = functools.partial(write, tmp_path, True), tmp_path / "log"
    with pytest.raises(UserError, match=f"failed; see {log}"):
        run_in_halves(work, ["one", "two"], log, Console())
    assert "this one fails" in log.read_text()


def work_until_stopped(folder: Path, name: str, quiet: bool) -> None:
    """As a training that takes time to save: write a file some time after the first SIGTERM."""
    stopped: list[int] = []

    def stop(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process
        stopped.append(number)

    signal.signal(signal.SIGTERM, stop)
    (folder / f"{name} began").touch()
    wait_for(lambda: len(stopped))
    if quiet:
        time.sleep(1)
        (folder / "saved").touch()
    raise StopRequested(signal.SIGTERM, 0)


def fail_beside_a_training(folder: Path, name: str, quiet: bool) -> None:
    """Fail in the first process, as soon as the other one has begun."""
    if quiet:
        work_until_stopped(folder, "other", quiet)
    wait_for(lambda: (folder / "other began").exists())
    raise UserError("the disk is full")


@pytest.mark.usefixtures("two_cores")
def test_the_other_process_saves_if_this_one_fails(tmp_path: Path) -> None:
    work = functools.partial(fail_beside_a_training, tmp_path)
    with pytest.raises(UserError, match="the disk is full"):
        run_in_halves(work, ["one", "two"], tmp_path / "log", Console())
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("to_group", [False, True])
def test_both_processes_save_when_stopped(tmp_path: Path, to_group: bool) -> None:
    """The other process receives one signal, whether this process or its group is stopped."""
    code = """
import functools, pathlib, sys
from rich.console import Console
from famjax.core.errors import StopRequested
from famjax.processes import runtime
from famjax.processes.half_cores import run_in_halves
from tests.processes.test_half_cores import work_until_stopped

runtime.count_cores = lambda: 2
folder = pathlib.Path(sys.argv[1])
try:
    run_in_halves(
        functools.partial(work_until_stopped, folder), ["a", "b"], folder / "log", Console()
    )
except StopRequested:
    sys.exit(7)
"""
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], start_new_session=True)
    try:
        wait_for(lambda: len(list(tmp_path.glob("* began"))) == 2)
        (os.killpg if to_group else os.kill)(parent.pid, signal.SIGTERM)
        assert parent.wait(60) == 7
        assert (tmp_path / "saved").exists()
    finally:
        parent.kill()


def test_a_process_ends_with_the_one_that_started_it() -> None:
    code = "from famjax.processes.half_cores import *; import time; run_in_process(time.sleep, 99)"
    parent = subprocess.Popen([sys.executable, "-c", code])
    child = wait_for(lambda: worker_of(parent.pid))
    parent.kill()
    parent.wait()
    wait_for(lambda: not is_running(child))


def worker_of(pid: int) -> int:
    """Return the process that `multiprocessing` started for another one; 0 before that."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text():
            return int(child)
    return 0


def is_running(pid: int) -> bool:
    """Return whether a process is there, and no zombie that nobody waits for."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for(condition: Callable[[], int]) -> int:
    deadline = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def test_a_process_of_its_own_returns_its_status() -> None:
    run_in_process(leave, 0)
    with pytest.raises(SystemExit) as stop:
        run_in_process(leave, 3)
    assert stop.value.code == 3
