"""Initializes a Feedback Transformer from another model, where parameter names or shapes differ.

Feedback Transformer v1 (arXiv 2002.09402v1), 3.2, "Initializing with Transformers": it "shares all
of its parameters with a Transformer model, with the exception of few parameters w".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from famjax.config.schema import ModelConfig
from famjax.core.errors import UserError
from famjax.core.types import Array

Weights = dict[tuple[str, int | None], Array]

# shared key and value projections are initialized from this layer
_SHARED_KV_LAYER = 0


def feedback_weight(
    name: str,
    shape: jax.ShapeDtypeStruct,
    source: Weights,
    old_model: ModelConfig,
    new: ModelConfig,
) -> Array | None:
    """Return a converted weight; None if it needs no conversion.

    Args:
      name: canonical name, see `famjax.models.remap_params.canonical_name`.
      shape: shape and dtype of the weight in the model `new`.
      source: the given weights, by canonical name and index in the layer pattern.
      old_model: config of the given weights.
      new: config of the model that is initialized.
    """
    old = source.get((name, None if name.startswith("stack.") else 0))
    if name == "stack.mix":
        same = old is not None and old.shape == shape.shape
        return old if same else jnp.zeros(shape.shape)
    if name == "stack.distances" and old is not None:
        return _resize_span(old, shape.shape[1])
    if name == "layer.span":
        if old is None:
            return jnp.full(shape.shape, new.feedback.span_start)
        # as many tokens as before; they are fractions of the longest span
        return jnp.minimum(old * (old_model.feedback.span / new.feedback.span), 1)
    if name.startswith("stack.keys.") and old is None:
        return source["layer.mixer.qkv." + name.removeprefix("stack.keys."), 0][_SHARED_KV_LAYER]
    if name.startswith("layer.mixer.qkv.") and old is None:
        shared = source["stack.keys." + name.removeprefix("layer.mixer.qkv."), None]
        return jnp.broadcast_to(shared, shape.shape)
    return None


def _resize_span(distances: Array, span: int) -> Array:
    """Crop or pad [e other] to [e span], farthest first; padding repeats the farthest vector."""
    missing = max(span - distances.shape[1], 0)
    return jnp.pad(distances, ((0, 0), (missing, 0)), mode="edge")[:, -span:]


def check_same_stack(old: ModelConfig, new: ModelConfig) -> None:
    """Raise a `UserError` if a stack cannot be initialized from another stack's weights."""
    if "lstm" in (old.stack, new.stack) and old.stack != new.stack:
        raise UserError(
            f"model.stack={new.stack}: the given weights are of model.stack={old.stack}, which has "
            "no parameters in common with it; train from scratch"
        )
    old_positions, positions = _positions(old), _positions(new)
    if old_positions == positions:
        return
    hint = f"model.feedback.positions={old_positions}"
    if new.stack == "residual":
        hint = f"model.stack={old.stack}"
    raise UserError(
        f"model.stack={new.stack} with {positions} positions: the given weights have "
        f"{old_positions} ones; set {hint}"
    )


def _positions(model: ModelConfig) -> str:
    has_choice = model.stack in ("feedback", "transformer")
    return model.feedback.positions if has_choice else "rotary"
