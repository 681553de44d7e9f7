"""Failure handling for several processes: if one fails, all end, each with a one-line message.

When a process is lost, the coordination service writes a dump to standard error and calls abort();
jaxlib has no hook for this that Python can use. So standard error is redirected to a pipe, which a
thread of this module reads. abort() is delayed by a few seconds, in which the thread prints one
line and ends the process. Everything else on the pipe is forwarded.

A process that fails by itself writes its message to the key-value store, and the other processes
end with this message.
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
# errors of a process that are not caused by the loss of another one
_OWN_ERROR = re.compile("INVALID_ARGUMENT|RESOURCE_EXHAUSTED|UNIMPLEMENTED|OUT_OF_RANGE")
# seconds that process 0, in which the service runs, waits for the others to receive its message
_LINGER = 2.0
# milliseconds after which the wait for another process's failure begins anew
_WAIT_MILLISECONDS = 24 * 3600 * 1000


class FailureMonitor:
    """Reads this process's standard error, and ends the process when another is lost.

    Args:
      process: this process.

    Attributes:
      saved: function that returns the step of the last checkpoint, or None.
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
        """Wait in a thread for a failure of any process, and end with its line.

        Call this when all processes are connected.
        """
        _start(self._await_failure)

    def close(self) -> None:
        sys.stderr.flush()
        os.dup2(self._stderr, 2)
        sys.stderr = self._python

    def fail(self, line: str, status: int) -> None:
        """End this process and all others with this line and exit status."""
        with contextlib.suppress(Exception):  # another process was first, or process 0 is lost
            named = f"{self._process.name(self._process.index)} stopped: {line}"
            collective.client().key_value_set(_FAILED, f"{status} {named}")
        self._end(line, status)

    def _await_failure(self) -> None:
        while True:
            try:
                message = collective.client().blocking_key_value_get(_FAILED, _WAIT_MILLISECONDS)
            except Exception as error:
                if "DEADLINE_EXCEEDED" in str(error):
                    continue
                return  # the wait is cancelled at the end of the run
            status, _, line = message.partition(" ")
            self._end(line, int(status))

    def _end(self, line: str, status: int) -> None:
        self._end_lock.acquire()  # never released, so that only one line is written
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
        """Return a one-line message for a dump of the service."""
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
    """Set the function that returns the last checkpoint's step, for messages of lost processes."""
    if _monitor is not None:
        _monitor.saved = saved


@contextlib.contextmanager
def all_or_nothing(process: ProcessInfo | None) -> Iterator[None]:
    """Run the body in all processes or in none: if one process fails, all end.

    Args:
      process: this process; None if it is the only one.
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
        if process.index:  # process 0 reports the stop
            raise SystemExit(EXIT_SIGNAL + stop.signal) from None
        raise
    except UserError as error:
        monitor.fail(str(error), EXIT_USER_ERROR)
    except KeyboardInterrupt:
        monitor.fail("interrupted", EXIT_SIGNAL + signal.SIGINT)
    except BaseException as error:
        # in most cases an error of a collective, because another process is lost
        if isinstance(error, jax.errors.JaxRuntimeError) and not _OWN_ERROR.match(str(error)):
            time.sleep(1.5 * collective.HEARTBEAT_TIMEOUT)  # the service detects the lost one
        traceback.print_exc()
        monitor.fail(f"{type(error).__name__}: {error}", EXIT_FAILED)
    finally:
        jax.distributed.shutdown()
        monitor.close()
        _monitor = None


def _start(target: Callable[..., None], *args: object) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()


def _delay_abort() -> None:
    """Delay abort() by six seconds: sleep() handles SIGABRT, and gets the signal's number, 6."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
