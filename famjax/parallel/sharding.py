"""Logical axis rules: how parameters, states and activations are sharded over the mesh.

The logical axes of parameters follow from their paths, those of states from their mixer's
`state_axes`; batches have rows and tokens. Each logical axis maps to mesh axes; an axis whose size
they do not divide is replicated instead. How functions use these rules while they are traced is in
`parallel/traced.py`.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from famjax.config.schema import AXES, MeshConfig
from famjax.core.types import Axes, Params, PyTree, State
from famjax.parallel.mesh import DEVICE_BYTES, WEIGHTS_SHARE, MeshDemand, choose_mesh

# the mesh axes that shard the rows of a batch
BATCH = ("data", "fsdp")

# parameters with more elements than this should not be replicated
LARGE_PARAMETER_SIZE = 10**6

# logical axes of activations, [b t d]
TOKENS: Axes = ("batch", "tokens", None)

# logical axis -> mesh axes
MESH_AXES: dict[str, str | tuple[str, ...]] = {
    "batch": BATCH,
    "tokens": "sequence",
    "embed": "fsdp",
    # for adapters without an embed axis
    "rank": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
}

# end of a parameter's path -> its logical axes, without the leading axes of stacked layers; modules
# with further parameters add theirs with `register_parameter_axes`
PARAMETER_AXES: list[tuple[str, Axes]] = [
    (r"embedding$", ("vocab", "embed")),
    (r"clusters/\d+/table$", ("vocab", "embed")),
    (r"clusters/\d+/projection$", (None, "embed")),
    (r"entries/kernel$", ("embed", None)),
    (r"positions/table$", (None, "embed")),
    (r"logit_bias$", ("vocab",)),
    (r"head/kernel$", ("embed", "vocab")),
    (r"q/kernel$", ("embed", "heads", None)),
    (r"[kv]/kernel$", ("embed", "kv_heads", None)),
    (r"out/kernel$", ("heads", None, "embed")),
    (r"(up|gate)/kernel$", ("embed", "mlp")),
    (r"down/kernel$", ("mlp", "embed")),
    (r"(q|k|v|up|gate)/lora/a$", ("embed", None)),
    (r"out/lora/a$", ("heads", None, "rank")),
    (r"down/lora/a$", ("mlp", "rank")),
    (r"q/lora/b$", ("rank", "heads", None)),
    (r"[kv]/lora/b$", ("rank", "kv_heads", None)),
    (r"(up|gate)/lora/b$", ("rank", "mlp")),
    (r"(out|down)/lora/b$", (None, "embed")),
    (r"(lora|stack|encoder)/key$", (None,)),
    (r"(scale|bias|prompt|prefix)$", ()),
]


def register_parameter_axes(*rows: tuple[str, Axes]) -> None:
    """Add the logical axes of a module's parameters; they are matched before all others.

    Args:
      *rows: pairs of a regular expression for the end of the path, and the axes.
    """
    PARAMETER_AXES[:0] = [row for row in rows if row not in PARAMETER_AXES]


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """Return the mesh (data, fsdp, tensor, sequence) over all devices.

    Args:
      config: sizes of the axes. A single -1 is inferred; for several see `famjax.train.resolve`.
      devices: devices of the mesh; None means all devices.

    Raises:
      UserError: the sizes do not multiply to the number of devices.
    """
    devices = devices or jax.devices()
    sizes = vars(choose_mesh(config, len(devices), MeshDemand()))
    # an axis may be part of a physical axis of a TPU torus; jax.make_mesh allows that only on v5e
    device_array = mesh_utils.create_device_mesh(
        tuple(sizes.values()), devices, allow_split_physical_axes=True
    )
    return _mesh(device_array)


def device_limit(device_bytes: int | None = None) -> int:
    """Return the bytes that weights and state may take on a device.

    Args:
      device_bytes: bytes of memory of a device; None takes that of a local device.
    """
    return int(WEIGHTS_SHARE * (device_bytes or local_device_bytes()))


def local_device_bytes() -> int:
    """Return the memory of a device, or a default if the device does not report it."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", DEVICE_BYTES)


def _mesh(devices: np.ndarray) -> Mesh:
    """Return the mesh of devices [data fsdp tensor sequence]."""
    return Mesh(devices, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


def mesh_of(params: Params) -> Mesh:
    """Return the mesh that parameters are sharded over, of one device if they are on one."""
    placement = jax.tree.leaves(params)[0].sharding
    if isinstance(placement, NamedSharding):
        assert isinstance(placement.mesh, Mesh)
        return placement.mesh
    return _mesh(np.array(list(placement.device_set)).reshape(1, 1, 1, 1))


def weight_shards(mesh: Mesh | None) -> int:
    """Return the number of devices that share a copy of the parameters; 1 without a mesh."""
    return mesh.shape["fsdp"] * mesh.shape["tensor"] if mesh else 1


def path_name(path: tuple[Any, ...]) -> str:
    """Return a key path as "stack/layers/0/mixer/qkv/q/kernel"."""
    names = (getattr(k, "key", getattr(k, "name", getattr(k, "idx", None))) for k in path)
    return "/".join(str(name) for name in names if name != "value")


def parameter_axes(name: str, ndim: int) -> Axes:
    """Return the logical axes of a parameter by its path; leading axes are those of layers."""
    for pattern, axes in PARAMETER_AXES:
        if re.search(pattern, name):
            return (None,) * (ndim - len(axes)) + axes
    raise ValueError(f"no sharding rule for parameter {name}: see register_parameter_axes")


def named_sharding(mesh: Mesh, axes: Axes, shape: tuple[int, ...]) -> NamedSharding:
    """Return the sharding of an array by its logical axes; indivisible axes are replicated."""
    spec = []
    for axis, size in zip(axes, shape, strict=True):
        target = MESH_AXES.get(axis) if axis else None
        names = (target,) if isinstance(target, str) else target or ()
        shards = 1
        for name in names:
            shards *= mesh.shape[name]
        spec.append(target if shards > 1 and size % shards == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


def is_replicated(sharding: NamedSharding, size: int) -> bool:
    """Return whether a large parameter is replicated on a mesh that shards parameters."""
    mesh = sharding.mesh.shape
    return (
        size > LARGE_PARAMETER_SIZE and mesh["fsdp"] * mesh["tensor"] > 1 and not any(sharding.spec)
    )


def replicated_parameters(mesh: Mesh, params: Params) -> list[str]:
    """Return the large parameters that are replicated although the mesh shards parameters."""
    leaves = jax.tree.leaves_with_path(params)
    shardings = jax.tree.leaves(parameter_shardings(mesh, params))
    return [
        f"{path_name(path)} {tuple(leaf.shape)}"
        for (path, leaf), sharding in zip(leaves, shardings, strict=True)
        if is_replicated(sharding, leaf.size)
    ]


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def parameter_shardings(mesh: Mesh, params: Params) -> PyTree:
    """Return a tree of shardings for a tree of parameters or their shapes."""

    def leaf_sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        return named_sharding(mesh, parameter_axes(path_name(path), leaf.ndim), leaf.shape)

    return jax.tree_util.tree_map_with_path(leaf_sharding, params)


def optimizer_shardings(mesh: Mesh, params: Params, opt_state: PyTree) -> PyTree:
    """Return shardings for optax's state: a leaf shaped like its parameter is sharded like it."""
    by_name = {
        path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    }

    def leaf_sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = path_name(path)
        # the longest match: the name "norm/scale" also ends the names of the layers' norms
        param = max((n for n in by_name if name.endswith("/" + n)), key=len, default=None)
        if param is None or by_name[param].shape != leaf.shape:
            return replicated(mesh)
        return named_sharding(mesh, parameter_axes(param, leaf.ndim), leaf.shape)

    return jax.tree_util.tree_map_with_path(leaf_sharding, opt_state)


def state_shardings(mesh: Mesh, axes: Any, state: State) -> PyTree:
    """Return shardings for a carried state from its tree of logical axes."""
    flat, tree = jax.tree.flatten(state)
    names = jax.tree.flatten(axes, is_leaf=is_axes)[0]
    shardings = [named_sharding(mesh, a, leaf.shape) for a, leaf in zip(names, flat, strict=True)]
    return jax.tree.unflatten(tree, shardings)


def is_axes(x: Any) -> bool:
    """Return whether x is a tuple of axis names, and not a named tuple of such tuples."""
    return type(x) is tuple and all(a is None or isinstance(a, str) for a in x)


def batch_sharding(mesh: Mesh, rows: int, tokens: int = 1) -> NamedSharding:
    """Return the sharding of a batch [b t]."""
    return named_sharding(mesh, ("batch", "tokens"), (rows, tokens))
