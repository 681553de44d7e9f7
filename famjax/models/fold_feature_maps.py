"""Folds feature maps into the query and key projections, for inference (T2R, Equation 8)."""

from __future__ import annotations

from flax import nnx

from famjax.config.derived import has_linear_cross
from famjax.config.resolved import resolve_model
from famjax.config.schema import ModelConfig
from famjax.layers.feature_map import LEARNED
from famjax.mixers import mixer_specs
from famjax.models.language_model import LanguageModel
from famjax.stacks.residual import ResidualStack


def why_not_foldable(config: ModelConfig) -> str:
    """Return why a model's feature maps cannot be folded, or ""."""
    c, e = config.linear, resolve_model(config).head_dim
    if not any(spec.has_feature_map for spec in mixer_specs(config)):
        return "it has no linear attention"
    if c.map not in LEARNED:
        return f"model.linear.map={c.map} is not a function of W x + b"
    if c.rope and int(e * config.arch.rotary_fraction):
        return "queries and keys are rotated before the map; train with model.linear.rope=false"
    if config.arch.qk_norm:
        return "queries and keys are normalized before the map (model.arch.qk_norm=true)"
    if config.lora.rank:
        return "the adapters are not merged"
    sizes = {"linear.features": c.features}
    if has_linear_cross(config):
        sizes["encoder.features"] = config.encoder.features
    for name, size in sizes.items():
        if size * (config.width - e) > config.width * e:
            return f"the projections would grow, model.{name}={size} for heads of {e}"
    return ""


def fold_feature_maps(model: LanguageModel) -> LanguageModel:
    """Return the same function without feature maps; requires an empty `why_not_foldable`.

    The state is unchanged; the parameters no longer match a config.
    """
    model = nnx.merge(*nnx.split(model))
    assert isinstance(model.stack, ResidualStack)
    for layer in model.stack.layers:
        layer.mixer.fold_feature_map()
        if layer.cross is not None:
            layer.cross.fold_feature_map()
    return model
