"""Tiny random models of Hugging Face's families, saved in their format."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

TOKENS = np.random.default_rng(0).integers(0, 97, (2, 64))
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 97, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}
PAIRS = {
    "vocab_size": 97,
    "d_model": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 96,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 96,
    "encoder_layers": 2,
    "decoder_layers": 3,
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 128 for side in ("encoder", "decoder")},
}
SHAPES = {"gpt2": GPT2, "marian": PAIRS, "bart": PAIRS}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}

# small enough to affect the scores and logits of these models
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}

CASES = {
    "llama": ("llama", {"rms_norm_eps": 1e-5}),
    "llama-3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "smollm": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 16}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "gemma": ("gemma", {"head_dim": 32, "num_key_value_heads": 1}),
    "gemma-2": (
        "gemma2",
        {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 24, **CAPS},
    ),
    "gemma-3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "sliding_window": 16,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gpt-neox": ("gpt_neox", {"hidden_act": "gelu"}),
    "gpt-neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "gpt2": ("gpt2", {}),
    "marian": ("marian", {"activation_function": "swish", "scale_embedding": True}),
    "bart": ("bart", {}),
}
_LAYERS = ["full_attention", "sliding_attention", "sliding_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 500.0}
# together with those above, every key that is read has a non-default value
CASES |= {
    "llama-keys": ("llama", {"head_dim": 32, "rope_parameters": _ROPE}),
    "mistral-keys": (
        "mistral",
        {
            "head_dim": 32,
            "rms_norm_eps": 1e-3,
            "tie_word_embeddings": True,
            "rope_parameters": LINEAR,
        },
    ),
    "qwen2-keys": (
        "qwen2",
        {
            "head_dim": 32,
            "rms_norm_eps": 1e-3,
            "tie_word_embeddings": True,
            "rope_parameters": _ROPE,
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": _LAYERS,
        },
    ),
    "qwen3-keys": (
        "qwen3",
        {
            "head_dim": 32,
            "rms_norm_eps": 1e-3,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma-keys": (
        "gemma",
        {
            "head_dim": 32,
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-3,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": _ROPE,
        },
    ),
    "gemma2-keys": (
        "gemma2",
        {
            "head_dim": 32,
            "rms_norm_eps": 1e-3,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window": 8,
            "layer_types": _LAYERS,
            "rope_parameters": LINEAR,
        },
    ),
    "gemma3-keys": (
        "gemma3_text",
        {
            "head_dim": 32,
            "rms_norm_eps": 1e-3,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "sliding_window": 8,
            "layer_types": _LAYERS,
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
            "final_logit_softcapping": 3.0,
        },
    ),
    "gpt-neox-keys": (
        "gpt_neox",
        {
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-3,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": LINEAR | {"partial_rotary_factor": 0.5},
        },
    ),
    "marian-keys": (
        "marian",
        {
            "activation_function": "relu",
            "decoder_layers": 1,
            "share_encoder_decoder_embeddings": False,
            "tie_word_embeddings": False,
        },
    ),
    "bart-keys": ("bart", {"activation_function": "gelu_new", "scale_embedding": True}),
    "gpt2-keys": (
        "gpt2",
        {
            "n_inner": 96,
            "activation_function": "gelu",
            "layer_norm_epsilon": 1e-3,
            "tie_word_embeddings": False,
        },
    ),
}


@functools.cache
def pretrained(case: str) -> tuple[Path, np.ndarray]:
    """Return the folder of a model and its logits after TOKENS."""
    kind, changes = CASES[case]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SHAPES.get(kind, SHAPE) | changes)
    model = auto_class(kind).from_config(config, attn_implementation="eager")
    with torch.no_grad():
        if kind in ("marian", "bart"):
            model.final_logits_bias.normal_()
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
            wide = 0.3 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn_like(parameter) * wide)
    folder = Path(_home().name) / case
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder, logits(model)


def auto_class(kind: str) -> Any:
    """Return the class of transformers that loads a model of a family."""
    has_encoder = kind in ("marian", "bart")
    return transformers.AutoModelForSeq2SeqLM if has_encoder else transformers.AutoModelForCausalLM


def logits(model: Any) -> np.ndarray:
    """Return the logits of TOKENS; an encoder-decoder reads them in reverse as its source."""
    tokens, arguments = torch.tensor(TOKENS), {}
    if model.config.is_encoder_decoder:
        tokens, arguments = tokens.flip(1), {"decoder_input_ids": tokens}
    with torch.no_grad():
        found: np.ndarray = model.eval()(tokens, **arguments).logits.numpy()
    return found


@functools.cache
def _home() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="famjax-tests-")
