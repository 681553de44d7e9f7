"""Multi-process training: checks across processes, batch upload, gathered arrays, signals.

With a single process the checks do nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

import famjax
from famjax.config.keys import key_values
from famjax.config.schema import Config, MeshConfig
from famjax.core.errors import UserError
from famjax.core.types import Batch, PyTree, tree_bytes
from famjax.core.units import byte_size
from famjax.data.lanes import join_rows_state
from famjax.data.sources import Source
from famjax.experiment.memory import device_memory
from famjax.parallel.sharding import make_mesh, parameter_shardings
from famjax.processes import collective
from famjax.train.metrics import MetricsWriter

# seconds until other processes see a new file: a network file system may have cached that the file
# does not exist
_VISIBLE_SECONDS = 20.0
# seconds after a stop signal in which a step usually ends
_PATIENCE_SECONDS = 3.0


def check_same_config(config: Config) -> None:
    """Raise a `UserError`, on all processes, if they differ in config, famjax or JAX."""
    versions = {"famjax": famjax.__version__, "jax": jax.__version__, "code": source_digest()}
    _check_same(
        "begin",
        {**versions, **key_values(config)},
        "other settings",
        "start all with the same command, config and famjax",
    )


def check_same_documents(source: Source) -> None:
    """Raise a `UserError`, on all processes, if their documents differ."""
    _check_same(
        "documents", source.get_state(), "other documents", "give all the same files under data"
    )


def _check_same(name: str, mine: Mapping[str, Any], what: str, hint: str) -> None:
    first, *others = collective.all_gather(name, dict(mine))
    for i, other in enumerate(others, start=1):
        changes = [
            f"{key}: {first.get(key)!r} -> {other.get(key)!r}"
            for key in {**first, **other}
            if first.get(key) != other.get(key)
        ]
        if changes:
            raise UserError(
                f"process {i} of {collective.process_count()} has {what} than process 0 "
                f"({'; '.join(changes)}); {hint}"
            )


def source_digest() -> str:
    """Return a hash of famjax's source files."""
    home, digest = Path(famjax.__file__).parent, hashlib.sha256()
    for path in sorted(home.rglob("*.py")):
        digest.update(f"{path.relative_to(home)} ".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def check_shared_folder(folder: Path) -> None:
    """Raise a `UserError`, on all processes, unless all see a file that process 0 writes there."""
    if collective.process_count() == 1:
        return
    token = folder / collective.broadcast_from_first(
        "token", lambda: f".shared-{secrets.token_hex(8)}"
    )
    if collective.process_index() == 0:
        token.touch()
    collective.barrier("token written")
    end = time.monotonic() + _VISIBLE_SECONDS
    while not (seen := token.exists()) and time.monotonic() < end:
        time.sleep(0.2)
    blind = [str(i) for i, sees in enumerate(collective.all_gather("seen", seen)) if not sees]
    if collective.process_index() == 0:
        token.unlink()
    if blind:
        raise UserError(
            f"{folder} is not shared: process {', '.join(blind)} of {collective.process_count()} "
            "does not see what process 0 wrote there; give --run a folder on a shared file system"
        )


def local_rows(sharding: jax.sharding.Sharding, rows: int, tokens: int) -> tuple[int, ...]:
    """Return the rows of a batch [b t] that are at least partly on this process's devices."""
    parts: Any = sharding.addressable_devices_indices_map((rows, tokens)).values()
    return tuple(sorted({i for rows_of, _ in parts for i in range(*rows_of.indices(rows))}))


def upload_batch(
    batch: Batch[np.ndarray], sharding: jax.sharding.Sharding, total: int
) -> Batch[jax.Array]:
    """Return the global batch [b t], made of the rows of each process."""
    if collective.process_count() == 1:
        return jax.device_put(batch, sharding)
    rows = local_rows(sharding, total, batch["tokens"].shape[1])
    local_index = np.zeros(total, int)
    local_index[list(rows)] = range(len(rows))

    def put(part: np.ndarray) -> jax.Array:
        def shard(index: Any) -> np.ndarray:
            return part[local_index[index[0]]][:, index[1]]

        return jax.make_array_from_callback((total, *part.shape[1:]), sharding, shard)

    with jax.transfer_guard("allow"):  # explicit, but the guard recognizes device_put only
        return jax.tree.map(put, batch)


def gather_to_first_process(tree: PyTree) -> PyTree:
    """Return global parameters on the devices of process 0; None in other processes.

    They are sharded over these devices as far as possible, since the training's state is there,
    too. With a single process they stay as they are. All processes must call this.

    Raises:
      UserError: they do not fit the devices.
    """
    if collective.process_count() == 1:
        return tree
    from jax.experimental import multihost_utils

    devices = jax.local_devices()
    needed, available = tree_bytes(tree), device_memory(used=len(devices))
    if needed > available.bytes:
        raise UserError(
            f"eval.tasks: the whole model takes {byte_size(needed)}, and {available.name} "
            f"{byte_size(available.bytes)}; leave it out, and evaluate the run with famjax eval"
        )
    shardings = parameter_shardings(make_mesh(MeshConfig(data=1, fsdp=-1), devices), tree)

    def gather(leaf: jax.Array, placement: NamedSharding) -> jax.Array | None:
        if not leaf.is_fully_addressable:
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        return None if collective.process_index() else jax.device_put(leaf, placement)

    with jax.transfer_guard("allow"):
        return jax.tree.map(gather, tree, shardings)


def gather_cursors(data: dict[str, Any]) -> dict[str, Any]:
    """Return the state of `Batches` with the rows of all processes."""
    parts = collective.all_gather("cursors", data["batches"])
    return {**data, "batches": join_rows_state(parts)}


class _NullWriter(contextlib.nullcontext[Any]):
    def __enter__(self) -> _NullWriter:
        return self

    def write(self, step: int, fields: Mapping[str, Any]) -> None: ...


def make_metrics_writer(folder: Path, resume_step: int | None) -> MetricsWriter | _NullWriter:
    """Return a writer of metrics rows; only that of process 0 writes."""
    return _NullWriter() if collective.process_index() else MetricsWriter(folder, resume_step)


class StopSignal:
    """Records the first SIGTERM or SIGINT; a second one has its usual effect.

    If the step does not end soon after the first one, because it evaluates, a line says so.

    With several processes JAX's coordination service handles SIGTERM, and all stop at the same
    step.
    """

    signal: int = 0

    def at(self, step: int) -> int:
        """Return the signal to stop after this step, or 0; call it after every step."""
        if collective.process_count() == 1:
            return self.signal
        from jax.experimental import multihost_utils

        stop = multihost_utils.reached_preemption_sync_point(step)
        return (self.signal or signal.SIGTERM) if stop else 0

    @contextlib.contextmanager
    def catch_signals(self) -> Iterator[None]:
        handlers: dict[int, Any] = {}
        several = collective.process_count() > 1
        note = threading.Timer(_PATIENCE_SECONDS, _say_it_will_stop)
        note.daemon = True

        def record(number: int, _: Any) -> None:
            if self.signal:
                signal.signal(number, handlers[number])
                signal.raise_signal(number)
            self.signal = number
            note.start()
            if several:
                signal.raise_signal(signal.SIGTERM)

        for number in (signal.SIGINT,) if several else (signal.SIGTERM, signal.SIGINT):
            try:
                handlers[number] = signal.signal(number, record)
            except ValueError:  # not the main thread: the caller handles signals
                continue
        try:
            yield
        finally:
            note.cancel()
            for known, handler in handlers.items():
                signal.signal(known, handler)


def _say_it_will_stop() -> None:
    print(
        "famjax: stopping: saves as soon as this step, and any evaluation in it, is done; "
        "a second Ctrl-C stops at once without saving",
        file=sys.stderr,
    )
