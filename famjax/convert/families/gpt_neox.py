"""GPT-NeoX and Pythia: parallel residual, partial rotary positions, fused queries, keys, values."""

from __future__ import annotations

from typing import Any

from famjax.config.resolved import ResolvedModelConfig
from famjax.config.schema import ArchConfig, ModelConfig
from famjax.convert.families.common import (
    Family,
    parse_activation,
    parse_rope_scaling,
    rope_parameters,
    serialize_rope,
)
from famjax.convert.families.keys import HF, NO_WINDOW, Keys, UnsupportedKey
from famjax.convert.families.llama import SHAPE
from famjax.convert.tensors import Part, Tensor, Tensors, linear_kernel

_GATES = {
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
}


def _is_full_width(size: Any, hf: HF) -> bool:
    heads, width = hf.get("num_attention_heads"), hf.get("hidden_size")
    return bool(heads and width and size == width // heads)


_USED = SHAPE | {
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "attention_bias": True,
    "rope_parameters": None,
    "rope_scaling": None,
    "rotary_pct": None,
    "rotary_emb_base": None,
}
_KEYS = Keys(
    _USED,
    NO_WINDOW | {"head_dim": UnsupportedKey((None,), "heads share the width", _is_full_width)},
    {"is_decoder": "causal either way", "num_key_value_heads": "as many as heads"},
)


def parse(hf: HF) -> ModelConfig:
    heads, width = hf["num_attention_heads"], hf["hidden_size"]
    older = {"rope_theta": hf.get("rotary_emb_base"), "partial_rotary_factor": hf.get("rotary_pct")}
    rope = {name: value for name, value in older.items() if value is not None} | rope_parameters(hf)
    share = float(rope.get("partial_rotary_factor", 0.25))
    base = float(rope.get("rope_theta", 10_000.0))
    bias = hf.get("attention_bias", True)
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        layers=hf["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        mlp_width=hf["intermediate_size"],
        mlp=parse_activation(hf, _GATES, "hidden_act"),  # type: ignore[arg-type]
        norm="layernorm",
        tied=hf.get("tie_word_embeddings", False),
        mixer="full",
        capacity=hf["max_position_embeddings"],
        rope_base=base,
        arch=ArchConfig(
            norm_eps=hf.get("layer_norm_eps", 1e-5),
            embed_scale=1.0,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=True,
            parallel=hf.get("use_parallel_residual", True),
            rotary_fraction=share,
            **parse_rope_scaling(rope, hf["max_position_embeddings"], partial=True),
        ),
    )


def serialize(model: ResolvedModelConfig) -> HF:
    arch = model.arch
    return {
        "model_type": "gpt_neox",
        "vocab_size": model.vocab_size,
        "num_hidden_layers": model.layers,
        "hidden_size": model.width,
        "num_attention_heads": model.heads,
        "intermediate_size": model.mlp_width,
        "hidden_act": "gelu" if model.mlp == "gelu_exact" else "gelu_new",
        "tie_word_embeddings": model.tied,
        "max_position_embeddings": model.capacity,
        "layer_norm_eps": arch.norm_eps,
        "attention_bias": arch.qkv_bias,
        "use_parallel_residual": arch.parallel,
        "rotary_pct": arch.rotary_fraction,
        "rope_parameters": serialize_rope(model) | {"partial_rotary_factor": arch.rotary_fraction},
    }


def tensors(model: ResolvedModelConfig) -> Tensors:
    layer = "gpt_neox.layers.{}."
    layouts = {
        "embedding": Tensor("gpt_neox.embed_in.weight", inputs=1),
        "norm.scale": Tensor("gpt_neox.final_layer_norm.weight"),
        "norm.bias": Tensor("gpt_neox.final_layer_norm.bias"),
    }
    if not model.tied:
        layouts["head.kernel"] = linear_kernel("embed_out")
    for ours, theirs in (
        ("mixer.qkv.norm", "input_layernorm"),
        ("mlp.norm", "post_attention_layernorm"),
    ):
        layouts[f"layer.{ours}.scale"] = Tensor(f"{layer}{theirs}.weight")
        layouts[f"layer.{ours}.bias"] = Tensor(f"{layer}{theirs}.bias")
    fused = f"{layer}attention.query_key_value"
    for index, ours in enumerate("qkv"):
        # head by head: its query, its key, its value
        part = Part(index, 3, model.head_dim)
        layouts[f"layer.mixer.qkv.{ours}.kernel"] = Tensor(f"{fused}.weight", 1, True, part)
        if model.arch.qkv_bias:
            layouts[f"layer.mixer.qkv.{ours}.bias"] = Tensor(f"{fused}.bias", part=part)
    layouts["layer.mixer.qkv.out.kernel"] = linear_kernel(f"{layer}attention.dense", 2)
    if model.arch.out_bias:
        layouts["layer.mixer.qkv.out.bias"] = Tensor(f"{layer}attention.dense.bias")
    for ours, theirs in (("up", "dense_h_to_4h"), ("down", "dense_4h_to_h")):
        layouts[f"layer.mlp.{ours}.kernel"] = linear_kernel(f"{layer}mlp.{theirs}")
        layouts[f"layer.mlp.{ours}.bias"] = Tensor(f"{layer}mlp.{theirs}.bias")
    return layouts


GPT_NEOX = Family("GPTNeoXForCausalLM", parse, serialize, tensors, _KEYS)
