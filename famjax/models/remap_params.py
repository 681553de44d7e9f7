"""Maps a model's parameters to a model of the same sizes with other mixers."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.config.derived import layer_mixers, mixer_pattern
from famjax.config.resolved import resolve_model
from famjax.config.schema import DropoutConfig, LoraConfig, ModelConfig
from famjax.core.errors import UserError
from famjax.core.types import Array, Params
from famjax.layers import lora
from famjax.layers.cross_attention import make_feature_map
from famjax.mixers import MIXERS
from famjax.models.remap_checks import check_compatible
from famjax.models.remap_feedback import feedback_weight
from famjax.models.seq2seq import make_model
from famjax.parallel.sharding import path_name

# parts of the residual stack that add to the embeddings, whose parameters start as 0
AT_INPUT = ("stack.short_conv.", "stack.ngram_memory.")
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

    def value(path: tuple[Any, ...], abstract: jax.ShapeDtypeStruct) -> Array:
        name, index = canonical_name(path)
        if name == "stack.prompt":
            prompt = source.get((name, None))
            if prompt is None or prompt.shape != abstract.shape:
                return init_fam_prompt(_embedding_table(source), new)
            return prompt
        if name.startswith(AT_INPUT):
            return extend_with_zeros(source.get((name, None)), abstract)
        if name.startswith("stack.memory_norm.") and (name, index) not in source:
            # starts as the final norm, see `famjax.stacks.segments`; a copy, since parameters are
            # donated
            return jnp.copy(source[name.removeprefix("stack.memory_"), None])
        if new.stack != "residual" or old.stack != "residual":
            converted = feedback_weight(name, abstract, source, old, new)
            if converted is not None:
                return converted
        is_kept = len(old_pattern) == len(pattern) and not is_new(name, index, abstract.shape)
        if index is None or is_kept:
            return source[name, index]
        layers = range(index, new.layers, len(pattern))
        return jnp.stack([layer_weight(name, i, abstract.shape) for i in layers])

    return jax.tree_util.tree_map_with_path(value, shapes)


def extend_with_zeros(given: Array | None, abstract: jax.ShapeDtypeStruct) -> Array:
    """Return parameters of a part in `AT_INPUT`; those of further contexts or tokens are 0."""
    new = jnp.zeros(abstract.shape, abstract.dtype)
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
