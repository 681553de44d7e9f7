"""Several processes that train one model: how they find each other, and what they tell each other.

JAX's coordination service, which runs in process 0, does both: `jax.distributed.initialize` waits
there for all, and its key-value store holds what each has to say.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from famjax.core.errors import UserError
from famjax.core.json_files import parse_json

# Seconds: for all to be there; without a sign of life until a process is taken for gone.
PATIENCE, HEARTBEAT = 300, 60
# seconds after which a process that waits says so, if it is not the one that tells of the run
_LONG = 10
# for what all do in turn, such as writing a checkpoint; who is gone is found out by heartbeats
_HOURS = 24 * 3600 * 1000

T = TypeVar("T")
_turns: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


@dataclass(frozen=True)
class ProcessInfo:
    """A process among those that train together.

    Attributes:
      coordinator: HOST:PORT of process 0.
      index: of this one.
      count: of all.
    """

    coordinator: str
    index: int
    count: int

    def name(self, index: int) -> str:
        return f"process {index} of {self.count}"


def given(coordinator: str | None, index: str | None, count: str | None) -> ProcessInfo | None:
    """Return the place that a command line gives, None if it says that there is one process.

    Raises:
      UserError: a part of it is missing or cannot be.
    """
    number = _number("--process-count", count, 1)
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
            f"--coordinator {coordinator}: is no address; give host and port of process 0, such "
            "as 10.0.0.2:8476"
        )
    place = _number("--process-id", index, 0)
    if place >= number:
        raise UserError(
            f"--process-id {place}: there is none of --process-count {number}; take 0 to "
            f"{number - 1}"
        )
    return ProcessInfo(coordinator or "", place, number)


def _number(flag: str, text: str | None, least: int) -> int:
    if text is None:
        return least
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise UserError(f"{flag} {text}: must be a whole number from {least} on")
    return int(text)


def found() -> ProcessInfo | None:
    """Return the place that the environment gives (TPU VM, GKE, Slurm, Open MPI), if any.

    Raises:
      UserError: there are several processes, but not where they meet.
    """
    from jax._src import clusters

    kinds = clusters.ClusterEnv._cluster_types
    here = None
    try:
        here = next((c for c in kinds if not c.opt_in_only_method and c.is_env_present()), None)
        if here is None or here.get_process_count() == 1:
            return None
        address = here.get_coordinator_address(
            timeout_secs=PATIENCE, override_coordinator_port=None
        )
        return ProcessInfo(address, here.get_process_id(), here.get_process_count())
    except Exception as error:  # whatever a cluster's metadata may raise
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"the environment ({here.name if here else ''}) does not tell where processes meet "
            f"({said}); give --coordinator, --process-id and --process-count, or --process-count 1"
        ) from None


def refuse_several(verb: str) -> None:
    """Raise a `UserError` where a verb that runs in one process was started in several."""
    if (place := found()) is not None:
        raise UserError(
            f"famjax {verb} runs in one process, and {place.count} were started; start one, such "
            "as with srun -n 1"
        )


def join(place: ProcessInfo) -> None:
    """Wait until all processes are there. What goes wrong is told by `famjax.core.failure_monitor`.

    Raises:
      UserError: process 0 cannot listen at its address.
    """
    import sys

    import jax

    # of which there is one for CPUs
    jax.config.update("jax_cpu_collectives_implementation", "gloo")

    def waits() -> None:
        whom = f"{place.count} processes" if place.index == 0 else "process 0"
        print(f"waiting for {whom} at {place.coordinator}", file=sys.stderr, flush=True)

    timer = threading.Timer(_LONG if place.index else 0, waits)
    timer.daemon = True
    timer.start()
    try:
        with _patient_service(PATIENCE):
            jax.distributed.initialize(
                place.coordinator,
                num_processes=place.count,
                process_id=place.index,
                # the service's time-out names who is missing: it shall come first
                initialization_timeout=PATIENCE + 10,
                heartbeat_timeout_seconds=HEARTBEAT,
            )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"{place.name(place.index)} cannot meet the others at {place.coordinator}: "
            f"{str(error).splitlines()[0]}"
        ) from None
    finally:
        timer.cancel()


@contextmanager
def _patient_service(seconds: int) -> Iterator[None]:
    """Let the service give up waiting too, since it alone can name who is missing.

    `initialize` has no argument for it, and leaves it at an hour.
    """
    from jax._src.lib import _jax

    real = _jax.get_distributed_runtime_service
    _jax.get_distributed_runtime_service = functools.partial(real, cluster_register_timeout=seconds)
    try:
        yield
    finally:
        _jax.get_distributed_runtime_service = real


def _state() -> Any:
    from jax._src import distributed  # JAX shows it nowhere else

    return distributed.global_state


def client() -> Any:
    """Return the coordination service's client; None in a process that is alone."""
    return _state().client


def count() -> int:
    return _state().num_processes if client() else 1


def index() -> int:
    return _state().process_id if client() else 0


def everyone(name: str, value: Any) -> list[Any]:
    """Return what each process gives under a name, by process. All must call it, in one order.

    Args:
      name: calls of different threads have different names.
      value: JSON-able.
    """
    if count() == 1:
        return [value]
    turn, mine = next(_turns[name]), index()
    client().key_value_set(_key(name, turn, mine), json.dumps(value))
    meet(name)
    texts = [client().blocking_key_value_get(_key(name, turn, i), _HOURS) for i in range(count())]
    if turn:  # all have met here, so all have read what was given the time before
        client().key_value_delete(_key(name, turn - 1, mine))
    return [parse_json(text) for text in texts]


def from_first(name: str, value: Callable[[], T]) -> T:
    """Return what process 0 computes, JSON-able, on all. All must call it, in one order."""
    if count() == 1:
        return value()
    return everyone(name, value() if index() == 0 else None)[0]


def meet(name: str) -> None:
    """Wait until all processes have called this with the same name as often."""
    if count() > 1:
        turn = next(_turns[f"meet {name}"])
        client().wait_at_barrier(_key("meet", name, turn), _HOURS)


def first_then_all(name: str, call: Callable[[], T]) -> T:
    """Call in process 0, and when that is done in the others."""
    if index() == 0:
        result = call()
        meet(name)
        return result
    meet(name)
    return call()


def _key(*parts: Any) -> str:
    return "/".join(("famjax", *map(str, parts)))
