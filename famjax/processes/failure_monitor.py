"""Failure handling for several processes: if one ends, all end, each with one line.

The coordination service reports a lost process by a dump on standard error and abort(); jaxlib has
no hook for it that Python can use. So standard error is redirected to a pipe that a thread reads
here. abort() is delayed by a few seconds, in which the thread prints one line and ends the process.
Everything else on the pipe is forwarded.

A process that fails by itself writes its line to the key-value store, and the others end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import BinaryIO

from famjax.core.errors import (
    EXIT_FAILED,
    EXIT_PEER_LOST,
    EXIT_SIGNAL,
    EXIT_USER_ERROR,
    StopRequested,
    UserError,
)
from famjax.processes import collective
from famjax.processes.collective import ProcessInfo
from famjax.processes.gloo_messages import filter_on_cpu

_FAILED = "famjax/failed"
_HEADER = re.compile(r"[IWEF]\d{4} [\d:.]+ +\d+ (\S+):\d+\] ")
_COORDINATION = ("coordination_service", "preemption_", "client.h")
_DUMP = "JAX distributed service detected fatal errors"
# errors that a process causes by itself
_OWN_ERROR = re.compile("INVALID_ARGUMENT|RESOURCE_EXHAUSTED|UNIMPLEMENTED|OUT_OF_RANGE")
# the service runs in process 0: seconds for the others to receive its reason
_LINGER = 2.0


class FailureMonitor:
    """Reads this process's standard error, and ends the process when another is lost.

    Args:
      process: info of this process.

    Attributes:
      saved: returns the step of the last checkpoint.
    """

    def __init__(self, process: ProcessInfo):
        self._process = process
        self.saved: Callable[[], int | None] = lambda: None
        self._end_lock = threading.Lock()
        self._stderr = os.dup(2)
        self._python = sys.stderr
        sys.stderr = os.fdopen(self._stderr, "w", buffering=1, closefd=False)
        read, write = os.pipe()
        os.dup2(write, 2)
        os.close(write)
        _delay_abort()
        _start(self._read, os.fdopen(read, "rb"))

    def listen(self) -> None:
        """End with the line of the first process that fails; call it once all are connected."""
        _start(self._await_failure)

    def close(self) -> None:
        sys.stderr.flush()
        os.dup2(self._stderr, 2)
        sys.stderr = self._python

    def fail(self, line: str, status: int) -> None:
        """End this process and all others with a line and an exit status."""
        with contextlib.suppress(Exception):  # another was first, or process 0 is lost
            named = f"{self._process.name(self._process.index)} stopped: {line}"
            collective.client().key_value_set(_FAILED, f"{status} {named}")
        self._end(line, status)

    def _await_failure(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the run
            message = collective.client().blocking_key_value_get(_FAILED, 7 * 24 * 3600 * 1000)
            status, _, line = message.partition(" ")
            self._end(line, int(status))

    def _end(self, line: str, status: int) -> None:
        self._end_lock.acquire()  # for good: one line
        sys.stderr.write(f"famjax: {' '.join(line.split())}\n")
        sys.stderr.flush()
        if self._process.index == 0:
            time.sleep(_LINGER)
        os._exit(status)

    def _read(self, stream: BinaryIO) -> None:
        hidden, dump = False, ""
        for data in stream:
            line = data.decode(errors="replace")
            if header := _HEADER.match(line):
                hidden = any(name in header[1] for name in _COORDINATION)
            if _DUMP in line or dump:
                dump += line
            if dump and "stack trace" in line:
                self._end(self._diagnose(dump), EXIT_PEER_LOST)
            if not hidden:
                os.write(self._stderr, data)

    def _diagnose(self, dump: str) -> str:
        """Return one line for the service's dump."""
        process, status = self._process, dump.partition("absl::Status: ")[2]
        named = re.search(r"(?:timed out task names|sending heartbeats\)):\s*((?:.*\d+\n)+)", dump)
        missing = sorted({int(i) for i in re.findall(r"(\d+)$", named[1], re.M)} if named else {})
        who = "processes" if len(missing) > 1 else "process"
        who = f"{who} {', '.join(map(str, missing))} of {process.count}"
        if "RegisterTask" in dump or "to_register" in dump:
            if missing:
                return (
                    f"{who} did not connect to {process.coordinator} within "
                    f"{collective.INIT_TIMEOUT} seconds; check their output, and start all "
                    "processes again"
                )
            if "DEADLINE_EXCEEDED" in status:
                return (
                    f"no answer at {process.coordinator}: process 0 is not running, or cannot be "
                    f"reached from {process.name(process.index)}; check --coordinator and firewalls"
                )
            return (
                f"{process.name(process.index)} is refused at {process.coordinator}: "
                f"{status.splitlines()[0]}; start each process once, with the same --process-count"
            )
        if not missing and "UNAVAILABLE" not in status:
            return f"the processes lost contact: {status.splitlines()[0]}; {self._hint()}"
        lost = "are lost" if len(missing) > 1 else "is lost"
        return f"{who if missing else process.name(0)} {lost}; {self._hint()}"

    def _hint(self) -> str:
        last = self.saved()
        effect = "restarts: nothing was saved" if last is None else f"continues from step {last}"
        return f"run the same command again on all and it {effect}"


_monitor: FailureMonitor | None = None


def set_last_step(saved: Callable[[], int | None]) -> None:
    """Set the function that gives the last checkpoint's step for the line about a lost process."""
    if _monitor is not None:
        _monitor.saved = saved


@contextlib.contextmanager
def all_or_nothing(process: ProcessInfo | None) -> Iterator[None]:
    """Run the body in all processes or in none: if one ends, all end.

    Args:
      process: info of this process; None if it is the only one.
    """
    if process is None:
        yield
        return
    with filter_on_cpu(), _run_monitored(process):
        yield


@contextlib.contextmanager
def _run_monitored(process: ProcessInfo) -> Iterator[None]:
    global _monitor
    import jax

    _monitor = monitor = FailureMonitor(process)
    collective.initialize(process)
    monitor.listen()
    try:
        yield
    except StopRequested as stop:
        if process.index:  # process 0 reports it
            raise SystemExit(EXIT_SIGNAL + stop.signal) from None
        raise
    except UserError as error:
        monitor.fail(str(error), EXIT_USER_ERROR)
    except KeyboardInterrupt:
        monitor.fail("interrupted", EXIT_SIGNAL + signal.SIGINT)
    except BaseException as error:
        # mostly what a collective raises when another process is lost
        if isinstance(error, jax.errors.JaxRuntimeError) and not _OWN_ERROR.match(str(error)):
            time.sleep(1.5 * collective.HEARTBEAT_TIMEOUT)  # the service detects which one
        traceback.print_exc()
        monitor.fail(f"{type(error).__name__}: {error}", EXIT_FAILED)
    finally:
        jax.distributed.shutdown()
        monitor.close()
        _monitor = None


def _start(target: Callable[..., None], *args: object) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()


def _delay_abort() -> None:
    """Delay abort() by six seconds: SIGABRT's handler is sleep(), called with its number, 6."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
