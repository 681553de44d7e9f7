"""Mistral: a Llama with optional sliding-window attention in all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from famjax.config.resolved import ResolvedModelConfig
from famjax.config.schema import ModelConfig
from famjax.convert.families import llama
from famjax.convert.families.common import Family, choose_block_len
from famjax.convert.families.keys import HF, Keys, UnsupportedKey
from famjax.core.errors import UserError


def _all_layers_alike(types: Any, hf: HF) -> bool:
    kind = "sliding_attention" if hf.get("sliding_window", 4096) else "full_attention"
    return isinstance(types, list) and set(types) <= {kind}


_KEYS = Keys(
    llama.USED | {"num_key_value_heads": 8, "sliding_window": 4096},
    {"layer_types": UnsupportedKey((None,), "all its layers see one window", _all_layers_alike)},
)


def parse(hf: HF) -> ModelConfig:
    model = llama.parse(hf)
    window = hf.get("sliding_window")
    if window is not None and window < 1:
        raise UserError(f"config.json: sliding_window={window}: must be at least 1, or null")
    if window and window < model.capacity:
        block_len = choose_block_len(window)
        return replace(model, mixer="swa", window=window, block_len=block_len)
    return model


def serialize(model: ResolvedModelConfig) -> HF:
    hf = llama.serialize(model)
    del hf["attention_bias"], hf["mlp_bias"]
    window = model.window if model.mixer == "swa" else None
    return hf | {"model_type": "mistral", "sliding_window": window}


MISTRAL = Family("MistralForCausalLM", parse, serialize, llama.tensors, _KEYS)
