"""The families of pretrained models: what their config.json says, as a `ModelConfig`.

To add one: a function here that reads its config, and a line in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from famjax.convert import tensors
from famjax.core.config import ArchConfig, ModelConfig
from famjax.core.errors import UserError, nearest


class Family(NamedTuple):
    """Attributes: `model` reads a config.json; `tensors` names the parameters of that model."""

    model: Callable[[dict[str, Any]], ModelConfig]
    tensors: Callable[[ModelConfig], tensors.Tensors]


def _llama(hf: dict[str, Any]) -> ModelConfig:
    heads = hf["num_attention_heads"]
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        layers=hf["num_hidden_layers"],
        width=hf["hidden_size"],
        heads=heads,
        kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
        mlp_width=hf["intermediate_size"],
        mlp="swiglu",
        tied=hf.get("tie_word_embeddings", False),
        mixer="full",
        capacity=hf["max_position_embeddings"],
        rope_base=_rope(hf).get("rope_theta", 10_000.0),
        arch=replace(
            _stretched(_rope(hf)),
            norm_eps=hf.get("rms_norm_eps", 1e-6),
            embed_scale=1.0,
            qkv_bias=hf.get("attention_bias", False),
            out_bias=hf.get("attention_bias", False),
            mlp_bias=hf.get("mlp_bias", False),
        ),
    )


def _mistral(hf: dict[str, Any]) -> ModelConfig:
    model = _llama(hf)
    window = hf.get("sliding_window")
    if window and window < model.capacity:
        return replace(model, mixer="swa", window=window, block_len=window)
    return model


def _qwen2(hf: dict[str, Any]) -> ModelConfig:
    if hf.get("use_sliding_window"):
        raise UserError("config.json: use_sliding_window=true is not supported; set it to false")
    model = _llama(hf)
    return replace(model, arch=replace(model.arch, qkv_bias=True, out_bias=False))


def _qwen3(hf: dict[str, Any]) -> ModelConfig:
    if hf.get("use_sliding_window"):
        raise UserError("config.json: use_sliding_window=true is not supported; set it to false")
    model = _llama(hf)
    return replace(model, arch=replace(model.arch, qk_norm=True))


def _gemma(hf: dict[str, Any]) -> ModelConfig:
    model = _llama(hf)
    arch = replace(model.arch, norm_plus_one=True, embed_scale=0.0)
    return replace(model, mlp="geglu", tied=hf.get("tie_word_embeddings", True), arch=arch)


FAMILIES = {
    "llama": Family(_llama, tensors.llama),
    "mistral": Family(_mistral, tensors.llama),
    "qwen2": Family(_qwen2, tensors.llama),
    "qwen3": Family(_qwen3, tensors.llama),
    "gemma": Family(_gemma, tensors.llama),
}


def family(hf: dict[str, Any]) -> Family:
    """Return the family that a config.json names."""
    kind = hf.get("model_type")
    if kind not in FAMILIES:
        raise UserError(
            f"config.json: model_type={kind!r} is not supported{nearest(str(kind), FAMILIES)} "
            f"(known: {', '.join(FAMILIES)})"
        )
    return FAMILIES[kind]


def _rope(hf: dict[str, Any]) -> dict[str, Any]:
    """Return what a config says of rotary positions: `rope_parameters`, or the two older keys."""
    older = {"rope_theta": hf["rope_theta"]} if "rope_theta" in hf else {}
    return older | (hf.get("rope_scaling") or {}) | (hf.get("rope_parameters") or {})


def _stretched(rope: dict[str, Any]) -> ArchConfig:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return ArchConfig()
    if kind == "linear":
        return ArchConfig(rope_scaling="linear", rope_factor=rope["factor"])
    if kind == "llama3":
        return ArchConfig(
            rope_scaling="llama3",
            rope_factor=rope["factor"],
            rope_low=rope["low_freq_factor"],
            rope_high=rope["high_freq_factor"],
            rope_length=rope["original_max_position_embeddings"],
        )
    raise UserError(
        f"config.json: rope_type={kind!r} is not supported (known: default, linear, llama3)"
    )
