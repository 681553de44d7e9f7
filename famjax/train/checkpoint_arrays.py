"""The arrays of a checkpoint: copied to the host, and written and read by Orbax.

Each top-level key of the tree is one Orbax (OCDBT) folder. Empty leaves are not written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from famjax.core.errors import UserError
from famjax.core.json_files import shorten
from famjax.core.types import PyTree
from famjax.processes import collective
from famjax.train.manifest import RESTORE_HINT

# A tree whose top level is a dict of identifiers, with jax.Array (or ShapeDtypeStruct) leaves.
Tree = dict[str, Any]
Leaves = dict[str, Any]


def copy_to_host(tree: PyTree, safe: bool) -> PyTree:
    """Return host copies of all leaves; with several processes, of this process's shards.

    Args:
      safe: False allows views of arrays that are on the CPU; these arrays must then not change
        while the result is in use.
    """
    return _to_host(tree, safe) if collective.process_count() == 1 else _share_to_host(tree)


def _to_host(tree: PyTree, safe: bool) -> PyTree:
    """Return NumPy copies of all leaves; if not `safe`, views of those on the CPU.

    On the CPU `device_get` returns views of the buffers. While a checkpoint is written from a view,
    the next step could change it, or could not donate the buffer.
    """

    def copy(leaf: Any, host: Any) -> np.ndarray:
        on_cpu = isinstance(leaf, jax.Array) and any(d.platform == "cpu" for d in leaf.devices())
        return np.array(host) if on_cpu and safe else np.asarray(host)

    return jax.tree.map(copy, tree, jax.device_get(tree))


def _share_to_host(tree: PyTree) -> PyTree:
    """Return global arrays in pinned host memory; a process holds the shards of its devices."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding.with_memory_kind("pinned_host"), tree)
    copies = jax.device_put(tree, shardings)
    return jax.block_until_ready(copies)


def flatten(tree: PyTree) -> Leaves:
    """Return the leaves by path, such as "layers/0/w"; the path of a tree of one leaf is empty."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    leaves = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}
    if len(leaves) != len(flat):
        raise ValueError("two leaves of the tree have the same path")
    return leaves


def check_names(leaves: dict[str, Leaves]) -> None:
    for key, values in leaves.items():
        if not key.isidentifier():
            raise ValueError(f"top-level key {key!r} cannot name a folder")
        # Orbax joins paths with dots, so that a/b and a.b would share one array.
        if len({name.replace("/", ".") for name in values}) != len(values):
            raise ValueError(f"two leaves of {key!r} differ in dots and slashes only")


def array_info(leaf: Any) -> tuple[list[int], str]:
    return list(leaf.shape), str(leaf.dtype)


def describe_array(info: tuple[Any, ...] | None) -> str:
    return "absent" if info is None else f"{info[1]}{info[0]}"


def _nest(leaves: Leaves) -> Tree:
    """Return a tree of dicts without empty leaves, which plain Orbax reads without our classes."""
    tree: Tree = {}
    for name, leaf in leaves.items():
        if leaf.size:
            *folders, last = name.split("/")
            node = tree
            for folder in folders:
                node = node.setdefault(folder, {})
            node[last or "value"] = leaf
    return tree


def _unnest(tree: Tree, name: str) -> Any:
    for part in name.split("/"):
        tree = tree[part or "value"]
    return tree


def write_arrays(folder: Path, leaves: Leaves) -> None:
    tree = _nest(leaves)
    if tree:
        # Orbax copies arrays that it writes: limit the copies to the size of the largest array
        gigabytes = 2 + max(leaf.nbytes for leaf in leaves.values()) // 10**9
        with suppress_tracebacks(), _make_checkpointer(save_concurrent_gb=gigabytes) as orbax:
            orbax.save(folder, ocp.args.PyTreeSave(tree))


def _make_checkpointer(**limits: int) -> ocp.Checkpointer:
    """Return an Orbax checkpointer whose processes synchronize through the coordination service.

    Orbax's default, a barrier on the devices, would interleave with the collectives of training.
    """
    if collective.process_count() == 1:
        return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**limits))
    options = ocp.options.MultiprocessingOptions(
        active_processes=set(range(collective.process_count()))
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options, **limits)
    return ocp.Checkpointer(handler, multiprocessing_options=options)


@contextmanager
def suppress_tracebacks() -> Iterator[None]:
    """Suppress the tracebacks that Orbax logs for exceptions that it also raises."""

    def wanted(record: logging.LogRecord) -> bool:
        return "_SignalingThread" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


def restore_arrays(folder: Path, template: PyTree) -> PyTree:
    """Return the tree in `folder`, with the shapes, dtypes and shardings of `template`."""
    leaves = flatten(template)
    nested = _nest(leaves)
    if nested:
        args = ocp.args.PyTreeRestore(item=nested, restore_args=jax.tree.map(_restore_args, nested))
        try:
            with suppress_tracebacks(), _make_checkpointer() as orbax:
                nested = orbax.restore(folder, args=args)
        except (
            Exception
        ) as error:  # TensorStore's exception types, if files with valid checksums are malformed
            if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
                raise
            message = shorten(" ".join(f"{type(error).__name__}: {error}".split()), 200)
            raise UserError(f"{folder}: damaged ({message}); {RESTORE_HINT}") from error
    values = [
        _unnest(nested, name) if leaf.size else _empty_array(leaf) for name, leaf in leaves.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(template), values)


def _empty_array(leaf: Any) -> jax.Array:
    zeros = np.zeros(leaf.shape, leaf.dtype)
    return jax.make_array_from_callback(leaf.shape, _sharding(leaf), lambda part: zeros[part])


def _restore_args(leaf: Any) -> ocp.ArrayRestoreArgs:
    return ocp.ArrayRestoreArgs(sharding=_sharding(leaf), global_shape=leaf.shape, dtype=leaf.dtype)


def _sharding(leaf: Any) -> jax.sharding.Sharding:
    sharding = getattr(leaf, "sharding", None)
    return sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
