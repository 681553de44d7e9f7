"""Mistral: a Llama whose layers may all see a token window."""

from __future__ import annotations

from dataclasses import replace

from famjax.convert.families import llama
from famjax.convert.families.common import HF, Family
from famjax.core.config import ModelConfig


def read(hf: HF) -> ModelConfig:
    model = llama.read(hf)
    window = hf.get("sliding_window")
    if window and window < model.capacity:
        return replace(model, mixer="swa", window=window, block_len=window)
    return model


def write(model: ModelConfig) -> HF:
    hf = llama.write(model)
    del hf["attention_bias"], hf["mlp_bias"]
    window = model.window if model.mixer == "swa" else None
    return hf | {"model_type": "mistral", "sliding_window": window}


MISTRAL = Family("MistralForCausalLM", read, write, llama.tensors)
