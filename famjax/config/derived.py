"""What follows from a model's config: its sizes, the mixer of each layer, the clusters."""

from __future__ import annotations

from typing import NamedTuple

from famjax.config.resolved import resolve_model
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
    r = resolve_model(model)
    return Sizes(r.width, r.heads, r.kv_heads, r.head_dim, r.mlp_width)


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
