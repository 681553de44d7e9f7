"""Processes on this machine that train together, with fake CPU devices and gloo."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# `famjax`, with heartbeats that detect a lost process after seconds instead of a minute
FAMJAX = """
import sys
from famjax.processes import collective
collective.HEARTBEAT_TIMEOUT, collective.INIT_TIMEOUT = {heartbeat}, {patience}
{more}
from famjax.cli.main import main
sys.exit(main())
"""

# Imports are half of the time of a short training, so this program imports once and is forked for
# each process, before JAX has devices or threads. A process in between waits for the exit status.
TEMPLATE = """
import gc, json, os, pathlib, signal, sys, threading
import famjax.cli.main, famjax.cli.train, famjax.train.loop
assert threading.active_count() == 1  # a fork has the calling thread alone
gc.set_threshold(200_000, 20, 100)
gc.freeze()
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    given = json.loads(line)
    folder = pathlib.Path(given["folder"])
    waiter = os.fork()
    if waiter:
        print(waiter, flush=True)
        continue
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, name, mode in ((0, os.devnull, "r"), (1, folder / "out", "w"),
                               (2, folder / "err", "w")):
        with open(name, mode) as file:
            os.dup2(file.fileno(), number)
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (folder / "status.new").write_text(str(status))
        os.rename(folder / "status.new", folder / "status")
        os._exit(0)
    os.environ.clear()
    os.environ.update(given["env"])
    sys.argv = ["-c", *given["arguments"]]
    exec(given["code"], {"__name__": "__main__"})
"""


@functools.cache
def template() -> subprocess.Popen[str]:
    """Return the process to fork; it ends when its standard input is closed."""
    return subprocess.Popen(
        [sys.executable, "-c", TEMPLATE],
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


class Process:
    """A forked process that runs a program, with an interface like `subprocess.Popen`."""

    def __init__(self, code: str, arguments: Sequence[str], env: dict[str, str]):
        self._files = tempfile.TemporaryDirectory(prefix="famjax-tests-")
        self._folder = Path(self._files.name)
        given: dict[str, Any] = {"code": code, "arguments": arguments, "env": env}
        requests, answers = template().stdin, template().stdout
        assert requests is not None
        assert answers is not None
        print(json.dumps(given | {"folder": str(self._folder)}), file=requests, flush=True)
        self._group = int(answers.readline())

    @property
    def returncode(self) -> int | None:
        status = self._folder / "status"
        return int(status.read_text()) if status.exists() else None

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for the process, and return its standard output and standard error."""
        end = time.monotonic() + timeout
        while self.returncode is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("famjax", timeout)
            time.sleep(0.02)
        return (self._folder / "out").read_text(), (self._folder / "err").read_text()

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def flags(index: int, count: int, port: int) -> list[str]:
    address = f"127.0.0.1:{port}"
    return [f"--coordinator={address}", f"--process-id={index}", f"--process-count={count}"]


def start(
    arguments: Sequence[str],
    devices: int = 1,
    heartbeat: int = 10,
    patience: int = 120,
    more: str = "",
) -> Process:
    """Run `famjax train` with this many devices in another process, after the code `more`."""
    kept = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
    count = f"--xla_force_host_platform_device_count={devices}"
    code = FAMJAX.format(heartbeat=heartbeat, patience=patience, more=more)
    return Process(code, ["train", *arguments], os.environ | {"XLA_FLAGS": f"{kept} {count}"})


def start_all(
    config: Path,
    run: Path,
    count: int,
    devices: int,
    *overrides: str,
    more: dict[int, str] | None = None,
    **named: int,
) -> list[Process]:
    """Start `count` processes that train one run; `more` is code that some of them run first."""
    port = free_port()
    where = [flags(i, count, port) if count > 1 else [] for i in range(count)]
    arguments = [str(config), f"--run={run}", *overrides]
    before = [(more or {}).get(i, "") for i in range(count)]
    return [
        start([*arguments, *w], devices, more=code, **named)
        for w, code in zip(where, before, strict=True)
    ]


def wait_all(processes: Sequence[Process]) -> list[tuple[int, str]]:
    """Wait for all, check that standard output is empty; return statuses and standard errors."""
    try:
        said = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [out for out, _ in said] == [""] * len(said), said  # pytest rewrites tests' asserts only
    errors = [error for _, error in said]
    statuses = [process.returncode for process in processes]
    return [(-1 if s is None else s, error) for s, error in zip(statuses, errors, strict=True)]


def train_in_processes(
    config: Path, run: Path, count: int, devices: int, *overrides: str
) -> list[tuple[int, str]]:
    """Train with this many processes and devices each; check that all exit with status 0."""
    done = wait_all(start_all(config, run, count, devices, *overrides))
    assert [status for status, _ in done] == [0] * count, done
    return done
