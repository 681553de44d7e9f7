"""The mesh of the function being traced, and what the function does with it.

That is constraining activations and weights to the shardings of `parallel/sharding.py`, and
`shard_map` over rows, blocks or other logical axes. Communication between tokens on different
devices is in `parallel/sequence_parallel.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from famjax.core.types import Array, Axes, Params, State
from famjax.parallel.sharding import (
    BATCH,
    MESH_AXES,
    named_sharding,
    parameter_axes,
    path_name,
    state_shardings,
)

# the mesh that the function being traced is compiled for; None if it is unknown, and then sharding
# is left to GSPMD
_MESH: ContextVar[Mesh | None] = ContextVar("mesh", default=None)


def with_mesh(mesh: Mesh, f: Callable[..., Any]) -> Callable[..., Any]:
    """Return f such that the functions below use `mesh` while f is traced."""

    @functools.wraps(f)
    def f_with_mesh(*args: Any, **kwargs: Any) -> Any:
        token = _MESH.set(mesh)
        try:
            return f(*args, **kwargs)
        finally:
            _MESH.reset(token)

    return f_with_mesh


def with_logical_constraint(x: jax.Array, axes: Axes) -> jax.Array:
    """Return `with_sharding_constraint` of x by its logical axes; x itself without a mesh.

    The constraint holds for the gradient too. Parameters and rows share the mesh axis fsdp: without
    the constraint, GSPMD may shard an activation by width, like a parameter, and replicate all
    batch rows.
    """
    mesh = _gspmd_mesh()
    return (
        x
        if mesh is None
        else jax.lax.with_sharding_constraint(x, named_sharding(mesh, axes, x.shape))
    )


def with_state_constraint(state: State, axes: Any) -> State:
    """Constrain a carried state to its tree of logical axes; see `with_logical_constraint`."""
    mesh = _gspmd_mesh()
    if mesh is None:
        return state
    return jax.lax.with_sharding_constraint(state, state_shardings(mesh, axes, state))


def fsdp_all_gather(params: Params) -> Params:
    """Return parameters all-gathered over the row axes; unchanged without a mesh.

    This gathers a layer's weights once, before its products, and reduces their gradient once. By
    itself, GSPMD gathers them in pieces for each product and each loop iteration, and rewrites the
    sum of the products with every piece.
    """
    mesh = _gspmd_mesh()
    if mesh is None:
        return params

    def gather(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        axes = parameter_axes(path_name(path), leaf.ndim)
        axes = tuple(None if axis and MESH_AXES.get(axis) in BATCH else axis for axis in axes)
        return jax.lax.with_sharding_constraint(leaf, named_sharding(mesh, axes, leaf.shape))

    return jax.tree_util.tree_map_with_path(gather, params)


def _gspmd_mesh() -> Mesh | None:
    """Return the mesh if GSPMD partitions the function being traced over several devices."""
    mesh = _MESH.get()
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return None if mesh is None or mesh.size == 1 or manual else mesh


def row_shards(rows: int) -> int:
    """Return the number of shards into which `shard_map_rows` splits that many rows."""
    mesh = _MESH.get()
    shards = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    return shards if rows % shards == 0 else 1


def shard_map_rows(
    f: Callable[..., Any], rows: int, axes: Any, out_axes: Any
) -> Callable[..., Any]:
    """Return `jax.shard_map` of f over the batch rows.

    Replicated arguments are gathered once before f, and their gradients reduced once after it. This
    is for functions with loops: GSPMD by itself would all-reduce in every iteration to keep a sum
    replicated.

    Args:
      f: a function of arrays, independent for each row.
      rows: number of rows of the whole batch.
      axes: tree prefix for each argument: the axis of the rows, None for replicated arrays.
      out_axes: tree prefix for the result, like `axes`.
    """
    if row_shards(rows) == 1:
        return f

    def spec(axis: int | None) -> PartitionSpec:
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, BATCH)

    inner, outer = (
        jax.tree.map(spec, tree, is_leaf=lambda a: a is None) for tree in (tuple(axes), out_axes)
    )
    return jax.shard_map(
        f,
        mesh=_MESH.get(),
        in_specs=inner,
        out_specs=outer,
        axis_names=set(BATCH),
        check_vma=False,
    )


def sequence_shards(blocks: int) -> int:
    """Return the number of devices over which that many blocks or tokens of a call are sharded."""
    mesh = _MESH.get()
    shards = 1 if mesh is None else mesh.shape["sequence"]
    return shards if blocks % shards == 0 else 1


def shard_map_sequence(f: Callable[..., Any], axes: Any, out_axes: Any) -> Callable[..., Any]:
    """Return `jax.shard_map` of f over the blocks; GSPMD partitions all other mesh axes.

    f uses explicit collectives over "sequence" (`parallel/sequence_parallel.py`) and `axis_index`.

    Args:
      f: a function of arrays, which must not close over arrays.
      axes: tree prefix for each argument: the axis of the blocks, None for replicated arrays.
      out_axes: tree prefix for the result, like `axes`; None for arrays that f makes equal on all
        devices.
    """

    def spec(axis: int | None) -> PartitionSpec:
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "sequence")

    inner, outer = (
        jax.tree.map(spec, tree, is_leaf=lambda a: a is None) for tree in (tuple(axes), out_axes)
    )

    def per_device(index: Array, *args: Any) -> Any:
        token = _AXIS_INDEX.set(index[0])
        try:
            return f(*args)
        finally:
            _AXIS_INDEX.reset(token)

    mesh = _MESH.get()
    assert mesh is not None
    sharded = jax.shard_map(
        per_device,
        mesh=mesh,
        in_specs=(PartitionSpec("sequence"), *inner),
        out_specs=outer,
        axis_names={"sequence"},
        check_vma=False,
    )
    # not jax.lax.axis_index: with automatic axes XLA rejects it in larger programs
    return lambda *args: sharded(jnp.arange(mesh.shape["sequence"]), *args)


# within `shard_map_sequence`, this device's index along the mesh axis `sequence`
_AXIS_INDEX: ContextVar[Array] = ContextVar("axis_index")


def axis_index() -> Array:
    """Return this device's index along `sequence`, within `shard_map_sequence`."""
    return _AXIS_INDEX.get()


def all_gather_tokens(x: Array) -> Array:
    """Return [b t ...] all-gathered over `sequence`."""
    mesh = _gspmd_mesh()
    if mesh is None or mesh.shape["sequence"] == 1:
        return x
    rest = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 2)
    rows = named_sharding(mesh, ("batch",), x.shape[:1]).spec
    spec = PartitionSpec(*rows, None, *rest)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def target_device() -> jax.Device:
    """Return a device that the traced function will run on; without a mesh, the default device."""
    mesh = _MESH.get()
    return jax.devices()[0] if mesh is None else mesh.devices.flat[0]


def runs_on_one_cpu() -> bool:
    """Return whether the traced function will run on a CPU, and its arrays are not sharded."""
    mesh = _MESH.get()
    devices = jax.device_count() if mesh is None else mesh.size
    return devices == 1 and target_device().platform == "cpu"


def shard_map_axes(
    f: Callable[..., Any], sizes: dict[str, int], axes: tuple[Axes, ...], out_axes: tuple[Axes, ...]
) -> Callable[..., Any] | None:
    """Return `jax.shard_map` of f over logical axes.

    This is for kernels, which GSPMD cannot partition. It returns None if the arguments' shardings
    are unknown: on several devices without a mesh, or within `shard_map_rows`. Within
    `shard_map_sequence` tokens are already sharded.

    Args:
      f: a function of arrays, independent for each index of the axes.
      sizes: size of each logical axis; axes that the mesh does not divide are replicated.
      axes, out_axes: logical axes of each argument and result; trailing axes may be omitted.
    """
    mesh = _MESH.get()
    if mesh is None:
        return f if jax.device_count() == 1 else None
    if mesh.size == 1:
        return f
    within = jax.sharding.get_abstract_mesh()
    if set(within.manual_axes) - {"sequence"}:
        return None
    targets = named_sharding(mesh, tuple(sizes), tuple(sizes.values())).spec
    mesh_axes = dict(zip(sizes, targets, strict=True))

    def specs(arrays: tuple[Axes, ...]) -> tuple[PartitionSpec, ...]:
        return tuple(
            PartitionSpec(*(mesh_axes.get(a) if a else None for a in axes)) for axes in arrays
        )

    return jax.shard_map(
        f,
        mesh=within if within.manual_axes else mesh,
        in_specs=specs(axes),
        out_specs=specs(out_axes),
        axis_names=set(mesh.axis_names) - set(within.manual_axes),
        check_vma=False,
    )


def local_rows(rows: int) -> int:
    """Return how many rows of a batch a device of the mesh has."""
    mesh = _MESH.get()
    if mesh is None:
        return rows
    return named_sharding(mesh, ("batch",), (rows,)).shard_shape((rows,))[0]


def shards_tokens() -> bool:
    """Return whether the mesh shards tokens, outside of a `shard_map` over `sequence`."""
    mesh = _MESH.get()
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return mesh is not None and mesh.shape["sequence"] > 1 and "sequence" not in manual
