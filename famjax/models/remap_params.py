"""Maps a model's parameters to a model of the same sizes with other mixers."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.config.derived import has_linear_cross, layer_mixers, mixer_pattern
from famjax.config.resolved import resolve_model
from famjax.config.schema import ArchConfig, DropoutConfig, LoraConfig, ModelConfig
from famjax.core.errors import UserError
from famjax.core.types import Array, Params
from famjax.layers import feature_map, lora
from famjax.layers.cross_attention import make_feature_map
from famjax.mixers import MIXERS, mixer_specs
from famjax.models.remap_feedback import check_same_stack, feedback_weight
from famjax.models.seq2seq import make_model
from famjax.parallel.sharding import path_name

# Config fields that may differ between the given weights and the model.
#
# Parameters that exist because of these fields are taken from the old model if it has them in the
# same shape, and else get their initial value: the FAM prompt (fam_len), which in a segmented stack
# holds the memory or summary tokens (`init_fam_prompt`); the prefixes of fam_init, the gates of
# fam_update=gated with biases from fam_min_timescale and fam_max_timescale, the shares of
# smeared_keys, and feature maps (`init_mixer_param`); those of the n-gram memory, 0; and those of a
# Feedback Transformer (`feedback_weight`).
#
# `check_compatible` checks the values that the given weights depend on: stack, arch, linear,
# smeared_keys, ngram_memory, the gates' timescales and threshold, the encoder's layers and
# embedding, and with learned positions capacity.
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
_MIXER, _CROSS_MAP = "layer.mixer.", "layer.cross.map."


def canonical_name(path: tuple[Any, ...]) -> tuple[str, int | None]:
    """Return a parameter's name independent of its mixer, and its index in the layer pattern.

    For example "layer.mixer.qkv.q.kernel" and 0 for a parameter of a layer, "embedding" and None
    for another.
    """
    parts = path_name(path).split("/")
    # all mixers have the same projections, but at other paths: fam in its window, a feedback layer
    # directly, the layers of a segmented stack in its Transformer
    parts = [part for part in parts if part not in ("window", "transformer")]
    if parts[:2] == ["stack", "layers"]:
        if parts[3] == "qkv":
            parts.insert(3, "mixer")
        return ".".join(["layer", *parts[3:]]), int(parts[2])
    return ".".join(parts), None


def abstract_inference_model(model: ModelConfig) -> tuple[Any, Any]:
    """Return the graph definition of a model for inference, and its parameters' shapes.

    Nothing is computed. A model in training has another graph, which includes dropout keys.
    """
    lora = replace(model.lora, dropout=0.0)
    model = replace(model, dropout=DropoutConfig(), lora=lora)
    return nnx.split(nnx.eval_shape(lambda: make_model(model, rngs=nnx.Rngs(0))))


def remap_params(params: Params, old: ModelConfig, new: ModelConfig) -> Params:
    """Return the parameters of a model `new`, with all weights taken from a model `old`.

    A FAM prompt that is missing or has another length is initialized by `init_fam_prompt`, and a
    mixer's parameters that are missing or have another shape by `init_mixer_param`. Arrays whose
    layout stays the same are not copied.

    Raises:
      UserError: the models differ in more than their mixers.
    """
    check_compatible(old, new)
    return map_params(params, old, new)


def map_params(params: Params, old: ModelConfig, new: ModelConfig) -> Params:
    """Like `remap_params`, without a check: what a model `new` does not have is left out."""
    old, new = resolve_model(old), resolve_model(new)
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    source = {canonical_name(path): leaf for path, leaf in flat}
    old_pattern, pattern = _pattern(old), _pattern(new)
    _, shapes = abstract_inference_model(replace(new, lora=LoraConfig()))

    def is_new(name: str, index: int | None, shape: tuple[int, ...]) -> bool:
        if not is_of_mixer(name):
            return False
        return (name, index) not in source or source[name, index].shape[1:] != shape[1:]

    def layer_weight(name: str, i: int, shape: tuple[int, ...]) -> Array:
        repeat, index = divmod(i, len(old_pattern))
        if is_new(name, index, shape):
            return init_mixer_param(name, new, i)
        return source[name, index][repeat]

    def value(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> Array:
        name, index = canonical_name(path)
        if name == "stack.prompt":
            prompt = source.get((name, None))
            if prompt is None or prompt.shape != shape.shape:
                return init_fam_prompt(_embedding_table(source), new)
            return prompt
        if name.startswith("stack.ngram_memory."):
            return extend_ngrams(source.get((name, None)), shape)
        if name.startswith("stack.memory_norm.") and (name, index) not in source:
            # starts as the final norm, see `famjax.stacks.segments`; a copy, since parameters are
            # donated
            return jnp.copy(source[name.removeprefix("stack.memory_"), None])
        if new.stack != "residual" or old.stack != "residual":
            converted = feedback_weight(name, shape, source, new)
            if converted is not None:
                return converted
        is_kept = len(old_pattern) == len(pattern) and not is_new(name, index, shape.shape)
        if index is None or is_kept:
            return source[name, index]
        layers = range(index, new.layers, len(pattern))
        return jnp.stack([layer_weight(name, i, shape.shape) for i in layers])

    return jax.tree_util.tree_map_with_path(value, shapes)


def extend_ngrams(given: Array | None, shape: jax.ShapeDtypeStruct) -> Array:
    """Return parameters of the n-gram memory [o ...]; those of further contexts are 0."""
    new = jnp.zeros(shape.shape, shape.dtype)
    if given is None:
        return new
    return new.at[: len(given)].set(given)


def _pattern(model: ModelConfig) -> tuple[str, ...]:
    """Return the repeated pattern of layers; stacks other than `residual` repeat one layer."""
    return mixer_pattern(model) or (model.stack,)


def _embedding_table(source: dict[Any, Any]) -> Array:
    if ("embedding", None) not in source:
        raise UserError(
            "model.fam_len: a new FAM prompt is initialized from rows of the embedding, and an "
            "adaptive embedding has no rows of the model's width; train with that FAM length from "
            "scratch"
        )
    return source["embedding", None]


def init_fam_prompt(embedding: Array, model: ModelConfig) -> Array:
    """Return an initial FAM prompt [f d] for weights without one: f random tokens' embeddings.

    They are scaled like the stack's inputs.

    Args:
      embedding: [v d].
    """
    rows = np.random.default_rng(0).integers(len(embedding), size=model.fam_len)
    return jnp.asarray(embedding)[rows] * resolve_model(model).arch.embed_scale


def is_feature_map(name: str) -> bool:
    """Return whether a parameter, by its canonical name, belongs to a feature map."""
    return name.startswith((f"{_MIXER}map.", _CROSS_MAP))


def is_of_mixer(name: str) -> bool:
    """Return whether a parameter, by its canonical name, is one that other mixers may lack.

    This includes the parameters of attention to an encoder that softmax attention lacks.
    """
    is_own = name.startswith(_MIXER) and not name.startswith(f"{_MIXER}qkv.")
    return is_own or name.startswith(_CROSS_MAP)


def init_mixer_param(name: str, model: ModelConfig, layer: int) -> Array:
    """Return the initial value of a parameter (`is_of_mixer`) that the given weights lack.

    It depends only on the layer's index, not on which other layers change.
    """
    if name.startswith(_CROSS_MAP):
        made = make_feature_map(resolve_model(model), rngs=nnx.Rngs(layer))
        return operator.attrgetter(name.removeprefix(_CROSS_MAP))(made)[...]
    spec = MIXERS[layer_mixers(model)[layer]]
    return spec.initial_param(resolve_model(model), name.removeprefix(_MIXER), nnx.Rngs(layer))


def merge_adapters(params: Params, model: ModelConfig) -> tuple[Params, ModelConfig]:
    """Return the parameters with adapters merged into them, W + scale * B A, and their config."""
    if not model.lora.rank:
        return params, model
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    source = {path_name(path): leaf for path, leaf in flat}
    plain, adapters = replace(model, lora=LoraConfig()), resolve_model(model).lora
    _, shapes = abstract_inference_model(plain)

    def value(path: tuple[Any, ...], _: jax.ShapeDtypeStruct) -> Array:
        name = path_name(path)
        adapter = name.removesuffix("kernel") + "lora"
        if name.endswith("/kernel") and f"{adapter}/a" in source:
            a, b = source[f"{adapter}/a"], source[f"{adapter}/b"]
            return lora.merge_adapter(source[name].astype(a.dtype), a, b, adapters)
        return source[name].astype(jnp.float32)

    return jax.tree_util.tree_map_with_path(value, shapes), plain


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
        if field not in _MAY_DIFFER and getattr(old, field) != getattr(new, field):
            raise UserError(
                f"model.{field}={getattr(new, field)}: the given weights have "
                f"{getattr(old, field)}; keep that value"
            )
    _check_smearing(old, new)
    _check_ngrams(old, new)
    for name in ("layers", "shared"):
        there, given = (getattr(model.encoder, name) for model in (old, new))
        if there != given:
            raise UserError(
                f"model.encoder.{name}={given}: the given weights have {there}; keep that value"
            )
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
        is_free = field in _ARCH_MAY_DIFFER
        if not is_free and getattr(old.arch, field) != getattr(new.arch, field):
            raise UserError(
                f"model.arch.{field}={getattr(new.arch, field)}: the given weights have "
                f"{getattr(old.arch, field)}; keep that value"
            )


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


def _check_ngrams(old: ModelConfig, new: ModelConfig) -> None:
    """Raise a `UserError` for an n-gram memory that would lose weights."""
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
        given, there = getattr(new, field), getattr(old, field)
        if given != there:
            raise UserError(
                f"model.{field}={given:g}: the given gates are trained, starting from {there:g}, "
                "and are not reinitialized; keep that value"
            )
    given, there = new.fam_gate_threshold, old.fam_gate_threshold
    if given != there:
        raise UserError(
            f"model.fam_gate_threshold={given:g}: the given gates are trained with {there:g}; keep "
            "that value"
        )


def _has_fam(model: ModelConfig) -> bool:
    return any(spec.has_memory_prompt for spec in mixer_specs(model))


def _check_cross_maps(old: ModelConfig, new: ModelConfig) -> None:
    """Raise a `UserError` if learned feature maps of attention to an encoder cannot be reused."""
    if not (has_linear_cross(old) and has_linear_cross(new)):
        return
    for field in feature_map.weight_fields(old.linear.map):
        section = "encoder" if field == "features" else "linear"
        given, there = (getattr(getattr(model, section), field) for model in (new, old))
        if given != there:
            raise UserError(
                f"model.{section}.{field}={given}: the given feature maps have {there}; keep that "
                "value"
            )


def _check_feature_maps(old: ModelConfig, new: ModelConfig) -> None:
    """Raise a `UserError` if learned feature maps cannot be reused."""
    if not all(any(s.has_feature_map for s in mixer_specs(model)) for model in (old, new)):
        return
    for field in feature_map.weight_fields(old.linear.map):
        if getattr(old.linear, field) != getattr(new.linear, field):
            raise UserError(
                f"model.linear.{field}={getattr(new.linear, field)}: the given feature "
                f"maps have {getattr(old.linear, field)}; keep that value"
            )
