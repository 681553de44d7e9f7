"""Multi-process training: start-up and small host-side collectives.

Both use JAX's coordination service, which runs in process 0: `jax.distributed.initialize` waits
there for all processes, and the service's key-value store carries the values of the collectives.
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import re
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from famjax.core.errors import NotConnectedError, UserError
from famjax.core.json_files import parse_json

# seconds for all processes to connect; seconds without a heartbeat after which a process is lost
INIT_TIMEOUT, HEARTBEAT_TIMEOUT = 300, 60
# seconds after which a waiting process says that it waits; process 0, which reports the run, says
# so at once
_NOTICE_AFTER = 10
# milliseconds at a barrier: long enough for the work of a single process, such as writing a
# checkpoint. Lost processes are detected by heartbeats, not by this timeout
_BARRIER_TIMEOUT = 24 * 3600 * 1000

# what JAX raises as a RuntimeError if a metadata server or a host name does not answer in time
_TIMED_OUT = re.compile("failed for 6 tries|Retry failed|Failed to recognize coordinator address")

T = TypeVar("T")
_call_counts: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


@dataclass(frozen=True)
class ProcessInfo:
    """This process among those that train one model.

    Attributes:
      coordinator: HOST:PORT of process 0.
      index: index of this process.
      count: number of processes.
    """

    coordinator: str
    index: int
    count: int

    def name(self, index: int) -> str:
        return f"process {index} of {self.count}"


def parse_flags(
    coordinator: str | None, index: str | None, count: str | None
) -> ProcessInfo | None:
    """Return the process info from command-line flags; None for a single process.

    Raises:
      UserError: a flag is missing or invalid.
    """
    number = _parse_number("--process-count", count, 1)
    if count is not None and number == 1 and coordinator is None:
        return None
    flags = {"--coordinator": coordinator, "--process-id": index, "--process-count": count}
    missing = [flag for flag, value in flags.items() if value is None]
    if missing:
        raise UserError(
            f"{' and '.join(missing)} missing: several processes need --coordinator HOST:PORT of "
            "process 0, --process-id of their own and --process-count"
        )
    if not re.fullmatch(r"[^\s:]+:\d+|\[[0-9a-fA-F:]+\]:\d+", coordinator or ""):
        raise UserError(
            f"--coordinator {coordinator}: not an address; give host and port of process 0, such "
            "as 10.0.0.2:8476"
        )
    process = _parse_number("--process-id", index, 0)
    if process >= number:
        raise UserError(
            f"--process-id {process}: out of range for --process-count {number}; take 0 to "
            f"{number - 1}"
        )
    return ProcessInfo(coordinator or "", process, number)


def _parse_number(flag: str, text: str | None, minimum: int) -> int:
    if text is None:
        return minimum
    if not text.isascii() or not text.isdigit() or int(text) < minimum:
        raise UserError(f"{flag} {text}: must be an integer of at least {minimum}")
    return int(text)


def detect() -> ProcessInfo | None:
    """Return the process info from the cluster environment, or None.

    Known environments are TPU VM, GKE, Slurm and Open MPI.

    Raises:
      UserError: there are several processes, but the coordinator address is unknown.
      NotConnectedError: the address could not be found out now, since a name or the metadata server
        did not answer in time.
    """
    from jax._src import clusters

    kinds = clusters.ClusterEnv._cluster_types
    cluster = None
    try:
        cluster = next((c for c in kinds if not c.opt_in_only_method and c.is_env_present()), None)
        if cluster is None or cluster.get_process_count() == 1:
            return None
        address = cluster.get_coordinator_address(
            timeout_secs=INIT_TIMEOUT, override_coordinator_port=None
        )
        return ProcessInfo(address, cluster.get_process_id(), cluster.get_process_count())
    except Exception as error:  # a cluster's metadata may raise anything
        message = " ".join(f"{type(error).__name__}: {error}".split())
        may_pass = isinstance(error, OSError) or _TIMED_OUT.search(str(error))
        kind = NotConnectedError if may_pass else UserError
        again = "run again, or " if may_pass else ""
        raise kind(
            f"the environment ({cluster.name if cluster else ''}) gives no coordinator address "
            f"({message}); {again}give --coordinator, --process-id and --process-count, or "
            "--process-count 1"
        ) from None


def check_single_process(verb: str) -> None:
    """Raise a `UserError` if a single-process verb was started in several processes."""
    if (info := detect()) is not None:
        raise UserError(
            f"famjax {verb} runs in one process, and {info.count} were started; start one, such "
            "as with srun -n 1"
        )


def initialize(info: ProcessInfo) -> None:
    """Connect all processes; `famjax.processes.failure_monitor` reports failures.

    Raises:
      UserError: the address cannot be used.
      NotConnectedError: process 0 cannot listen at its address now, such as while an earlier
        training holds the port.
    """
    import sys

    import jax

    if info.index == 0:
        _check_port(info)
    # gloo is the only implementation for CPUs
    jax.config.update("jax_cpu_collectives_implementation", "gloo")

    def print_waiting() -> None:
        whom = f"{info.count} processes" if info.index == 0 else "process 0"
        print(f"waiting for {whom} at {info.coordinator}", file=sys.stderr, flush=True)

    timer = threading.Timer(_NOTICE_AFTER if info.index else 0, print_waiting)
    timer.daemon = True
    timer.start()
    try:
        with _register_timeout(INIT_TIMEOUT):
            jax.distributed.initialize(
                info.coordinator,
                num_processes=info.count,
                process_id=info.index,
                # longer than the service's own timeout, which must expire first to name the missing
                # processes
                initialization_timeout=INIT_TIMEOUT + 10,
                heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
            )
    except (RuntimeError, ValueError) as error:
        message = (
            f"{info.name(info.index)} cannot connect to the others at {info.coordinator}: "
            f"{str(error).splitlines()[0]}"
        )
        kind = UserError if isinstance(error, ValueError) else NotConnectedError
        raise kind(message) from None
    finally:
        timer.cancel()


def _check_port(info: ProcessInfo) -> None:
    """Raise a `NotConnectedError` if another process listens at process 0's port.

    JAX's service would crash the process, or share the port with the other one's.
    """
    with socket.socket() as probe:
        # past connections of an earlier training do not matter
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(info.coordinator.rpartition(":")[2])))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise NotConnectedError(
                    f"{info.name(0)} cannot listen at {info.coordinator}: another process does; "
                    "wait for an earlier training to end, or give another port"
                ) from None


@contextmanager
def _register_timeout(seconds: int) -> Iterator[None]:
    """Set the service's registration timeout, since only the service can name missing processes.

    `jax.distributed.initialize` has no argument for this timeout and leaves it at an hour.
    """
    from jax._src.lib import _jax

    real = _jax.get_distributed_runtime_service
    _jax.get_distributed_runtime_service = functools.partial(real, cluster_register_timeout=seconds)
    try:
        yield
    finally:
        _jax.get_distributed_runtime_service = real


def _distributed_state() -> Any:
    from jax._src import distributed  # not in JAX's public API

    return distributed.global_state


def client() -> Any:
    """Return the coordination service's client; None in a single process."""
    return _distributed_state().client


def process_count() -> int:
    return _distributed_state().num_processes if client() else 1


def process_index() -> int:
    return _distributed_state().process_id if client() else 0


def all_gather(name: str, value: Any) -> list[Any]:
    """Return the values of all processes, by process index.

    All processes must call this function, with the same names in the same order.

    Args:
      name: name of the call, which must differ between calls from different threads.
      value: this process's value, JSON-serializable.
    """
    if process_count() == 1:
        return [value]
    call, own = next(_call_counts[name]), process_index()
    client().key_value_set(_key(name, call, own), json.dumps(value))
    barrier(name)
    texts = [
        client().blocking_key_value_get(_key(name, call, i), _BARRIER_TIMEOUT)
        for i in range(process_count())
    ]
    if call:  # all have passed the barrier, so all have read the values of the previous call
        client().key_value_delete(_key(name, call - 1, own))
    return [parse_json(text) for text in texts]


def broadcast_from_first(name: str, value: Callable[[], T]) -> T:
    """Return process 0's JSON-serializable value on all processes; see `all_gather`."""
    if process_count() == 1:
        return value()
    return all_gather(name, value() if process_index() == 0 else None)[0]


def barrier(name: str) -> None:
    """Wait until all processes have called this function equally often with this name."""
    if process_count() > 1:
        call = next(_call_counts[f"barrier {name}"])
        client().wait_at_barrier(_key("barrier", name, call), _BARRIER_TIMEOUT)


def first_process_first(name: str, call: Callable[[], T]) -> T:
    """Run `call` in process 0, and after it has returned, in the other processes."""
    if process_index() == 0:
        result = call()
        barrier(name)
        return result
    barrier(name)
    return call()


def _key(*parts: Any) -> str:
    return "/".join(("famjax", *map(str, parts)))
