"""Qwen 2 (biases of queries, keys and values) and Qwen 3 (norms of each head's query and key)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from famjax.config.resolved import ResolvedModelConfig
from famjax.config.schema import ModelConfig
from famjax.convert.families import llama
from famjax.convert.families.common import Family, layer_types, parse_mixers
from famjax.convert.families.keys import HF, Keys

_WINDOWS = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_USED2 = llama.USED | _WINDOWS | {"num_key_value_heads": 32}
_USED3 = _USED2 | {"head_dim": 128, "attention_bias": False}


def _parse_layers(hf: HF) -> dict[str, Any]:
    """Return the mixers: full attention in the first `max_window_layers`, then sliding windows."""
    layers, whole = hf["num_hidden_layers"], hf.get("max_window_layers", 28)
    if not hf.get("use_sliding_window"):
        hf = hf | {"sliding_window": None}
    if hf.get("sliding_window") is None:
        whole = layers
    whole = min(max(whole, 0), layers)
    return parse_mixers(hf, ["full_attention"] * whole + ["sliding_attention"] * (layers - whole))


def _write_layers(model: ModelConfig) -> HF:
    types = layer_types(model)
    local = "sliding_attention" in types
    return {
        "use_sliding_window": local,
        "sliding_window": model.window if local else None,
        "max_window_layers": types.index("sliding_attention") if local else model.layers,
        "layer_types": types,
    }


def parse2(hf: HF) -> ModelConfig:
    model = llama.parse(hf)
    arch = replace(model.arch, qkv_bias=True, out_bias=False)
    return replace(model, arch=arch, **_parse_layers(hf))


def serialize2(model: ResolvedModelConfig) -> HF:
    hf = llama.serialize(model) | _write_layers(model)
    del hf["attention_bias"], hf["mlp_bias"]
    return hf | {"model_type": "qwen2"}


def parse3(hf: HF) -> ModelConfig:
    model = llama.parse(hf)
    return replace(model, arch=replace(model.arch, qk_norm=True), **_parse_layers(hf))


def serialize3(model: ResolvedModelConfig) -> HF:
    hf = llama.serialize(model) | _write_layers(model)
    del hf["mlp_bias"]
    return hf | {"model_type": "qwen3"}


QWEN2 = Family("Qwen2ForCausalLM", parse2, serialize2, llama.tensors, Keys(_USED2))
QWEN3 = Family("Qwen3ForCausalLM", parse3, serialize3, llama.tensors, Keys(_USED3))
