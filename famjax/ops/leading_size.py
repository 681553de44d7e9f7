"""The size of the axis that a scan runs over, checked in all its arguments."""

from __future__ import annotations

from typing import Any

import jax


def leading_size(scan: str, **arguments: Any) -> int:
    """Return the size of the first axis, which all arrays in the arguments must share.

    Type annotations cannot express this for generic pytrees, and JAX's own error names neither the
    argument nor the scan.

    Args:
      scan: name of the scan, for the error.
      **arguments: pytrees by the name that the error uses.

    Raises:
      ValueError: the sizes differ, an array has no axes, or there are no arrays; a bug in the
        caller.
    """
    sizes: dict[str, int] = {}
    for argument, tree in arguments.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = argument + jax.tree_util.keystr(path)
            if not leaf.shape:
                raise ValueError(f"{scan}: {name} is a scalar; it needs the axis of the scan")
            sizes[name] = leaf.shape[0]
    if not sizes:
        raise ValueError(f"{scan}: {' and '.join(arguments)} have no arrays; give it one")
    first = next(iter(sizes))
    for name, size in sizes.items():
        if size != sizes[first]:
            raise ValueError(
                f"{scan}: {name} has {size} iterations, and {first} has {sizes[first]}; they must "
                "be equal"
            )
    return sizes[first]
