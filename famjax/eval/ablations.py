"""Ablations that take the memory away while a model reads, to measure whether it is used.

Each ablation sets a part of the state back to its initial value at the start of every block:

- `reset`: the whole state.
- `memory`: FAM, or another memory beside the window, and the n-gram memory. For `rmt` and
  `autocompressor`, which have no window, this is the same as `reset`.
- `segments`: the memory segments, which are the window's blocks before the current one. For `fm`,
  the outputs of those blocks, which are its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from famjax.core.errors import UserError, did_you_mean
from famjax.core.lanes import select_rows
from famjax.mixers.fm import FmState
from famjax.mixers.window import WindowState
from famjax.models.language_model import LanguageModel
from famjax.ops.ngrams import NgramState
from famjax.stacks.segments import SegmentState

ABLATIONS = ("reset", "memory", "segments")
# in place of an ablation's name: the model as it is
UNABLATED = ""


def parse_ablations(text: str) -> tuple[str, ...]:
    """Parse "reset,memory" into names, in the order of `ABLATIONS`."""
    names = {part.strip() for part in text.split(",")} - {""}
    for name in sorted(names - set(ABLATIONS)):
        known = ", ".join(ABLATIONS)
        raise UserError(f"--ablate {name}: unknown{did_you_mean(name, ABLATIONS)} (known: {known})")
    return tuple(name for name in ABLATIONS if name in names)


def ablated_leaves(model: LanguageModel, ablation: str) -> tuple[bool, ...]:
    """Return for each array of a model's state whether "memory" or "segments" takes it away.

    Raises:
      UserError: the model's state has no such part.
    """
    parts = jax.tree.leaves(_parts(model.state_shapes()))
    if ablation not in parts:
        what = "memory beside its window" if ablation == "memory" else "memory segments"
        raise UserError(f"--ablate {ablation}: the model has no {what}; leave it out")
    return tuple(part == ablation for part in parts)


def _parts(node: Any) -> Any:
    """Return a tree with the structure of a state, and the name of each array's part as leaves.

    The name is "memory", "segments", or "" for arrays that no ablation takes away.
    """
    if isinstance(node, WindowState):
        # [repeats b m+1 w g e]; with m = 0 only the block that is being filled is there, and
        # nothing is taken away
        has_segments = node.k.shape[-4] > 1
        return jax.tree.map(lambda _: "segments" if has_segments else "", node)
    if isinstance(node, FmState):
        # the ablation happens at the start of a block, where the state holds nothing else
        return jax.tree.map(lambda _: "segments", node)
    if isinstance(node, NgramState):
        return jax.tree.map(lambda _: "memory", node)
    if isinstance(node, SegmentState):
        # the ablation happens at the start of a segment, where the caches hold only the memory
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
    ablated: Sequence[bool],
) -> list[jax.Array]:
    """Return the arrays of a state, with some of them reset to their initial values in some lanes.

    Args:
      leaves: arrays of the state, each with b lanes on its axis in `axes`.
      initial: initial values of the same arrays.
      lanes: [b] bool, the lanes to reset.
      axes: for each array, the axis of the lanes.
      ablated: for each array, whether to reset it.
    """
    return [
        select_rows(lanes, first, leaf, axis) if reset else leaf
        for leaf, first, axis, reset in zip(leaves, initial, axes, ablated, strict=True)
    ]
