"""How one of several processes ends when another is gone: in one line, on each of them.

The coordination service tells of a process that is gone by a dump on standard error and abort();
jaxlib offers no hook for it that Python can take. So standard error is a pipe that is read here.
abort() waits a few seconds, and in these the reader says its line and ends the process. Everything
else on the pipe goes on to where it was meant to go.

A process that fails by itself says so in the key-value store, and the others end with its line.
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

from famjax.core import processes
from famjax.core.errors import StopRequested, UserError
from famjax.core.gloo_messages import uses_gloo, without_gloo
from famjax.core.processes import ProcessInfo

# of a process that ends because another is gone: sysexits' "try again later"
GONE = 75
_FAILED = "famjax/failed"
_HEADER = re.compile(r"[IWEF]\d{4} [\d:.]+ +\d+ (\S+):\d+\] ")
_COORDINATION = ("coordination_service", "preemption_", "client.h")
_DUMP = "JAX distributed service detected fatal errors"
# what a process does wrong by itself
_OWN = re.compile("INVALID_ARGUMENT|RESOURCE_EXHAUSTED|UNIMPLEMENTED|OUT_OF_RANGE")
# the service lives in process 0: seconds for the others to hear why it goes
_LINGER = 2.0


class FailureMonitor:
    """Reads this process's standard error, and ends it when another is gone.

    Args:
      place: of this process.

    Attributes:
      saved: tells the step of the last checkpoint.
    """

    def __init__(self, place: ProcessInfo):
        self._place = place
        self.saved: Callable[[], int | None] = lambda: None
        self._speaking = threading.Lock()
        self._screen = os.dup(2)
        self._python = sys.stderr
        sys.stderr = os.fdopen(self._screen, "w", buffering=1, closefd=False)
        read, write = os.pipe()
        os.dup2(write, 2)
        os.close(write)
        _delay_abort()
        _start(self._read, os.fdopen(read, "rb"))

    def listen(self) -> None:
        """End with the line of whichever process fails; from when all are there."""
        _start(self._hear)

    def close(self) -> None:
        sys.stderr.flush()
        os.dup2(self._screen, 2)
        sys.stderr = self._python

    def fail(self, line: str, status: int) -> None:
        """End this process and all others with a line and an exit status."""
        with contextlib.suppress(Exception):  # another was first, or process 0 is gone
            named = f"{self._place.name(self._place.index)} stopped: {line}"
            processes.client().key_value_set(_FAILED, f"{status} {named}")
        self._end(line, status)

    def _hear(self) -> None:
        with contextlib.suppress(Exception):  # at the end of the run
            said = processes.client().blocking_key_value_get(_FAILED, 7 * 24 * 3600 * 1000)
            status, _, line = said.partition(" ")
            self._end(line, int(status))

    def _end(self, line: str, status: int) -> None:
        self._speaking.acquire()  # for good: one line
        sys.stderr.write(f"famjax: {' '.join(line.split())}\n")
        sys.stderr.flush()
        if self._place.index == 0:
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
                self._end(self._verdict(dump), GONE)
            if not hidden:
                os.write(self._screen, data)

    def _verdict(self, dump: str) -> str:
        """Return in one line what the service's dump says."""
        place, status = self._place, dump.partition("absl::Status: ")[2]
        named = re.search(r"(?:timed out task names|sending heartbeats\)):\s*((?:.*\d+\n)+)", dump)
        missing = sorted({int(i) for i in re.findall(r"(\d+)$", named[1], re.M)} if named else {})
        who = "processes" if len(missing) > 1 else "process"
        who = f"{who} {', '.join(map(str, missing))} of {place.count}"
        if "RegisterTask" in dump or "to_register" in dump:
            if missing:
                return (
                    f"{who} did not come to {place.coordinator} within {processes.PATIENCE} "
                    "seconds; look into what was said there, and start all again"
                )
            if "DEADLINE_EXCEEDED" in status:
                return (
                    f"nobody answers at {place.coordinator}: process 0 is not there, or cannot be "
                    f"reached from {place.name(place.index)}; check --coordinator and firewalls"
                )
            return (
                f"{place.name(place.index)} is not let in at {place.coordinator}: "
                f"{status.splitlines()[0]}; start each process once, with the same --process-count"
            )
        if not missing and "UNAVAILABLE" not in status:
            return f"the processes lost each other: {status.splitlines()[0]}; {self._hint()}"
        return f"{who if missing else place.name(0)} is gone; {self._hint()}".replace(
            "is gone", "are gone" if len(missing) > 1 else "is gone"
        )

    def _hint(self) -> str:
        last = self.saved()
        where = "begins anew, as nothing was saved" if last is None else f"goes on from step {last}"
        return f"run the same command again on all and it {where}"


_watch: FailureMonitor | None = None


def set_last_step(saved: Callable[[], int | None]) -> None:
    """Let the line about a process that is gone name the last checkpoint's step."""
    if _watch is not None:
        _watch.saved = saved


@contextlib.contextmanager
def all_or_nothing(place: ProcessInfo | None) -> Iterator[None]:
    """Do what is inside in all processes, or in none: if one ends, all do.

    Args:
      place: of this process; None if it is alone.
    """
    if place is None:
        yield
        return
    with without_gloo() if uses_gloo() else contextlib.nullcontext(), _monitored(place):
        yield


@contextlib.contextmanager
def _monitored(place: ProcessInfo) -> Iterator[None]:
    global _watch
    import jax

    _watch = watch = FailureMonitor(place)
    processes.join(place)
    watch.listen()
    try:
        yield
    except StopRequested as stop:
        if place.index:  # process 0 tells
            raise SystemExit(128 + stop.signal) from None
        raise
    except UserError as error:
        watch.fail(str(error), 2)
    except KeyboardInterrupt:
        watch.fail("interrupted", 128 + signal.SIGINT)
    except BaseException as error:
        # what a collective raises when another process is gone, mostly
        if isinstance(error, jax.errors.JaxRuntimeError) and not _OWN.match(str(error)):
            time.sleep(1.5 * processes.HEARTBEAT)  # the service finds out who
        traceback.print_exc()
        watch.fail(f"{type(error).__name__}: {error}", 1)
    finally:
        jax.distributed.shutdown()
        watch.close()
        _watch = None


def _start(target: Callable[..., None], *args: object) -> None:
    threading.Thread(target=target, args=args, daemon=True).start()


def _delay_abort() -> None:
    """Let abort() wait for six seconds, the number of its signal, which sleep() is called with."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
