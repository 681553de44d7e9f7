"""Weights that only a Feedback Transformer has, or keeps in another place, from another model.

Feedback Transformer v1 (arXiv 2002.09402v1), 3.2, "Initializing with Transformers": it "shares all
of its parameters with a Transformer model, with the exception of few parameters w".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from famjax.core.config import ModelConfig
from famjax.core.errors import UserError
from famjax.core.types import Array

Weights = dict[tuple[str, int | None], Array]

# common keys and values begin as this layer's
_LAYER = 0


def feedback_weight(
    name: str, shape: jax.ShapeDtypeStruct, there: Weights, new: ModelConfig
) -> Array | None:
    """Return a weight that cannot be taken as it is; None where it can.

    Args:
      name: as `famjax.models.remap_params.parameter` gives it.
      shape: that the model `new` has.
      there: weights that are given, by name and place in the pattern of layers.
    """
    found = there.get((name, None if name.startswith("stack.") else 0))
    if name == "stack.mix":
        kept = found is not None and found.shape == shape.shape
        return found if kept else jnp.zeros(shape.shape)
    if name == "stack.distances" and found is not None:
        return _nearest(found, shape.shape[1])
    if name == "layer.span" and found is None:
        return jnp.full(shape.shape, new.feedback.span_start)
    if name.startswith("stack.keys.") and found is None:
        return there["layer.mixer.qkv." + name.removeprefix("stack.keys."), 0][_LAYER]
    if name.startswith("layer.mixer.qkv.") and found is None:
        common = there["stack.keys." + name.removeprefix("layer.mixer.qkv."), None]
        return jnp.broadcast_to(common, shape.shape)
    return None


def _nearest(distances: Array, span: int) -> Array:
    """Return [e span] of [e other], far first: the nearest, and the farthest again beyond them."""
    missing = max(span - distances.shape[1], 0)
    return jnp.pad(distances, ((0, 0), (missing, 0)), mode="edge")[:, -span:]


def refuse_other_stack(old: ModelConfig, new: ModelConfig) -> None:
    """Raise a `UserError` where a stack cannot begin with the weights of another."""
    if "lstm" in (old.stack, new.stack) and old.stack != new.stack:
        raise UserError(
            f"model.stack={new.stack}: the weights that are given are of a model with "
            f"model.stack={old.stack}, which has nothing in common with it; train from scratch"
        )
    there, here = _positions(old), _positions(new)
    if there == here:
        return
    mend = f"model.feedback.positions={there}"
    if new.stack == "residual":
        mend = f"model.stack={old.stack}"
    raise UserError(
        f"model.stack={new.stack} with {here} positions: the weights that are given know {there} "
        f"ones; set {mend}"
    )


def _positions(model: ModelConfig) -> str:
    return "rotary" if model.stack in ("residual", "lstm") else model.feedback.positions
