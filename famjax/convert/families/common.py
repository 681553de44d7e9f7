"""Shared by the families: translation of layer types, rotary positions and activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from famjax.config.derived import layer_mixers
from famjax.config.resolved import ResolvedModelConfig
from famjax.config.schema import ArchConfig, ModelConfig
from famjax.convert.families.keys import HF, Keys, resolve
from famjax.convert.tensors import Tensors
from famjax.core.errors import UserError
from famjax.mixers import MIXERS

_BLOCK_LEN = 512


class Family(NamedTuple):
    """One family of pretrained models.

    Attributes:
      architecture: class name in transformers.
      parse: config.json -> `ModelConfig`. A missing required key is a `KeyError`.
      serialize: the inverse of `parse`; the caller adds keys that are not the model's (bos and eos
        ids).
      tensors: config -> layouts of the model's parameters.
      keys: the known keys of config.json.
    """

    architecture: str
    parse: Callable[[HF], ModelConfig]
    serialize: Callable[[ResolvedModelConfig], HF]
    tensors: Callable[[ResolvedModelConfig], Tensors]
    keys: Keys

    def model(self, hf: HF) -> ModelConfig:
        """Check and parse a config.json; a `UserError` names unsupported keys."""
        return self.parse(resolve(hf, self.keys))


def shortest_pattern(names: Sequence[str]) -> str:
    """Return the shortest pattern of mixers that repeats to these layers."""
    count = len(names)
    periods = (n for n in range(1, count + 1) if count % n == 0)
    fits = (n for n in periods if list(names) == list(names[:n]) * (count // n))
    return ",".join(names[: next(fits, 0)])


def parse_mixers(hf: HF, default: Sequence[str]) -> dict[str, Any]:
    """Return the fields of `ModelConfig` for the layer types.

    Args:
      default: layer types of an older config.json that does not list them.
    """
    types = hf.get("layer_types") or list(default)
    if len(types) != hf["num_hidden_layers"]:
        raise UserError(
            f"config.json: layer_types has {len(types)} layers, num_hidden_layers="
            f"{hf['num_hidden_layers']}; take another copy"
        )
    mixers = {spec.layer_type: name for name, spec in MIXERS.items() if spec.layer_type}
    unknown = sorted(set(types) - set(mixers))
    if unknown:
        raise UserError(
            f"config.json: layer_types has {unknown[0]!r}, which is not supported "
            f"(known: {', '.join(mixers)})"
        )
    names = [mixers[kind] for kind in types]
    window = hf.get("sliding_window")
    if not any(MIXERS[name].is_local for name in names):
        return {"mixer": shortest_pattern(names)}
    if not window:
        raise UserError("config.json: layer_types has sliding layers but no sliding_window; set it")
    block_len = choose_block_len(window)
    return {"mixer": shortest_pattern(names), "window": window, "block_len": block_len}


def choose_block_len(window: int) -> int:
    """Return the length of the blocks in which a sliding window is computed.

    For the window only the cost depends on it: a short text takes a whole block, and each block
    reads the window before it. Layers that are converted to other mixers get blocks of this length.
    """
    return min(window, _BLOCK_LEN)


def layer_types(model: ModelConfig) -> list[str]:
    """Return the layer_types of config.json, the inverse of `parse_mixers`."""
    return [MIXERS[name].layer_type for name in layer_mixers(model)]


def parse_activation(hf: HF, known: dict[str, str], *keys: str) -> str:
    """Return our name of the activation in the first of `keys` that the config has."""
    key = next((key for key in keys if hf.get(key)), keys[0])
    kind = hf.get(key) or next(iter(known))
    if kind not in known:
        raise UserError(
            f"config.json: {key}={kind!r} is not supported here (known: {', '.join(known)})"
        )
    return known[kind]


# keys of rope_parameters that transformers uses, by rope_type
ROPE_USED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# keys of other rope types, which have no effect with these
ROPE_HARMLESS = {
    *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "short_factor", "long_factor"),
    *("mscale", "mscale_all_dim", "truncate"),
}


def rope_parameters(hf: HF) -> HF:
    """Return `rope_parameters`, or the older keys.

    As in transformers, `rope_scaling` overrides `rope_parameters`.
    """
    older = {"rope_theta": hf["rope_theta"]} if hf.get("rope_theta") is not None else {}
    return older | (hf.get("rope_scaling") or hf.get("rope_parameters") or {})


def parse_rope_scaling(rope_parameters: HF, length: int, partial: bool = False) -> dict[str, Any]:
    """Return the fields of `ArchConfig` for RoPE frequency scaling.

    Args:
      rope_parameters: result of the function of that name.
      length: max_position_embeddings, which is used if `rope_parameters` has no original length.
      partial: whether the family supports `partial_rotary_factor`.
    """
    kind = rope_parameters.get("rope_type") or rope_parameters.get("type") or "default"
    if kind not in ROPE_USED:
        raise UserError(
            f"config.json: rope_type={kind!r} is not supported (known: {', '.join(ROPE_USED)})"
        )
    known = {"rope_theta", "rope_type", "type", *ROPE_HARMLESS}
    for name, value in rope_parameters.items():
        whole = name == "partial_rotary_factor" and (partial or value == 1)
        if name not in known and value is not None and not whole:
            raise UserError(f"config.json: rope_parameters.{name}={value!r} is not supported")
    if kind == "default":
        return {}
    if kind == "linear":
        return {"rope_scaling": "linear", "rope_factor": rope_parameters["factor"]}
    return {
        "rope_scaling": "llama3",
        "rope_factor": rope_parameters["factor"],
        "rope_low": rope_parameters["low_freq_factor"],
        "rope_high": rope_parameters["high_freq_factor"],
        "rope_length": rope_parameters.get("original_max_position_embeddings") or length,
    }


def serialize_rope(model: ModelConfig) -> HF:
    """Return `rope_parameters`, the inverse of `rope_parameters` and `parse_rope_scaling`."""
    arch: ArchConfig = model.arch
    theta = {"rope_theta": model.rope_base}
    if arch.rope_scaling == "none":
        return theta | {"rope_type": "default"}
    scaled = theta | {"rope_type": arch.rope_scaling, "factor": arch.rope_factor}
    if arch.rope_scaling == "linear":
        return scaled
    return scaled | {
        "low_freq_factor": arch.rope_low,
        "high_freq_factor": arch.rope_high,
        "original_max_position_embeddings": arch.rope_length,
    }
