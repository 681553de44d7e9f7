"""Folds feature maps into the query and key projections, for inference (T2R, Equation 8)."""

from __future__ import annotations

from typing import Literal

from flax import nnx

from famjax.config.derived import has_linear_cross
from famjax.config.resolved import resolve_model
from famjax.config.schema import ModelConfig
from famjax.layers.cross_attention import CrossAttention
from famjax.layers.feature_map import LEARNED
from famjax.mixers import mixer_specs
from famjax.mixers.mixer import Mixer
from famjax.models.language_model import LanguageModel

Kind = Literal["causal", "cross"]


def why_not_foldable(config: ModelConfig) -> dict[Kind, str]:
    """Return why the feature maps of causal and of cross attention cannot be folded.

    A reason is "" if they can. Kinds of attention without feature maps are left out.
    """
    reasons: dict[Kind, str] = {}
    if any(spec.has_feature_map for spec in mixer_specs(config)):
        reasons["causal"] = _why_not(config, "linear.features", config.linear.features)
        if config.linear.rope and int(resolve_model(config).head_dim * config.arch.rotary_fraction):
            rotated = "queries and keys are rotated before the map; train with "
            reasons["causal"] = reasons["causal"] or f"{rotated}model.linear.rope=false"
    if has_linear_cross(config):
        reasons["cross"] = _why_not(config, "encoder.features", config.encoder.features)
    return reasons


def _why_not(config: ModelConfig, name: str, size: int) -> str:
    e = resolve_model(config).head_dim
    if config.linear.map not in LEARNED:
        return f"model.linear.map={config.linear.map} is not a function of W x + b"
    if config.arch.qk_norm:
        return "queries and keys are normalized before the map (model.arch.qk_norm=true)"
    if config.lora.rank:
        return "the adapters are not merged"
    if size * (config.width - e) > config.width * e:
        return f"the projections would grow, model.{name}={size} for heads of {e}"
    return ""


def folding_notes(config: ModelConfig) -> list[str]:
    """Return a line for each kind of attention whose feature maps cannot be folded."""
    return [
        f"feature maps of {kind} attention are not folded into the projections: {reason}"
        for kind, reason in why_not_foldable(config).items()
        if reason
    ]


def fold_feature_maps(model: LanguageModel, config: ModelConfig) -> LanguageModel:
    """Return a model that computes the same without the feature maps that can be folded.

    Its state is the same, but its parameters no longer match a config.

    Args:
      config: the model's config.
    """
    reasons = why_not_foldable(config)
    model = nnx.merge(*nnx.split(model))
    for _, module in list(nnx.iter_graph(model)):
        kind: Kind = "cross" if isinstance(module, CrossAttention) else "causal"
        if isinstance(module, CrossAttention | Mixer) and not reasons.get(kind, kind):
            module.fold_feature_map()
    return model
