"""How arrays lie on the mesh: a table of names, outside the maths.

Parameters have logical axes by their path, states by their mixer's `state_axes`, batches by rows
and tokens. Each logical axis goes to mesh axes; one that does not divide evenly is replicated
instead. What goes from token to token where they lie on several devices is in
`famjax.core.sequence_parallel`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from famjax.core.config import MeshConfig
from famjax.core.mesh import Demand, choose
from famjax.core.types import Array, Axes

# the mesh axes that share the rows of a batch
BATCH = ("data", "fsdp")

# elements of a parameter that should not be on every device
LARGE = 10**6

# what goes through the layers, [b t d]
TOKENS: Axes = ("batch", "tokens", None)

# logical axis -> mesh axes
MESH_AXES: dict[str, str | tuple[str, ...]] = {
    "batch": BATCH,
    "tokens": "sequence",
    "embed": "fsdp",
    # of adapters, where they have no other axis for it
    "rank": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
}

# end of a parameter's path -> its logical axes, leading axes of stacked layers left out
PARAMETER_AXES: tuple[tuple[str, Axes], ...] = (
    (r"embedding$", ("vocab", "embed")),
    (r"clusters/\d+/table$", ("vocab", "embed")),
    (r"clusters/\d+/projection$", (None, "embed")),
    (r"entries/kernel$", ("embed", None)),
    (r"positions/table$", (None, "embed")),
    (r"head/kernel$", ("embed", "vocab")),
    (r"q/kernel$", ("embed", "heads", None)),
    (r"[kv]/kernel$", ("embed", "kv_heads", None)),
    (r"out/kernel$", ("heads", None, "embed")),
    (r"(up|gate)/kernel$", ("embed", "mlp")),
    (r"down/kernel$", ("mlp", "embed")),
    # the recurrent one is read at every token, which fetches nothing of it from other rows' devices
    (r"cells/\d+/input/kernel$", ("embed", None, "mlp")),
    (r"cells/\d+/hidden/kernel$", (None, None, "mlp")),
    (r"(q|k|v|up|gate)/lora/a$", ("embed", None)),
    (r"out/lora/a$", ("heads", None, "rank")),
    (r"down/lora/a$", ("mlp", "rank")),
    (r"q/lora/b$", ("rank", "heads", None)),
    (r"[kv]/lora/b$", ("rank", "kv_heads", None)),
    (r"(up|gate)/lora/b$", ("rank", "mlp")),
    (r"(out|down)/lora/b$", (None, "embed")),
    (r"(lora|stack)/key$", (None,)),
    # one map for a key head and the query heads that read it
    (r"map/kernel$", ("kv_heads", None, None)),
    (r"map/bias$", ("kv_heads", None)),
    (r"map/tau$", ("kv_heads",)),
    # of adaptive span; of distances; of Equation 1
    (r"layers/0/span$", (None,)),
    (r"distances$", (None, None)),
    (r"mix$", (None, None)),
    (r"(scale|bias|prompt)$", ()),
)


def make_mesh(
    config: MeshConfig,
    devices: list[jax.Device] | None = None,
    demand: Demand | None = None,
) -> Mesh:
    """Return the mesh (data, fsdp, tensor, sequence) over all devices.

    Args:
      config: sizes. One that is -1 is what the others leave, several are chosen by the demand.
      devices: of the mesh; all there are, if None.
      demand: what a config asks of its mesh, see `famjax.core.mesh.choose`.

    Raises:
      UserError: the sizes do not multiply to the number of devices.
    """
    devices = devices or jax.devices()
    sizes = vars(choose(config, len(devices), demand or Demand()))
    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    # an axis may be a part of one of a TPU's torus, which jax.make_mesh leaves to v5e
    device_array = mesh_utils.create_device_mesh(
        tuple(sizes.values()), devices, allow_split_physical_axes=True
    )
    return Mesh(device_array, tuple(sizes), axis_types=kinds)


def path_name(path: tuple[Any, ...]) -> str:
    """Return a key path as "stack/layers/0/mixer/qkv/q/kernel"."""
    names = (getattr(k, "key", getattr(k, "name", getattr(k, "idx", None))) for k in path)
    return "/".join(str(name) for name in names if name != "value")


def parameter_axes(name: str, ndim: int) -> Axes:
    """Return the logical axes of a parameter by its path; leading ones are layers."""
    for pattern, axes in PARAMETER_AXES:
        if re.search(pattern, name):
            return (None,) * (ndim - len(axes)) + axes
    raise ValueError(f"no sharding rule for parameter {name}: add one to PARAMETER_AXES")


def sharding(mesh: Mesh, axes: Axes, shape: tuple[int, ...]) -> NamedSharding:
    """Return where an array of logical `axes` lies. An axis that does not divide is replicated."""
    spec = []
    for axis, size in zip(axes, shape, strict=True):
        target = MESH_AXES.get(axis) if axis else None
        names = (target,) if isinstance(target, str) else target or ()
        parts = 1
        for name in names:
            parts *= mesh.shape[name]
        spec.append(target if parts > 1 and size % parts == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def is_replicated(place: NamedSharding, size: int) -> bool:
    """Tell whether each device has all of a large parameter, of which a mesh divides others."""
    mesh = place.mesh.shape
    return size > LARGE and mesh["fsdp"] * mesh["tensor"] > 1 and not any(place.spec)


def replicated_parameters(mesh: Mesh, params: Any) -> list[str]:
    """Return the large parameters of which every device has a whole copy, though it need not."""
    leaves = jax.tree.leaves_with_path(params)
    places = jax.tree.leaves(parameter_shardings(mesh, params))
    return [
        f"{path_name(path)} {tuple(leaf.shape)}"
        for (path, leaf), place in zip(leaves, places, strict=True)
        if is_replicated(place, leaf.size)
    ]


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def parameter_shardings(mesh: Mesh, params: Any) -> Any:
    """Return a tree of shardings for a tree of parameters or their shapes."""

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        return sharding(mesh, parameter_axes(path_name(path), leaf.ndim), leaf.shape)

    return jax.tree_util.tree_map_with_path(place, params)


def optimizer_shardings(mesh: Mesh, params: Any, opt_state: Any) -> Any:
    """Return shardings for optax's state: a leaf shaped as the parameter it is of lies like it."""
    named = {
        path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    }

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = path_name(path)
        # the longest: "norm/scale" also ends the names of the layers' norms
        of = max((n for n in named if name.endswith("/" + n)), key=len, default=None)
        if of is None or named[of].shape != leaf.shape:
            return replicated(mesh)
        return sharding(mesh, parameter_axes(of, leaf.ndim), leaf.shape)

    return jax.tree_util.tree_map_with_path(place, opt_state)


def state_shardings(mesh: Mesh, axes: Any, state: Any) -> Any:
    """Return shardings for a carried state from its tree of logical axes."""
    flat, tree = jax.tree.flatten(state)
    names = jax.tree.flatten(axes, is_leaf=is_axes)[0]
    places = [sharding(mesh, a, leaf.shape) for a, leaf in zip(names, flat, strict=True)]
    return jax.tree.unflatten(tree, places)


# where what is being traced will run; None is one device, or wherever GSPMD puts it
_MESH: ContextVar[Mesh | None] = ContextVar("mesh", default=None)


def on_mesh(mesh: Mesh, f: Callable[..., Any]) -> Callable[..., Any]:
    """Return f, which is to be compiled for a mesh and may divide its rows by `shard_map_rows`."""

    @functools.wraps(f)
    def on(*args: Any) -> Any:
        token = _MESH.set(mesh)
        try:
            return f(*args)
        finally:
            _MESH.reset(token)

    return on


def with_logical_constraint(x: jax.Array, axes: Axes) -> jax.Array:
    """Return x, told to lie as its logical axes say, and so its gradient; itself without a mesh.

    Parameters and rows share the axis fsdp. Left to itself GSPMD may divide an activation as the
    parameter is, by width, and hold all rows of a batch on every device.
    """
    mesh = _gspmd_mesh()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, sharding(mesh, axes, x.shape))


def with_state_constraint(state: Any, axes: Any) -> Any:
    """Constrain a carried state to its tree of logical axes; see `with_logical_constraint`."""
    mesh = _gspmd_mesh()
    if mesh is None:
        return state
    return jax.lax.with_sharding_constraint(state, state_shardings(mesh, axes, state))


def fsdp_all_gather(params: Any) -> Any:
    """Return parameters brought together over the axes of the rows; as they are without a mesh.

    A layer's weights are fetched once then, before its products, and their gradient is summed once.
    GSPMD by itself fetches them for each product and each turn of a loop, piece by piece, and
    writes the sum of the products again with every piece.
    """
    mesh = _gspmd_mesh()
    if mesh is None:
        return params

    def place(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        axes = parameter_axes(path_name(path), leaf.ndim)
        kept = tuple(None if axis and MESH_AXES.get(axis) in BATCH else axis for axis in axes)
        return jax.lax.with_sharding_constraint(leaf, sharding(mesh, kept, leaf.shape))

    return jax.tree_util.tree_map_with_path(place, params)


def _gspmd_mesh() -> Mesh | None:
    """Return the mesh where GSPMD divides what is being traced over several devices."""
    mesh = _MESH.get()
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return None if mesh is None or mesh.size == 1 or manual else mesh


def row_shards(rows: int) -> int:
    """Return into how many parts `shard_map_rows` divides so many rows."""
    mesh = _MESH.get()
    parts = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    return parts if rows % parts == 0 else 1


def shard_map_rows(
    f: Callable[..., Any], rows: int, axes: Any, out_axes: Any
) -> Callable[..., Any]:
    """Return f, each device at work on rows of its own and on nothing else.

    What all rows share is fetched once before f, and its gradient summed once behind it. That is
    for loops: GSPMD by itself would sum in every turn, to keep a sum equal on all devices.

    Args:
      f: of arrays; what it returns for a row depends on that row and on what all share.
      rows: of the whole batch.
      axes: for each argument, prefix of a tree: which axis is the rows', None for what all share.
      out_axes: of the result.
    """
    parts = row_shards(rows)
    if parts == 1:
        return f

    def spec(axis: int | None) -> PartitionSpec:
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, BATCH)

    inner, outer = (
        jax.tree.map(spec, of, is_leaf=lambda a: a is None) for of in (tuple(axes), out_axes)
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
    """Return over how many devices so many blocks of a call, or tokens, are divided."""
    mesh = _MESH.get()
    parts = 1 if mesh is None else mesh.shape["sequence"]
    return parts if blocks % parts == 0 else 1


def shard_map_sequence(f: Callable[..., Any], axes: Any, out_axes: Any) -> Callable[..., Any]:
    """Return f, each device at work on blocks of its own; all other axes of the mesh stay GSPMD's.

    Within it collectives over "sequence" are written by hand, as `famjax.core.sequence_parallel`
    does, and `axis_index` tells which device this is.

    Args:
      f: of arrays, which may close over none.
      axes: for each argument, prefix of a tree: which axis is the blocks', None for what all share.
      out_axes: of the result; None for what f makes equal on all devices.
    """

    def spec(axis: int | None) -> PartitionSpec:
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "sequence")

    inner, outer = (
        jax.tree.map(spec, of, is_leaf=lambda a: a is None) for of in (tuple(axes), out_axes)
    )

    def here(place: Array, *args: Any) -> Any:
        token = _AXIS_INDEX.set(place[0])
        try:
            return f(*args)
        finally:
            _AXIS_INDEX.reset(token)

    mesh = _MESH.get()
    assert mesh is not None
    divided = jax.shard_map(
        here,
        mesh=mesh,
        in_specs=(PartitionSpec("sequence"), *inner),
        out_specs=outer,
        axis_names={"sequence"},
        check_vma=False,
    )
    # not jax.lax.axis_index: beside axes of GSPMD's XLA refuses it in larger programs
    return lambda *args: divided(jnp.arange(mesh.shape["sequence"]), *args)


# within `shard_map_sequence`, this device's place along the axis
_AXIS_INDEX: ContextVar[Array] = ContextVar("place")


def axis_index() -> Array:
    """Return this device's place along `sequence`, within `shard_map_sequence`."""
    return _AXIS_INDEX.get()


def all_gather_tokens(x: Array) -> Array:
    """Return [b t ...] with all tokens on every device of `sequence`."""
    mesh = _gspmd_mesh()
    if mesh is None or mesh.shape["sequence"] == 1:
        return x
    rest = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 2)
    rows = sharding(mesh, ("batch",), x.shape[:1]).spec
    spec = PartitionSpec(*rows, None, *rest)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def device() -> jax.Device:
    """Return one of those that what is being traced will run on; without a mesh, this machine's."""
    mesh = _MESH.get()
    return jax.devices()[0] if mesh is None else mesh.devices.flat[0]


def shard_map_axes(
    f: Callable[..., Any], sizes: dict[str, int], axes: tuple[Axes, ...], out_axes: tuple[Axes, ...]
) -> Callable[..., Any] | None:
    """Return f, each device at work on its part of some logical axes, and on nothing else.

    That is for kernels, which GSPMD cannot divide. None, if it cannot be known how its arguments
    lie: without a mesh where there are several devices, or within `shard_map_rows`. Within
    `shard_map_sequence` tokens are divided already.

    Args:
      f: of arrays; any part of the axes by itself gives that part of the results.
      sizes: of the axes. One that does not divide is replicated.
      axes, out_axes: of each argument and result; last ones may be left out.
    """
    mesh = _MESH.get()
    if mesh is None:
        return f if jax.device_count() == 1 else None
    if mesh.size == 1:
        return f
    within = jax.sharding.get_abstract_mesh()
    if set(within.manual_axes) - {"sequence"}:
        return None
    targets = sharding(mesh, tuple(sizes), tuple(sizes.values())).spec
    place = dict(zip(sizes, targets, strict=True))

    def specs(of: tuple[Axes, ...]) -> tuple[PartitionSpec, ...]:
        return tuple(PartitionSpec(*(place.get(a) if a else None for a in axes)) for axes in of)

    return jax.shard_map(
        f,
        mesh=within if within.manual_axes else mesh,
        in_specs=specs(axes),
        out_specs=specs(out_axes),
        axis_names=set(mesh.axis_names) - set(within.manual_axes),
        check_vma=False,
    )


def is_axes(x: Any) -> bool:
    """Tell a tuple of axis names from a named tuple of such tuples."""
    return type(x) is tuple and all(a is None or isinstance(a, str) for a in x)


def batch_sharding(mesh: Mesh, rows: int, tokens: int = 1) -> NamedSharding:
    """Return where [b t] lies."""
    return sharding(mesh, ("batch", "tokens"), (rows, tokens))
