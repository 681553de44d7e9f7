"""Feature maps folded into the projections of queries and keys, for use alone (T2R, Equation 8)."""

from __future__ import annotations

from flax import nnx

from famjax.core.checks import mixer_pattern
from famjax.core.config import ModelConfig
from famjax.layers.feature_map import LEARNED
from famjax.layers.qkv import head_dim
from famjax.mixers.linear import Linear
from famjax.models.language_model import LanguageModel


def why_not_foldable(config: ModelConfig) -> str:
    """Return what keeps a model's feature maps from being folded, or nothing."""
    c, e = config.linear, head_dim(config)
    if "linear" not in mixer_pattern(config):
        return "it has no linear attention"
    if c.map not in LEARNED:
        return f"model.linear.map={c.map} is no function of W x + b"
    if c.rope and int(e * config.arch.rotary_fraction):
        return "queries and keys are rotated before them; train with model.linear.rope=false"
    if config.arch.qk_norm:
        return "queries and keys are normed before them (model.arch.qk_norm=true)"
    if config.lora.rank:
        return "the adapters are not merged"
    if c.features * (config.width - e) > config.width * e:
        return f"the projections would grow, model.linear.features={c.features} for heads of {e}"
    return ""


def folded(model: LanguageModel) -> LanguageModel:
    """Return the same function without maps, where `why_not_foldable` says nothing.

    The state is the same; the parameters are no longer those of a config.
    """
    model = nnx.merge(*nnx.split(model))
    for layer in model.stack.layers:
        if isinstance(layer.mixer, Linear):
            layer.mixer.merged_map()
    return model
