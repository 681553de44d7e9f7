"""Resolved configs: every 0, or -1 of a mesh axis, that stands for another value is replaced by it.

Only this module knows what a 0 in a model's config stands for. Models, layers and the arithmetic
over their sizes take a `ResolvedModelConfig` and read plain fields; a program takes a
`ResolvedConfig`, which `famjax.train.resolve.resolve` makes. Both are subclasses of the configs, so
whatever takes a config takes them too. `dataclasses.replace` keeps their type and does not resolve
again: change a size before it is resolved, not after.

A 0 that switches something off is a value and stays: `lora.rank`, `logit_cap`, `local_rope_base`
(swa layers rotate as all others), `clip_norm`, `holdout`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from famjax.config.schema import Config, ModelConfig


@dataclass(frozen=True)
class ResolvedModelConfig(ModelConfig):
    """A model config from `resolve_model`; `vocab_size` may still be 0, for the tokenizer's."""


@dataclass(frozen=True)
class ResolvedConfig(Config):
    """A config from `resolve`, with vocabulary size, all mesh axes, and steps of a toy task."""

    model: ResolvedModelConfig = field(kw_only=True)


class Sizes(NamedTuple):
    """Sizes of a model: d, h, g, e and the hidden width of the feed-forward."""

    d: int
    h: int
    g: int
    e: int
    hidden: int


def sizes(model: ModelConfig) -> Sizes:
    """Return a model's sizes, which may be inconsistent or too large for a float."""
    e = model.head_dim or model.width // max(model.heads, 1)
    hidden = model.mlp_width or 4 * model.width
    return Sizes(model.width, model.heads, model.kv_heads or model.heads, e, hidden)


def num_features(model: ModelConfig) -> int:
    """Return k, the number of elements of phi(x); for elu, which has no projection, it is e."""
    return sizes(model).e if model.linear.map == "elu" else model.linear.features


def resolve_model(model: ModelConfig) -> ResolvedModelConfig:
    """Return the config with every size filled in that follows from other sizes; idempotent."""
    if isinstance(model, ResolvedModelConfig):
        return model
    s = sizes(model)
    arch, lora, linear = model.arch, model.lora, model.linear
    filled = {
        "kv_heads": s.g,
        "head_dim": s.e,
        "mlp_width": s.hidden,
        "delta_heads": model.delta_heads or s.g,
        "arch": replace(
            arch,
            embed_scale=arch.embed_scale or model.width**0.5,
            query_scale=arch.query_scale or float(s.e),
        ),
        "lora": replace(lora, alpha=lora.alpha or lora.rank) if lora.rank else lora,
        "linear": replace(linear, features=num_features(model)),
    }
    return ResolvedModelConfig(**(vars(model) | filled))
