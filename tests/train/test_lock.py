"""Only one process trains in a run folder, and a lock never outlives its process."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from famjax.core.errors import UserError
from famjax.train import lock

# does not import JAX, so that it starts quickly
HOLDS = """
import sys, time
from pathlib import Path
from famjax.train.lock import hold
with hold(Path(sys.argv[1]), print):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@contextlib.contextmanager
def holder_process(folder: Path, seconds: float = 60) -> Iterator[subprocess.Popen[str]]:
    """Hold the lock of a folder in another process for some seconds."""
    argv = [sys.executable, "-c", HOLDS, str(folder), str(seconds)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def hold(folder: Path, notes: list[str] | None = None) -> None:
    with lock.hold(folder, pytest.fail if notes is None else notes.append):
        assert json.loads((folder / lock.LOCK).read_text())["pid"] == os.getpid()


def test_a_second_training_is_rejected(tmp_path: Path) -> None:
    with holder_process(tmp_path / "run") as process:
        with pytest.raises(UserError) as refused:
            hold(tmp_path / "run")
        line = str(refused.value)
        assert line.startswith(f"{tmp_path / 'run'}: process {process.pid} on ")
        assert " is training there (user " in line
        assert ", since 20" in line
        assert f": -c {tmp_path / 'run'} 60); wait for its end, stop it, or give --run" in line
        assert (tmp_path / "run" / lock.LOCK).exists()


def test_a_killed_process_releases_the_lock(tmp_path: Path) -> None:
    with holder_process(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / lock.LOCK).exists()
        hold(tmp_path)
    assert os.listdir(tmp_path) == []


def test_a_process_that_has_ended_holds_no_lock_before_its_parent_knows(tmp_path: Path) -> None:
    with holder_process(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        # waits for its end, and leaves it a zombie
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{process.pid}/stat").exists()
        hold(tmp_path)


def check_one_holds(
    folder: Path, count: int, report: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start threads at once: one has to hold the lock, and all others have to give up."""
    # a thread stands for a process: `hold` tells processes apart by what they write into the file
    describe = lock._describe_self
    monkeypatch.setattr(
        lock, "_describe_self", lambda: describe() | {"user": threading.current_thread().name}
    )
    ready, done, held = threading.Barrier(count), threading.Event(), []

    def acquire() -> None:
        ready.wait()
        with contextlib.suppress(UserError), lock.hold(folder, report):
            held.append(1)
            done.wait(60)

    threads = [threading.Thread(target=acquire) for _ in range(count)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 30
    while time.monotonic() < end and len(held) < 2:
        if held and sum(thread.is_alive() for thread in threads) == 1:
            break
        time.sleep(0.05)
    found = len(held)
    done.set()
    for thread in threads:
        thread.join()
    assert found == len(held) == 1
    assert os.listdir(folder) == []


@pytest.mark.long
def test_one_of_many_simultaneous_starts_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_one_holds(tmp_path / "run", 6, pytest.fail, monkeypatch)


def test_an_exception_releases_the_lock(tmp_path: Path) -> None:
    def interrupted() -> None:
        with lock.hold(tmp_path, pytest.fail) as new:
            assert not new
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    hold(tmp_path)


def test_a_missing_folder_is_created(tmp_path: Path) -> None:
    with lock.hold(tmp_path / "a" / "b", pytest.fail) as new:
        assert new


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_file_locks_the_lock_file_decides(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without file locks, the process named in the file decides."""

    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    with holder_process(tmp_path) as process:
        with pytest.raises(UserError, match=f"process {process.pid} on"):
            hold(tmp_path)
        process.kill()
        process.wait()
        hold(tmp_path)


def write_remote_holder(folder: Path, **fields: Any) -> Path:
    """Write the lock file of a process on another host."""
    about = lock._describe_self() | {
        "host": "far",
        "machine": "another",
        "pid": 7,
        "beat": time.time(),
    }
    path = folder / lock.LOCK
    path.write_text(json.dumps(about | fields))
    return path


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(lock, "SILENCE_SECONDS", 0.6)
    monkeypatch.setattr(lock, "NAME_SECONDS", 0.2)


@pytest.mark.usefixtures("short_timeouts")
def test_a_silent_remote_holder_is_replaced(tmp_path: Path) -> None:
    write_remote_holder(tmp_path)
    notes: list[str] = []
    hold(tmp_path, notes)
    (line,) = notes
    assert line.startswith(f"process 7 on far was training in {tmp_path}; waiting for up to ")


@pytest.mark.usefixtures("short_timeouts")
def test_a_remote_holder_with_heartbeats_is_respected(tmp_path: Path) -> None:
    """The other host's clock is two minutes late."""
    late = time.time() - 120
    path = write_remote_holder(tmp_path, beat=late)
    timer = threading.Timer(0.2, lambda: write_remote_holder(tmp_path, beat=late + 20))
    timer.start()
    notes: list[str] = []
    with pytest.raises(UserError, match="process 7 on far is training there"):
        hold(tmp_path, notes)
    timer.join()
    assert path.exists()


def test_an_old_remote_holder_is_replaced_without_waiting(tmp_path: Path) -> None:
    write_remote_holder(tmp_path, beat=time.time() - lock.CLOCK_SKEW_SECONDS - 1)
    hold(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"beat": 1}', '{"beat": "x", "pid": 1}'])
def test_an_invalid_lock_file_is_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / lock.LOCK).write_text(content)
    hold(tmp_path)


@pytest.mark.parametrize(
    "about",
    [{"command": 5}, {"command": ["a"] * 500}, {"pid": "1\0"}, {"pid": [1]}, {"beat": 10**400}],
)
def test_a_lock_file_with_wrong_types_is_replaced(tmp_path: Path, about: dict[str, Any]) -> None:
    content = lock._describe_self() | {"machine": "other", "beat": time.time()} | about
    (tmp_path / lock.LOCK).write_text(json.dumps(content))
    hold(tmp_path)
    (tmp_path / lock.LOCK).write_text(json.dumps(content | {"machine": lock._machine_id()}))
    hold(tmp_path)


def test_a_lock_that_is_not_a_regular_file_is_rejected(tmp_path: Path) -> None:
    """Opening a pipe would block, and writing through a link would overwrite its target."""
    path, mine = tmp_path / lock.LOCK, tmp_path / "mine.txt"
    mine.write_text("mine")
    for make in (
        lambda: os.mkfifo(path),
        lambda: path.mkdir(),
        lambda: path.symlink_to(mine),
        lambda: path.symlink_to(path),
    ):
        make()
        with pytest.raises(UserError, match=r"train\.lock: not a regular file.*; remove it"):
            hold(tmp_path)
        path.rmdir() if path.is_dir() else path.unlink()
    assert mine.read_text() == "mine"


def test_a_reused_process_id_does_not_hold_the_lock(tmp_path: Path) -> None:
    about = lock._describe_self() | {"pid": os.getpid(), "began": "1", "beat": time.time()}
    (tmp_path / lock.LOCK).write_text(json.dumps(about))
    hold(tmp_path)


def test_the_holder_writes_heartbeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.05)
    with lock.hold(tmp_path, pytest.fail):
        first = lock._read_holder(tmp_path / lock.LOCK)["beat"]
        time.sleep(0.3)
        assert lock._read_holder(tmp_path / lock.LOCK)["beat"] > first


@contextlib.contextmanager
def hold_file_lock(path: Path) -> Iterator[None]:
    """Lock a file as a process on another machine, or a server on its behalf, would."""
    with path.open() as file:
        lock.fcntl.flock(file, lock.fcntl.LOCK_EX)
        yield


@pytest.mark.usefixtures("short_timeouts")
def test_a_lock_of_a_dead_host_is_replaced_after_silence(tmp_path: Path) -> None:
    """NFSv4 frees the lock when its lease expires, NFSv3 never does."""
    path = write_remote_holder(tmp_path)
    old = path.read_text()
    notes: list[str] = []
    with path.open() as file, hold_file_lock(path):
        start = time.monotonic()
        with lock.hold(tmp_path, notes.append):
            assert time.monotonic() - start >= lock.SILENCE_SECONDS
            assert lock._read_holder(path)["pid"] == os.getpid()
            time.sleep(3 * lock.HEARTBEAT_SECONDS)
            assert file.read() == old  # nothing is written to the old file
        assert os.listdir(tmp_path) == []
    (line,) = notes
    assert line.startswith(f"process 7 on far was training in {tmp_path}; waiting for up to ")


@pytest.mark.usefixtures("short_timeouts")
def test_a_lock_released_during_the_wait_is_acquired(tmp_path: Path) -> None:
    """The wait is counted from the first check."""
    path = write_remote_holder(tmp_path)
    notes: list[str] = []
    freed, taken = threading.Event(), threading.Event()

    def server() -> None:
        with hold_file_lock(path):
            taken.set()
            freed.wait(0.3)

    thread = threading.Thread(target=server)
    thread.start()
    taken.wait()
    inode, start = path.stat().st_ino, time.monotonic()
    with lock.hold(tmp_path, notes.append):
        assert lock.SILENCE_SECONDS <= time.monotonic() - start < lock.SILENCE_SECONDS + 0.25
        assert path.stat().st_ino == inode
    thread.join()
    assert len(notes) == 1


@pytest.mark.usefixtures("short_timeouts")
def test_a_heartbeat_of_a_locked_remote_holder_ends_the_wait(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(lock, "SILENCE_SECONDS", 60)
    path = write_remote_holder(tmp_path, beat=1.0)
    timer = threading.Timer(0.5, lambda: write_remote_holder(tmp_path, beat=2.0))
    timer.start()
    notes: list[str] = []
    with hold_file_lock(path):
        start = time.monotonic()
        with pytest.raises(UserError, match="process 7 on far is training there"):
            hold(tmp_path, notes)
        # the heartbeat ends the wait
        assert 0.4 < time.monotonic() - start < 10
    timer.join()
    assert len(notes) == 1
    assert path.exists()


@pytest.mark.usefixtures("short_timeouts")
def test_a_lock_is_acquired_when_its_remote_holder_ends(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(lock, "SILENCE_SECONDS", 60)
    path = write_remote_holder(tmp_path)
    timer = threading.Timer(0.3, path.unlink)
    timer.start()
    notes: list[str] = []
    with hold_file_lock(path):
        hold(tmp_path, notes)
    timer.join()
    assert len(notes) == 1


@pytest.mark.long
@pytest.mark.usefixtures("short_timeouts")
def test_one_of_many_that_wait_for_a_dead_host_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # all threads must see the silence within this time, also on a loaded machine
    monkeypatch.setattr(lock, "NAME_SECONDS", 2.0)
    with hold_file_lock(write_remote_holder(tmp_path)):
        check_one_holds(tmp_path, 5, lambda _: None, monkeypatch)


def test_a_replaced_holder_leaves_the_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new holder has made another file or, without locks, has overwritten the same one."""
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.05)
    path = tmp_path / lock.LOCK
    for other_file in (True, False):
        with lock.hold(tmp_path, pytest.fail):
            if other_file:
                path.unlink()
            new = write_remote_holder(tmp_path).read_text()
            time.sleep(0.3)
            assert path.read_text() == new
        assert path.read_text() == new
        path.unlink()


def test_an_io_error_is_not_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(lock.os, "pwrite", fail)
    with pytest.raises(OSError, match="Input/output error"):
        hold(tmp_path)


def test_removal_leaves_the_file_of_a_new_holder(tmp_path: Path) -> None:
    """Another process takes the lock after the last check of the dead holder's file."""
    path = write_remote_holder(tmp_path)
    dead = lock._read_holder(path)

    class Late(lock._SilenceWatch):
        def is_over(self, holder_process: lock.Holder) -> bool:
            assert holder_process == dead
            path.unlink()
            write_remote_holder(tmp_path, pid=8)
            return True

    assert not lock._try_remove(path, Late(path, pytest.fail), end=0.0)
    assert lock._read_holder(path)["pid"] == 8
    assert os.listdir(tmp_path) == [lock.LOCK]
