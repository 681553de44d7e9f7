"""Checks whether a model's parameters can be mapped to another model (`remap_params`)."""

from __future__ import annotations

from typing import Any

from famjax.config.derived import has_linear_cross, layer_mixers
from famjax.config.resolved import resolve_model
from famjax.config.schema import ArchConfig, ModelConfig
from famjax.core.errors import UserError
from famjax.layers import feature_map
from famjax.mixers import MIXERS, mixer_specs
from famjax.models.remap_feedback import check_same_stack

# Config fields that may differ between the given weights and the model.
#
# Parameters that exist because of these fields are taken from the old model if it has them in the
# same shape, and else get their initial value: the FAM prompt (fam_len), which in a segmented stack
# holds the memory or summary tokens (`init_fam_prompt`); the prefixes of fam_init, the gates of
# fam_update=gated with biases from fam_min_timescale and fam_max_timescale, the shares of
# smeared_keys, and feature maps (`init_mixer_param`); those of the short convolution and of the
# n-gram memory, 0; and those of a Feedback Transformer (`feedback_weight`).
#
# `check_compatible` checks the values that the given weights depend on: stack, arch, linear,
# smeared_keys, short_conv, ngram_memory, the gates' timescales and threshold, the encoder's layers
# and embedding, and with learned positions capacity.
_MAY_DIFFER = {
    "mixer",
    "block_len",
    "memory_segments",
    "window",
    "capacity",
    "fam_len",
    "fam_previous",
    "fam_update",
    "fam_init",
    "fam_position",
    "fam_min_timescale",
    "fam_max_timescale",
    "fam_gate_threshold",
    "delta_order",
    "delta_heads",
    "short_conv",
    "ngram_memory",
    "ngram_slots",
    "recurrent_gate",
    "smeared_keys",
    "rope_base",
    "scan_layers",
    "remat",
    "dtype",
    "lora",
    "arch",
    "linear",
    "stack",
    "feedback",
    "encoder",
    "dropout",
}
# fields of model.arch that may differ: like rope_base, they have no weights
_ARCH_MAY_DIFFER = {"rope_scaling", "rope_factor", "rope_low", "rope_high", "rope_length"}


def check_compatible(old: ModelConfig, new: ModelConfig) -> None:
    """Raise a `UserError` if weights of a model `old` cannot be mapped to a model `new`."""
    check_same_stack(old, new)
    if old.adaptive != new.adaptive:
        raise UserError(
            f"model.adaptive: the given weights have cutoffs={old.adaptive.cutoffs!r} and "
            f"factor={old.adaptive.factor}; keep them"
        )
    old, new = resolve_model(old), resolve_model(new)
    for field in vars(old):
        if field not in _MAY_DIFFER:
            _check_equal(f"model.{field}", getattr(new, field), getattr(old, field))
    _check_smearing(old, new)
    _check_at_input(old, new)
    for name in ("layers", "shared"):
        new_value, old_value = (getattr(model.encoder, name) for model in (new, old))
        _check_equal(f"model.encoder.{name}", new_value, old_value)
    if new.arch.positions == "learned" and new.capacity != old.capacity:
        raise UserError(
            f"model.capacity={new.capacity}: the given weights have {old.capacity} "
            "learned positions; keep that value, and use documents of at most that many tokens"
        )
    _check_rotation(old, new)
    _check_cross_maps(old, new)
    _check_feature_maps(old, new)
    _check_gates(old, new)
    for field in vars(ArchConfig()):
        if field not in _ARCH_MAY_DIFFER:
            _check_equal(f"model.arch.{field}", getattr(new.arch, field), getattr(old.arch, field))


def _check_equal(key: str, new_value: Any, old_value: Any, what: str = "weights") -> None:
    """Raise a `UserError` if a value is not that of the given weights.

    Args:
      what: what the given weights are called in the message.
    """
    if new_value != old_value:
        raise UserError(f"{key}={new_value}: the given {what} have {old_value}; keep that value")


def _check_smearing(old: ModelConfig, new: ModelConfig) -> None:
    """Raise a `UserError` for a layer that would lose the weights that smear its keys."""
    before = layer_mixers(old)
    if not (old.smeared_keys and before):
        return
    after = layer_mixers(new) or ("",) * len(before)
    for i, (name, other) in enumerate(zip(before, after, strict=True)):
        if not MIXERS[name].smears_keys:
            continue
        if not (other and MIXERS[other].smears_keys):
            to = f"{other}, which cannot smear its keys" if other else f"model.stack={new.stack}"
            raise UserError(
                f"model.mixer: layer {i} changes from {name} to {to}, but the given weights have "
                "smeared keys; train them with model.smeared_keys=false"
            )
        if not new.smeared_keys:
            raise UserError(
                "model.smeared_keys=false: the given weights have smeared keys; set it to true"
            )


def _check_at_input(old: ModelConfig, new: ModelConfig) -> None:
    """Raise a `UserError` for a short convolution or n-gram memory that would lose weights."""
    if new.short_conv < old.short_conv:
        raise UserError(
            f"model.short_conv={new.short_conv}: the given weights have a short convolution of "
            f"{old.short_conv} tokens, which cannot be taken away; set it to {old.short_conv}"
        )
    if new.ngram_memory < old.ngram_memory:
        raise UserError(
            f"model.ngram_memory={new.ngram_memory}: the given weights have an n-gram memory of "
            f"{old.ngram_memory} contexts, which cannot be taken away; set it to {old.ngram_memory}"
        )


def _check_rotation(old: ModelConfig, new: ModelConfig) -> None:
    """Raise a `UserError` for a layer whose RoPE base would change."""
    if not new.arch.local_rope_base or old.stack != new.stack:
        return
    for i, names in enumerate(zip(layer_mixers(old), layer_mixers(new), strict=True)):
        one, other = (MIXERS[name] for name in names)
        rope_off = other.rope_off_setting(new)
        if one is not other and (one.is_local or other.is_local) and not rope_off:
            hint = ", or set model.linear.rope=false" if other.has_feature_map else ""
            raise UserError(
                f"model.mixer: layer {i} changes from {names[0]} to {names[1]}, but this model's "
                f"local layers (swa) have RoPE base {new.arch.local_rope_base:g} and the others "
                f"{new.rope_base:g}; change only layers with full attention, and not to swa"
                f"{hint}"
            )


def _check_gates(old: ModelConfig, new: ModelConfig) -> None:
    """Raise a `UserError` if timescales or a threshold are not those of the gates that are kept."""
    has_gates = (m.fam_update == "gated" and _has_fam(m) for m in (old, new))
    if not all(has_gates) or old.fam_len != new.fam_len:
        return
    for field in ("fam_min_timescale", "fam_max_timescale"):
        new_value, old_value = getattr(new, field), getattr(old, field)
        if new_value != old_value:
            raise UserError(
                f"model.{field}={new_value:g}: the given gates are trained, starting from "
                f"{old_value:g}, and are not reinitialized; keep that value"
            )
    new_value, old_value = new.fam_gate_threshold, old.fam_gate_threshold
    if new_value != old_value:
        raise UserError(
            f"model.fam_gate_threshold={new_value:g}: the given gates are trained with "
            f"{old_value:g}; keep that value"
        )


def _has_fam(model: ModelConfig) -> bool:
    return any(spec.has_memory_prompt for spec in mixer_specs(model))


def _check_cross_maps(old: ModelConfig, new: ModelConfig) -> None:
    """Raise a `UserError` if learned feature maps of attention to an encoder cannot be reused."""
    if not (has_linear_cross(old) and has_linear_cross(new)):
        return
    for field in feature_map.weight_fields(old.linear.map):
        section = "encoder" if field == "features" else "linear"
        new_value, old_value = (getattr(getattr(model, section), field) for model in (new, old))
        _check_equal(f"model.{section}.{field}", new_value, old_value, "feature maps")


def _check_feature_maps(old: ModelConfig, new: ModelConfig) -> None:
    """Raise a `UserError` if learned feature maps cannot be reused."""
    if not all(any(s.has_feature_map for s in mixer_specs(model)) for model in (old, new)):
        return
    for field in feature_map.weight_fields(old.linear.map):
        new_value, old_value = getattr(new.linear, field), getattr(old.linear, field)
        _check_equal(f"model.linear.{field}", new_value, old_value, "feature maps")
