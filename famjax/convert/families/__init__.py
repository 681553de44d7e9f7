"""Families of pretrained models: translation of their config.json and their tensor layouts.

docs/architecture.md says how to add one.
"""

from __future__ import annotations

from dataclasses import replace

from famjax.config.derived import has_linear_cross, layer_mixers
from famjax.config.resolved import ResolvedModelConfig, resolve_model
from famjax.config.schema import ArchConfig, EncoderConfig, ModelConfig
from famjax.convert.families.bart import BART
from famjax.convert.families.common import Family, shortest_pattern
from famjax.convert.families.famjax import FAMJAX
from famjax.convert.families.gemma import GEMMA, GEMMA2, GEMMA3
from famjax.convert.families.gpt2 import GPT2
from famjax.convert.families.gpt_neox import GPT_NEOX
from famjax.convert.families.keys import HF
from famjax.convert.families.llama import LLAMA
from famjax.convert.families.marian import MARIAN
from famjax.convert.families.mistral import MISTRAL
from famjax.convert.families.qwen import QWEN2, QWEN3
from famjax.core.errors import UserError, did_you_mean
from famjax.mixers import MIXERS, mixer_specs

# by model_type
FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gpt_neox": GPT_NEOX,
    "gpt2": GPT2,
    "marian": MARIAN,
    "bart": BART,
    "famjax": FAMJAX,
}
# transformers' classes of the others demand a width that is a multiple of the heads
_ANY_WIDTH = (MISTRAL, QWEN2, QWEN3, GEMMA)


def find_family(hf: HF) -> Family:
    """Return the family of a config.json by its model_type."""
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise UserError(
            f"config.json: model_type={kind!r} is not supported{did_you_mean(str(kind), FAMILIES)} "
            f"(known: {', '.join(FAMILIES)})"
        )
    return FAMILIES[kind]


def native_family(model: ModelConfig, prefer: str = "") -> Family | None:
    """Return the Hugging Face family that can represent a model exactly, or None.

    Args:
      prefer: a model_type to try first, if several families can.
    """
    if model.stack != "residual" or not all(spec.layer_type for spec in mixer_specs(model)):
        return None
    plain = normalize_model(model)
    first = [FAMILIES[prefer]] if prefer in FAMILIES else []
    for family in [*first, *FAMILIES.values()]:
        if family is not FAMJAX and _represents(family, plain):
            return family
    return None


def _represents(family: Family, plain: ResolvedModelConfig) -> bool:
    """Return whether a model, normalized, survives a round trip through a family's config.json."""
    if plain.width % plain.heads and family not in _ANY_WIDTH:
        return False
    try:
        return normalize_model(family.model(family.serialize(plain))) == plain
    except UserError:
        return False


def normalize_model(model: ModelConfig) -> ResolvedModelConfig:
    """Return a config of the same function with defaults filled in and unused keys reset."""
    model, default = resolve_model(model), ModelConfig()
    used = {key for spec in mixer_specs(model) for key in spec.keys}
    rest = {"scan_layers", "remat", "dtype", "dropout"}
    for key in {key for spec in MIXERS.values() for key in spec.keys} - used - {"model.capacity"}:
        rest.add(key.split(".")[1])
    # in the families of other libraries nothing but speed depends on blocks
    if all(spec.layer_type for spec in mixer_specs(model)):
        rest.add("block_len")
    if not any(spec.smears_keys for spec in mixer_specs(model)):
        rest.add("smeared_keys")
    if not model.ngram_memory:
        rest.add("ngram_slots")
    if has_linear_cross(model):
        rest.discard("linear")
    else:
        model = replace(model, encoder=replace(model.encoder, features=EncoderConfig().features))
    mixers = layer_mixers(model)
    return replace(
        model,
        **{name: getattr(default, name) for name in rest},
        mixer=shortest_pattern(mixers) if mixers else default.mixer,
        rope_base=model.rope_base if model.arch.rotary_fraction else default.rope_base,
        arch=_normalize_arch(model),
    )


def _normalize_arch(model: ResolvedModelConfig) -> ArchConfig:
    default, arch = ArchConfig(), model.arch
    ramp = ["rope_low", "rope_high", "rope_length"]
    rest = {"none": ["rope_factor", *ramp], "linear": ramp, "llama3": []}[arch.rope_scaling]
    local = arch.local_rope_base
    if not any(spec.is_local for spec in mixer_specs(model)) or not arch.rotary_fraction:
        local = 0.0
    elif not local and arch.rope_scaling == "none":
        local = model.rope_base
    return replace(
        arch,
        **{name: getattr(default, name) for name in rest},
        local_rope_base=local,
    )
