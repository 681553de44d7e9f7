"""What the families' files share: how config.json speaks of layers, rotary positions and gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from famjax.convert.tensors import Tensors
from famjax.core.config import ArchConfig, ModelConfig
from famjax.core.errors import UserError

# a config.json, read
HF = dict[str, Any]

_LAYERS = {"full_attention": "full", "sliding_attention": "swa"}


class Family(NamedTuple):
    """One family of pretrained models.

    Attributes:
      architecture: transformers' class.
      read: a config.json as a `ModelConfig`. A key that must be there and is not is a `KeyError`.
      write: the config.json of a model that `read` could have made; what is no part of the model
        (ids of bos and eos) is the caller's.
      tensors: the names of that model's parameters.
    """

    architecture: str
    read: Callable[[HF], ModelConfig]
    write: Callable[[ModelConfig], HF]
    tensors: Callable[[ModelConfig], Tensors]


def pattern(names: Sequence[str]) -> str:
    """Return the shortest pattern of mixers that gives these layers when repeated."""
    count = len(names)
    for n in range(1, count + 1):
        if count % n == 0 and list(names) == list(names[:n]) * (count // n):
            break
    return ",".join(names[:n])


def mixers(hf: HF, default: Sequence[str]) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that say what each layer sees.

    Args:
      default: layer types of a config.json from before they were listed in it.
    """
    types = hf.get("layer_types") or list(default)
    unknown = sorted(set(types) - set(_LAYERS))
    if unknown:
        raise UserError(
            f"config.json: layer_types has {unknown[0]!r}, which is not supported "
            f"(known: {', '.join(_LAYERS)})"
        )
    names = [_LAYERS[kind] for kind in types]
    window = hf.get("sliding_window")
    if "swa" not in names:
        return {"mixer": "full"}
    if not window:
        raise UserError("config.json: layer_types has sliding layers but no sliding_window; set it")
    return {"mixer": pattern(names), "window": window, "block_len": window}


def layer_types(model: ModelConfig) -> list[str]:
    """Return what `mixers` reads."""
    known = {ours: theirs for theirs, ours in _LAYERS.items()}
    names = model.mixer.split(",")
    return [known[names[i % len(names)]] for i in range(model.layers)]


def gate(hf: HF, known: dict[str, str], *keys: str) -> str:
    """Return our name of the activation that the first of `keys` in the config names."""
    key = next((key for key in keys if hf.get(key)), keys[0])
    kind = hf.get(key) or next(iter(known))
    if kind not in known:
        raise UserError(
            f"config.json: {key}={kind!r} is not supported here (known: {', '.join(known)})"
        )
    return known[kind]


def rope(hf: HF, layers: str = "full_attention") -> HF:
    """Return what a config says of rotary positions: `rope_parameters`, or the older keys.

    Args:
      layers: of which kind of layers, where the kinds differ.
    """
    older = {"rope_theta": hf["rope_theta"]} if "rope_theta" in hf else {}
    newer = hf.get("rope_parameters") or {}
    return older | (hf.get("rope_scaling") or {}) | (newer.get(layers) or newer)


def stretched(rope: HF) -> dict[str, Any]:
    """Return the fields of `ArchConfig` for frequencies that were stretched for longer texts."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return {}
    if kind == "linear":
        return {"rope_scaling": "linear", "rope_factor": rope["factor"]}
    if kind == "llama3":
        return {
            "rope_scaling": "llama3",
            "rope_factor": rope["factor"],
            "rope_low": rope["low_freq_factor"],
            "rope_high": rope["high_freq_factor"],
            "rope_length": rope["original_max_position_embeddings"],
        }
    raise UserError(
        f"config.json: rope_type={kind!r} is not supported (known: default, linear, llama3)"
    )


def write_rope(model: ModelConfig) -> HF:
    """Return `rope_parameters`, the inverse of `rope` and `stretched`."""
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
