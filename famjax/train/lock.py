"""One training at a time in a run folder: a lock that ends with its process, however that ends.

Process 0 of a training holds RUN/train.lock while it runs; readers (eval, generate, export) take no
lock. The file tells in JSON who holds it. Three signs say whether the holder still runs, and a
folder is taken over only if none of them does:

1. flock. The kernel frees it when the process is gone, by kill -9 too. It decides between two that
   start together. NFS and Lustre share it between hosts; after a host died they free it late
   (NFSv4: when its lease has expired, 90 seconds by default) or, as NFSv3, never. On a bucket
   (gcsfuse) each host has locks of its own, and some file systems have none; there only the file
   counts.
2. The process in the file, if it ran on this machine, since this machine was started, and in this
   container: it is looked up by its number and the time at which it began, so a number that was
   given to another process is no obstacle.
3. The beat. A process on another machine cannot be looked up, so the file is watched: its holder
   writes it every HEARTBEAT_SECONDS seconds. A file that changes is refused at once. One that does not change
   for SILENCE_SECONDS seconds has no holder, even if it is still locked: it is removed, and a new one is
   made. If nobody has locked it, and its last beat is more than CLOCK_SKEW_SECONDS old, nothing is waited for;
   clocks of hosts are not trusted to agree any better.

So a training that was preempted and starts again on another host waits at most SILENCE_SECONDS seconds for
the one that was killed, and not at all if that one stopped by SIGTERM (it then removed the file).

Before each beat, and before it removes the file at its end, a holder checks that the file still
names it, so it does not touch the file of a training that has replaced it.

Not prevented: two trainings that start on two hosts within a few seconds of each other in a folder
on a bucket, where no lock reaches from host to host; and a holder that could not write for SILENCE_SECONDS
seconds, such as a suspended machine, was replaced, and resumes: it does not notice.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import getpass
import json
import os
import shlex
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from famjax.core import processes
from famjax.core.errors import UserError
from famjax.core.json_files import parse_json

LOCK = "train.lock"

# Seconds between a holder's writes; after which a holder elsewhere that wrote nothing is gone: NFS
# may show a file as it was a minute ago. And by how much the clocks of two hosts may differ.
HEARTBEAT_SECONDS, SILENCE_SECONDS, CLOCK_SKEW_SECONDS = 20.0, 100.0, 600.0
# seconds for one that has just taken the lock to write its name into it
_NAME_SECONDS = 2.0
# of a lock file that are read
_MAX_BYTES = 1 << 20
# characters of a command that are shown
_MAX_COMMAND = 120

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

Holder = dict[str, Any]


def hold_for_all(folder: Path) -> AbstractContextManager[bool]:
    """Hold a run folder, in process 0 for all that train together; see `hold`."""
    if processes.index():
        return nullcontext(False)
    return hold(folder, lambda line: print(line, file=sys.stderr))


@contextmanager
def hold(folder: Path, report: Callable[[str], None]) -> Iterator[bool]:
    """Hold a run folder, which is made if it is missing; yield whether it was.

    Args:
      folder: RUN.
      report: is given one line if this has to wait.

    Raises:
      UserError: another process trains there, or the folder cannot be written.
    """
    path = folder / LOCK
    new, about = not folder.exists(), _describe_self()
    try:
        handle = _acquire(path, about, report)
    except OSError as error:
        if error.errno == errno.EIO:  # for a moment, on a network file system: not a mistake
            raise
        if error.errno == errno.ELOOP or path.is_dir():
            raise _not_a_file(path) from None
        if new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise _cannot_write(folder, error) from None
    stopped = threading.Event()
    args = (handle, path, about, stopped)
    beat = threading.Thread(target=_write_heartbeats, args=args, daemon=True, name=LOCK)
    beat.start()
    try:
        yield new
    finally:
        stopped.set()
        beat.join()
        # before it is unlocked: others that have opened it see that it was removed, and try again
        with contextlib.suppress(OSError):
            if _is_ours(handle, path, about):
                path.unlink(missing_ok=True)
        os.close(handle)


def _cannot_write(folder: Path, error: OSError) -> UserError:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return UserError(f"{folder}: {os.strerror(errno.ENOTDIR)}; give --run another folder")
    return UserError(
        f"cannot write the run folder {folder}: {error.strerror}; free some space, check its "
        "rights, or give --run another folder"
    )


def _not_a_file(path: Path) -> UserError:
    return UserError(f"{path}: not a regular file, as the lock of a training is; remove it")


def _acquire(path: Path, about: Holder, report: Callable[[str], None]) -> int:
    """Return the lock's open file, locked, that says `about`."""
    end = time.monotonic() + _NAME_SECONDS
    silence = _SilenceWatch(path, report)
    replaced = False
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        # a link could lead to a file of somebody's, which would be overwritten
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise _not_a_file(path)
            if not _is_locked_here(handle):
                replaced = _try_remove(path, silence, end)
            # some network file systems give a file another number whenever it is looked at
            elif (_is_same_file(handle, path) or time.monotonic() > end) and _is_free(
                path, silence
            ):
                _write_holder(handle, about)
                if not replaced or _survives(handle, path, about):
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _try_remove(path: Path, silence: _SilenceWatch, end: float) -> bool:
    """Remove a locked file whose holder, on another machine, is silent; else wait a moment.

    Args:
      end: when to give up on a file that does not name a holder.

    Returns:
      Whether it was removed.

    Raises:
      UserError: its holder runs.
    """
    holder = _read_holder(path)
    runs = _runs_here(holder)
    if runs:
        raise _held_error(path.parent, holder)
    if runs is None:
        if silence.is_over(holder):
            path.unlink(missing_ok=True)
            return True
        silence.wait()
        return False
    if time.monotonic() > end and path.exists():
        raise _held_error(path.parent, {})
    time.sleep(0.1)
    return False


def _is_free(path: Path, silence: _SilenceWatch) -> bool:
    """Return whether a file that is locked here can be taken; False if it was removed meanwhile.

    Raises:
      UserError: its holder runs, as far as that can be found out.
    """
    holder = _read_holder(path)
    runs = _runs_here(holder)
    if runs:
        raise _held_error(path.parent, holder)
    if runs is None and abs(time.time() - holder["beat"]) < CLOCK_SKEW_SECONDS:
        while not silence.is_over(_read_holder(path) or holder):
            silence.wait()
            if not path.exists():
                return False
    return True


def _survives(handle: int, path: Path, about: Holder) -> bool:
    """Return whether a new file is still there after a moment.

    Another process that has waited for the same holder may remove it, taking it for the old one.
    """
    time.sleep(_NAME_SECONDS)
    return _is_ours(handle, path, about)


class _SilenceWatch:
    """Watches the file of a holder on another machine, from the first look on.

    Args:
      path: of the file.
      report: is given one line at the first look.
    """

    def __init__(self, path: Path, report: Callable[[str], None]):
        self._path, self._report = path, report
        self._holder: Holder = {}
        self._end = 0.0

    def is_over(self, holder: Holder) -> bool:
        """Return whether the file has said the same for SILENCE_SECONDS seconds.

        Raises:
          UserError: it says something else than at the first look.
        """
        if not self._holder:
            self._holder, self._end = holder, time.monotonic() + SILENCE_SECONDS
            self._report(
                f"{_describe_holder(holder)} was training in {self._path.parent}; waiting for up to "
                f"{SILENCE_SECONDS:.0f} seconds for a sign that it still is"
            )
        if holder != self._holder:
            raise _held_error(self._path.parent, holder)
        return time.monotonic() >= self._end

    def wait(self) -> None:
        time.sleep(min(1.0, HEARTBEAT_SECONDS / 4))


def _is_locked_here(handle: int) -> bool:
    """Lock a file; True as well where the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno == errno.ESTALE:  # removed by another host since it was opened
            return False
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _is_same_file(handle: int, path: Path) -> bool:
    """Return whether an open file is still the one at the path: it may have been removed."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return False


def _is_ours(handle: int, path: Path, about: Holder) -> bool:
    """Return whether the file at the path names this holder; a write that failed left nothing."""
    found = _read_holder(path)
    return about.items() <= found.items() if found else _is_same_file(handle, path)


def _runs_here(holder: Holder) -> bool | None:
    """Return whether a holder runs; None if that cannot be seen from here."""
    if not holder:
        return False
    if holder["machine"] != _machine_id():
        return None
    return _start_time(holder["pid"]) == holder["began"]


def _write_heartbeats(handle: int, path: Path, about: Holder, stopped: threading.Event) -> None:
    while not stopped.wait(HEARTBEAT_SECONDS):
        with contextlib.suppress(OSError):  # a full disk is no reason to stop, and said elsewhere
            if _is_ours(handle, path, about):
                _write_holder(handle, about)


def _write_holder(handle: int, about: Holder) -> None:
    """Write who holds the lock and the time, in place: a lock is the file's, not the name's."""
    data = json.dumps({**about, "beat": time.time()}).encode() + b"\n"
    os.pwrite(handle, data, 0)
    os.ftruncate(handle, len(data))
    os.fsync(handle)


def _read_holder(path: Path) -> Holder:
    """Return what a lock file says; {} if nothing that this famjax could have written."""
    try:
        with path.open("rb") as file:
            found = parse_json(file.read(_MAX_BYTES))
    except (OSError, ValueError):
        return {}
    types = {name: type(value) for name, value in _describe_self().items()} | {"beat": float}
    if not isinstance(found, dict) or any(type(found.get(k)) is not t for k, t in types.items()):
        return {}
    return found


def _describe_self() -> Holder:
    return {
        "pid": os.getpid(),
        "began": _start_time(os.getpid()),
        "machine": _machine_id(),
        "host": socket.gethostname(),
        "user": _user(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return str(os.getuid())


def _machine_id() -> str:
    """Return a name for what numbers processes: a start of a machine, or a container on it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def _start_time(pid: int) -> str:
    """Return when a process began, in ticks since the machine did; "" if there is none."""
    try:
        # field 22 of proc(5), counted from after the program's name, which may have spaces
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "runs"


def _describe_holder(holder: Holder) -> str:
    return f"process {holder['pid']} on {holder['host']}"


def _held_error(folder: Path, holder: Holder) -> UserError:
    fix = "wait for its end, stop it, or give --run another folder"
    if not holder:
        return UserError(f"{folder}: another process is training there; {fix}")
    command = holder["command"]
    if len(command) > _MAX_COMMAND:
        command = f"{command[:_MAX_COMMAND]} ..."
    return UserError(
        f"{folder}: {_describe_holder(holder)} is training there (user {holder['user']}, since "
        f"{holder['since']}: {command}); {fix}"
    )
