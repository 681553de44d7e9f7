"""A lock that admits one training at a time to a run folder, and is released if its process dies.

Process 0 of a training holds RUN/train.lock while it runs; readers (eval, generate, export) take no
lock. The file names its holder in JSON. Three signs show whether the holder is still running; only
if none of them does can another process take over the lock:

1. flock. The kernel releases it when the process dies, also by kill -9. If two processes
   start together, it decides which one gets the lock. NFS and Lustre share it between hosts; after
   a host has died they release it late (NFSv4: when its lease expires, 90 seconds by default) or,
   in the case of NFSv3, never. On a bucket (gcsfuse) each host has its own locks, and some file
   systems have no locks; there only the file's content counts.
2. The process named in the file, if it was started on this machine, in this container and since
   the last boot. It is identified by its number and start time, so a reused process number is not
   mistaken for it.
3. The heartbeat. A process on another machine cannot be looked up, so the file is watched: its
   holder rewrites it every HEARTBEAT_SECONDS. If the file changes, the lock is held. If it does not
   change for SILENCE_SECONDS, it has no holder, even if it is still locked: it is removed and
   replaced. If it is not locked, and its last heartbeat is older than CLOCK_SKEW_SECONDS, there is
   no wait; clocks of hosts are assumed to agree within that.

So a training that was preempted and restarts on another host waits for at most SILENCE_SECONDS if
its first process was killed. It does not wait if that process was stopped by SIGTERM, since it then
removed the file.

Before each heartbeat, and before it removes the file at the end, a holder checks that the file
still names it. So it never modifies the file of another training that has taken over the lock.

These cases are not prevented:

- Two trainings start on two hosts within a few seconds of each other, in a folder on a bucket,
  where no lock works across hosts.
- Of three processes, one removes the file of a dead holder late, after the second has taken the
  lock, and the third starts within that instant.
- A holder that could not write for SILENCE_SECONDS, because its machine was suspended for example,
  was replaced and resumes: it does not notice.
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
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from famjax.core.errors import UserError
from famjax.core.json_files import parse_json
from famjax.processes import collective

LOCK = "train.lock"

# Seconds between a holder's writes; seconds of silence after which a holder on another machine
# counts as dead (NFS may show a file as it was a minute ago); seconds by which the clocks of two
# hosts may differ.
HEARTBEAT_SECONDS, SILENCE_SECONDS, CLOCK_SKEW_SECONDS = 20.0, 100.0, 600.0
# seconds for a process that has just taken the lock to write its name into it
NAME_SECONDS = 2.0
# maximum number of bytes read from a lock file
_MAX_BYTES = 1 << 20
# maximum number of characters of a command in messages
_MAX_COMMAND = 120

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

Holder = dict[str, Any]


def hold_for_all(folder: Path) -> AbstractContextManager[bool]:
    """Hold a run folder; process 0 does so for all processes of a training (see `hold`)."""
    if collective.process_index():
        return nullcontext(False)
    return hold(folder, lambda line: print(line, file=sys.stderr))


@contextmanager
def hold(folder: Path, report: Callable[[str], None]) -> Iterator[bool]:
    """Hold the lock of a run folder; create the folder if it is missing, and yield whether it was.

    Args:
      folder: folder of the run.
      report: called with one line if this function has to wait.

    Raises:
      UserError: another process trains there, or the folder cannot be written.
    """
    path = folder / LOCK
    new, own = not folder.exists(), _describe_self()
    try:
        handle = _acquire(path, own, report)
    except OSError as error:
        if error.errno == errno.EIO:  # transient on a network file system: not the user's mistake
            raise
        if error.errno == errno.ELOOP or path.is_dir():
            raise _not_a_file_error(path) from None
        if new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise _write_error(folder, error) from None
    stopped = threading.Event()
    args = (handle, path, own, stopped)
    beat = threading.Thread(target=_write_heartbeats, args=args, daemon=True, name=LOCK)
    beat.start()
    try:
        yield new
    finally:
        stopped.set()
        beat.join()
        # the file is removed before it is unlocked: other processes that have opened it see that it
        # was removed, and retry
        with contextlib.suppress(OSError):
            if _is_ours(handle, path, own):
                path.unlink(missing_ok=True)
        os.close(handle)


def _write_error(folder: Path, error: OSError) -> UserError:
    if isinstance(error, FileExistsError | NotADirectoryError):
        return UserError(f"{folder}: {os.strerror(errno.ENOTDIR)}; give --run another folder")
    return UserError(
        f"cannot write the run folder {folder}: {error.strerror}; free some space, check its "
        "permissions, or give --run another folder"
    )


def _not_a_file_error(path: Path) -> UserError:
    return UserError(f"{path}: not a regular file, as the lock of a training is; remove it")


def _acquire(path: Path, own: Holder, report: Callable[[str], None]) -> int:
    """Return the lock's open file, locked, with the holder `own` written to it."""
    end = time.monotonic() + NAME_SECONDS
    silence = _SilenceWatch(path, report)
    replaced = False
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        # without O_NOFOLLOW, a symbolic link could let us overwrite another file
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise _not_a_file_error(path)
            if not _try_lock(handle):
                replaced = _try_remove(path, silence, end)
            # some network file systems report a different inode number each time
            elif (_is_same_file(handle, path) or time.monotonic() > end) and _is_free(
                path, silence
            ):
                _write_holder(handle, own)
                if not replaced or _survives(handle, path, own):
                    return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _try_remove(path: Path, silence: _SilenceWatch, end: float) -> bool:
    """Remove a locked file whose holder, on another machine, is silent; otherwise wait briefly.

    Args:
      end: time at which to give up on a file that does not name a holder.

    Returns:
      Whether the file was removed.

    Raises:
      UserError: the holder is running.
    """
    holder = _read_holder(path)
    runs = _runs_here(holder)
    if runs:
        raise _held_error(path.parent, holder)
    if runs is None:
        if silence.is_over(holder):
            return _remove_file_of(holder, path)
        silence.wait()
        return False
    if time.monotonic() > end and path.exists():
        raise _held_error(path.parent, {})
    time.sleep(0.1)
    return False


def _remove_file_of(holder: Holder, path: Path) -> bool:
    """Remove a holder's file; return False, and keep the file, if it now names another holder.

    A file cannot be read and removed in one step, and another process may replace it in between.
    So the file is renamed first, which only one process can do, and is renamed back if it does not
    name the given holder.
    """
    removed = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        path.rename(removed)
    except FileNotFoundError:  # another process has removed it
        return True
    try:
        if _read_holder(removed) == holder:
            return True
        with contextlib.suppress(FileExistsError):  # a third process was faster
            os.link(removed, path)
        return False
    finally:
        removed.unlink(missing_ok=True)


def _is_free(path: Path, silence: _SilenceWatch) -> bool:
    """Return whether the lock can be taken over, given that this process has locked the file.

    False if the file has been removed.

    Raises:
      UserError: the holder is running, as far as this host can tell.
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


def _survives(handle: int, path: Path, own: Holder) -> bool:
    """Return whether our new file still exists after a short time.

    Another process that waited for the same holder may mistake it for the old file and remove it.
    """
    time.sleep(NAME_SECONDS)
    return _is_ours(handle, path, own)


class _SilenceWatch:
    """Watches the file of a holder on another machine, from the first call of `is_over` on.

    Args:
      path: path of the lock file.
      report: called with one line at the first check.
    """

    def __init__(self, path: Path, report: Callable[[str], None]):
        self._path, self._report = path, report
        self._holder: Holder = {}
        self._end = 0.0

    def is_over(self, holder: Holder) -> bool:
        """Return whether the file has not changed for SILENCE_SECONDS.

        Raises:
          UserError: it has changed since the first check.
        """
        if not self._holder:
            self._holder, self._end = holder, time.monotonic() + SILENCE_SECONDS
            self._report(
                f"{_describe_holder(holder)} was training in {self._path.parent}; waiting for up "
                f"to {SILENCE_SECONDS:.0f} seconds for a sign that it still is"
            )
        if holder != self._holder:
            raise _held_error(self._path.parent, holder)
        return time.monotonic() >= self._end

    def wait(self) -> None:
        time.sleep(min(1.0, HEARTBEAT_SECONDS / 4))


def _try_lock(handle: int) -> bool:
    """Lock a file without waiting; return False if another process holds it.

    True if the file system has no locks.
    """
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
    """Return whether an open file is still the one at the path, and was not removed."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return False


def _is_ours(handle: int, path: Path, own: Holder) -> bool:
    """Return whether the file at the path names this holder, or is our file without a holder.

    A failed write may leave our file empty.
    """
    holder = _read_holder(path)
    return own.items() <= holder.items() if holder else _is_same_file(handle, path)


def _runs_here(holder: Holder) -> bool | None:
    """Return whether a holder is running; None if this machine cannot tell."""
    if not holder:
        return False
    if holder["machine"] != _machine_id():
        return None
    return _start_time(holder["pid"]) == holder["began"]


def _write_heartbeats(handle: int, path: Path, own: Holder, stopped: threading.Event) -> None:
    while not stopped.wait(HEARTBEAT_SECONDS):
        with contextlib.suppress(
            OSError
        ):  # a full disk is no reason to stop, and is reported elsewhere
            if _is_ours(handle, path, own):
                _write_holder(handle, own)


def _write_holder(handle: int, own: Holder) -> None:
    """Write holder and time in place: flock is on the inode, which the path has to keep."""
    data = json.dumps({**own, "beat": time.time()}).encode() + b"\n"
    os.pwrite(handle, data, 0)
    os.ftruncate(handle, len(data))
    os.fsync(handle)


def _read_holder(path: Path) -> Holder:
    """Return the holder named in a lock file; {} if this famjax cannot have written it."""
    try:
        with path.open("rb") as file:
            holder = parse_json(file.read(_MAX_BYTES))
    except (OSError, ValueError):
        return {}
    types = {name: type(value) for name, value in _describe_self().items()} | {"beat": float}
    valid = isinstance(holder, dict) and all(type(holder.get(k)) is t for k, t in types.items())
    return holder if valid else {}


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
    """Return an id of the process namespace: of the machine since its boot, or of a container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def _start_time(pid: int) -> str:
    """Return a process's start time, in ticks since boot; "" if no such process is running."""
    try:
        # proc(5), after the program's name, which may contain spaces: fields 3 and 22
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # one that has ended stays until its parent asks for its status, which some never do
        return "" if fields[0] in "ZX" else fields[19]
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
