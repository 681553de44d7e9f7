"""What follows from a model's config: its sizes, the mixer of each layer, the clusters."""

from __future__ import annotations

from typing import NamedTuple

from famjax.config.schema import ModelConfig


class Sizes(NamedTuple):
    """d, h, g, e and the feed-forward's hidden width of a model."""

    d: int
    h: int
    g: int
    e: int
    hidden: int


def sizes(model: ModelConfig) -> Sizes:
    """Return a model's sizes; they need not be consistent."""
    e = model.head_dim or model.width // max(model.heads, 1)
    hidden = model.mlp_width or 4 * model.width
    return Sizes(model.width, model.heads, model.kv_heads or model.heads, e, hidden)


def mixer_pattern(model: ModelConfig) -> tuple[str, ...]:
    """Return the mixers of `model.mixer`, the pattern that the residual stack repeats.

    Empty for all other stacks.
    """
    return tuple(model.mixer.split(",")) if model.stack == "residual" else ()


def layer_mixers(model: ModelConfig) -> tuple[str, ...]:
    """Return the mixer of every layer; empty for a stack without mixers."""
    names = mixer_pattern(model)
    return tuple(names[i % len(names)] for i in range(model.layers)) if names else ()


def cutoffs(model: ModelConfig) -> tuple[int, ...]:
    """Return the first word of each cluster after the first; () means one cluster."""
    text = model.adaptive.cutoffs
    return tuple(int(part) for part in text.split(",")) if text else ()
