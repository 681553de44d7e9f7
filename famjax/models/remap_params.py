"""The weights of a model in another of equal sizes, whose layers attend to something else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.core.checks import mixer_pattern
from famjax.core.config import ArchConfig, DropoutConfig, LoraConfig, ModelConfig
from famjax.core.errors import UserError
from famjax.core.sharding import path_name
from famjax.core.types import Array
from famjax.layers import feature_map, lora
from famjax.layers.feature_map import FeatureMap
from famjax.models.language_model import LanguageModel
from famjax.models.remap_feedback import feedback_weight, refuse_other_stack

# what may differ: it has no weights, but for the prompt
_FREE = {
    "mixer",
    "block_len",
    "memory_segments",
    "window",
    "capacity",
    "fam_len",
    "fam_previous",
    "rope_base",
    "scan_layers",
    "remat",
    "dtype",
    "lora",
    "arch",
    "linear",
    "stack",
    "feedback",
    "dropout",
}
_MAP = "layer.mixer.map."


def parameter(path: tuple[Any, ...]) -> tuple[str, int | None]:
    """Return a parameter's name, whatever its layer attends to, and its place in the pattern.

    "layer.mixer.qkv.q.kernel" and 0 for one of a layer's, "embedding" and None for another.
    """
    parts = path_name(path).split("/")
    # all keep the same projections: fam in the window that it owns, a feedback layer by itself
    parts = [part for part in parts if part != "window"]
    if parts[3:4] == ["qkv"]:
        parts.insert(3, "mixer")
    if parts[:2] == ["stack", "layers"]:
        return ".".join(["layer", *parts[3:]]), int(parts[2])
    return ".".join(parts), None


def abstract(model: ModelConfig) -> tuple[Any, Any]:
    """Return the graph of a model as it is used, and the shapes of its parameters.

    Nothing is computed. A graph for training has places for dropout's keys, this one has none.
    """
    lora = replace(model.lora, dropout=0.0)
    model = replace(model, dropout=DropoutConfig(), lora=lora)
    return nnx.split(nnx.eval_shape(lambda: LanguageModel(model, rngs=nnx.Rngs(0))))


def remap_params(params: Any, old: ModelConfig, new: ModelConfig) -> Any:
    """Return the parameters of a model `new`, every weight taken from those of a model `old`.

    A FAM prompt that is not there, or is of another length, begins as `fam_prompt` says, and a
    layer's feature map that is not there as `new_map`. No array is copied that lies the same way in
    both.

    Raises:
      UserError: the models differ in more than what their layers attend to.
    """
    refuse_other_sizes(old, new)
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    there = {parameter(path): leaf for path, leaf in flat}
    before, after = _pattern(old), _pattern(new)
    _, shapes = abstract(replace(new, lora=LoraConfig()))

    def of_layer(name: str, i: int) -> Array:
        repeat, place = divmod(i, len(before))
        if is_map(name) and (name, place) not in there:
            return new_map(name, new, i)
        return there[name, place][repeat]

    def value(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> Array:
        name, place = parameter(path)
        if name == "stack.prompt":
            prompt = there.get((name, None))
            if prompt is None or prompt.shape != shape.shape:
                return fam_prompt(_table(there), new)
            return prompt
        if new.stack != "residual" or old.stack != "residual":
            changed = feedback_weight(name, shape, there, new)
            if changed is not None:
                return changed
        new_here = is_map(name) and (name, place) not in there
        if place is None or (len(before) == len(after) and not new_here):
            return there[name, place]
        return jnp.stack([of_layer(name, i) for i in range(place, new.layers, len(after))])

    return jax.tree_util.tree_map_with_path(value, shapes)


def _pattern(model: ModelConfig) -> tuple[str, ...]:
    """Return what is repeated up the stack; other stacks than the residual one repeat one layer."""
    return mixer_pattern(model) or (model.stack,)


def _table(there: dict[Any, Any]) -> Array:
    if ("embedding", None) not in there:
        raise UserError(
            "model.fam_len: a new FAM prompt begins as rows of the embedding, and an adaptive one "
            "has no rows of the model's width; train with a FAM of that length from scratch"
        )
    return there["embedding", None]


def fam_prompt(embedding: Array, model: ModelConfig) -> Array:
    """Return where the FAM begins in a model that has had none: f tokens as they enter the stack.

    Args:
      embedding: [v d].
    """
    rows = np.random.default_rng(0).integers(len(embedding), size=model.fam_len)
    return jnp.asarray(embedding)[rows] * (model.arch.embed_scale or model.width**0.5)


def is_map(name: str) -> bool:
    """Return whether a parameter, named as `parameter` names it, is of a feature map."""
    return name.startswith(_MAP)


def new_map(name: str, model: ModelConfig, layer: int) -> Array:
    """Return where a parameter of a layer's feature map begins in a model that has had none.

    By the layer's number alone: the same whichever other layers change.
    """
    fresh = FeatureMap(model, rngs=nnx.Rngs(layer))
    return getattr(fresh, name.removeprefix(_MAP))[...]


def merged_adapters(params: Any, model: ModelConfig) -> tuple[Any, ModelConfig]:
    """Return parameters without adapters, W + scale * B A in the place of W, and their config."""
    if not model.lora.rank:
        return params, model
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    there = {path_name(path): leaf for path, leaf in flat}
    plain = replace(model, lora=LoraConfig())
    _, shapes = abstract(plain)

    def value(path: tuple[Any, ...], _: jax.ShapeDtypeStruct) -> Array:
        name = path_name(path)
        beside = name.removesuffix("kernel") + "lora"
        if name.endswith("/kernel") and f"{beside}/a" in there:
            a, b = there[f"{beside}/a"], there[f"{beside}/b"]
            return lora.merged(there[name].astype(a.dtype), a, b, model.lora)
        return there[name].astype(jnp.float32)

    return jax.tree_util.tree_map_with_path(value, shapes), plain


def refuse_other_sizes(old: ModelConfig, new: ModelConfig) -> None:
    """Raise a `UserError` where weights of a model `old` cannot be those of a model `new`."""
    refuse_other_stack(old, new)
    if old.adaptive != new.adaptive:
        raise UserError(
            f"model.adaptive: the weights that are given have cutoffs={old.adaptive.cutoffs!r} and "
            f"factor={old.adaptive.factor}; leave them as they are there"
        )
    for field in vars(old):
        if field not in _FREE and _size(old, field) != _size(new, field):
            raise UserError(
                f"model.{field}={getattr(new, field)}: the weights that are given have "
                f"{getattr(old, field)}; leave it as it is there"
            )
    if new.arch.learned_positions and new.capacity != old.capacity:
        raise UserError(
            f"model.capacity={new.capacity}: the weights that are given have {old.capacity} "
            "learned positions; leave it as it is there, and read at most so many tokens at once"
        )
    _refuse_other_rotation(old, new)
    _refuse_other_maps(old, new)
    for field in vars(ArchConfig()):
        if getattr(old.arch, field) != getattr(new.arch, field):
            raise UserError(
                f"model.arch.{field}={getattr(new.arch, field)}: the weights that are given have "
                f"{getattr(old.arch, field)}; leave it as it is there"
            )


def _refuse_other_rotation(old: ModelConfig, new: ModelConfig) -> None:
    """Raise a `UserError` for a layer whose positions the weights would not know again."""
    if not new.arch.local_rope_base:
        return
    for i, names in enumerate(zip(layer_mixers(old), layer_mixers(new), strict=True)):
        unturned = names[1] == "linear" and not new.linear.rope
        if names[0] != names[1] and "swa" in names and not unturned:
            mend = ", or set model.linear.rope=false" if names[1] == "linear" else ""
            raise UserError(
                f"model.mixer: layer {i} goes from {names[0]} to {names[1]}, but this model's "
                f"local layers (swa) turn by base {new.arch.local_rope_base:g} and the others by "
                f"{new.rope_base:g}; change the layers with full attention only, and not to swa"
                f"{mend}"
            )


def _refuse_other_maps(old: ModelConfig, new: ModelConfig) -> None:
    """Raise a `UserError` where feature maps that were learned would not be kept."""
    if not all("linear" in mixer_pattern(model) for model in (old, new)):
        return
    for field in feature_map.shaping(old.linear.map):
        if getattr(old.linear, field) != getattr(new.linear, field):
            raise UserError(
                f"model.linear.{field}={getattr(new.linear, field)}: the feature maps that are "
                f"given have {getattr(old.linear, field)}; leave it as it is there"
            )


def layer_mixers(model: ModelConfig) -> tuple[str, ...]:
    """Return the mixer of every layer."""
    names = model.mixer.split(",")
    return tuple(names[i % len(names)] for i in range(model.layers))


def _size(model: ModelConfig, field: str) -> Any:
    """Return a field's value, 0 replaced by what it stands for."""
    stands = {
        "kv_heads": model.heads,
        "head_dim": model.width // model.heads,
        "mlp_width": 4 * model.width,
    }
    return getattr(model, field) or stands.get(field)
