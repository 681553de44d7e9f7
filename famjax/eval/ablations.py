"""Streams whose memory is taken away: is it used?

`reset`: the whole state at every block. `memory`: FAM or another memory beside the window, which
every block then finds at its initial value; of `rmt` and `autocompressor`, which have no window, it
is `reset`. `segments`: the window's blocks before the own one; of `fm`
their outputs, which are its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from famjax.core.errors import UserError, nearest
from famjax.core.types import State
from famjax.mixers.fm import FmState
from famjax.mixers.window import WindowState
from famjax.models.language_model import LanguageModel
from famjax.stacks.segments import SegmentState

ABLATIONS = ("reset", "memory", "segments")


def parse_ablations(text: str) -> tuple[str, ...]:
    """Parse "reset,memory" into names, in the order of `ABLATIONS`."""
    names = {part.strip() for part in text.split(",")} - {""}
    for name in sorted(names - set(ABLATIONS)):
        known = ", ".join(ABLATIONS)
        raise UserError(f"--ablate {name}: unknown{nearest(name, ABLATIONS)} (known: {known})")
    return tuple(name for name in ABLATIONS if name in names)


def ablated_leaves(model: LanguageModel, ablation: str) -> tuple[bool, ...]:
    """Return which arrays of a model's state are taken away by "memory" or "segments".

    Raises:
      UserError: the model has no such part.
    """
    state = jax.eval_shape(lambda: model.init_state(1))
    parts = jax.tree.leaves(_parts(state))
    if ablation not in parts:
        what = "memory beside its window" if ablation == "memory" else "memory segments"
        raise UserError(f"--ablate {ablation}: the model has no {what}; leave it out")
    return tuple(part == ablation for part in parts)


def _parts(node: Any) -> Any:
    """Return a tree like a state, with the name of the part that each array belongs to."""
    if isinstance(node, WindowState):
        # [repeats b m+1 w g e]: of the block being filled alone, nothing is taken away
        has_segments = node.k.shape[-4] > 1
        return jax.tree.map(lambda _: "segments" if has_segments else "", node)
    if isinstance(node, FmState):
        # at a block's start, where it is taken away, nothing else is in the state
        return jax.tree.map(lambda _: "segments", node)
    if isinstance(node, SegmentState):
        # at a segment's start, where it is taken away, the caches are the memory's alone
        return jax.tree.map(lambda _: "memory", node)
    if isinstance(node, tuple) and hasattr(node, "window"):
        fields = {
            name: _parts(value) if name == "window" else jax.tree.map(lambda _: "memory", value)
            for name, value in node._asdict().items()  # type: ignore[attr-defined]
        }
        return type(node)(**fields)
    if isinstance(node, tuple | list) and not hasattr(node, "_fields"):
        return tuple(_parts(each) for each in node)
    return jax.tree.map(lambda _: "", node)


def restore_lanes(
    leaves: Sequence[jax.Array],
    initial: Sequence[jax.Array],
    lanes: jax.Array,
    axes: Sequence[int],
    taken: Sequence[bool],
) -> list[jax.Array]:
    """Return arrays of a state, those that are `taken` at their initial value in `lanes` [b].

    Args:
      axes: of each array, that of the lanes.
    """

    def restore(leaf: State, first: State, axis: int) -> Any:
        shape = [1] * leaf.ndim
        shape[axis] = -1
        return jax.numpy.where(lanes.reshape(shape), first, leaf)

    return [
        restore(leaf, first, axis) if take else leaf
        for leaf, first, axis, take in zip(leaves, initial, axes, taken, strict=True)
    ]
