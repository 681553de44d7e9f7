"""Selection by lane between two arrays or two states, as with `jnp.where`.

Lanes are the first axis in the state of a mixer. In the state of a stack they are the second axis,
after the repeats of the layers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from famjax.core.types import Array, Context, State


def select_rows(mask: Array, new: Array | float, old: Array | float, axis: int = 0) -> Array:
    """Return `new` where `mask` [b] is True, else `old`.

    Args:
      new, old: [b ...], or with the lanes at another axis; one of them may be a number.
      axis: the axis of the lanes.
    """
    shape = [1] * max(jnp.ndim(new), jnp.ndim(old))
    shape[axis] = -1
    return jnp.where(mask.reshape(shape), new, old)


def select_state(mask: Array, new: State, old: State, axis: int = 0) -> State:
    """Apply `select_rows` to every array of a state, in the dtypes of `new`."""
    return jax.tree.map(lambda a, b: select_rows(mask, a, b.astype(a.dtype), axis), new, old)


def select_valid(ctx: Context, new: State, old: State) -> State:
    """Return `new` where the token of a step is valid, `old` where it is padding."""
    return new if ctx.valid is None else select_state(ctx.valid[:, 0], new, old)
