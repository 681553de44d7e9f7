"""Llama 2 and 3, SmolLM, and the layout that most other families share."""

from __future__ import annotations

from famjax.config.resolved import ResolvedModelConfig
from famjax.config.schema import ArchConfig, ModelConfig
from famjax.convert.families.common import (
    Family,
    parse_activation,
    parse_rope_scaling,
    rope_parameters,
    serialize_rope,
)
from famjax.convert.families.keys import HF, NO_WINDOW, REQUIRED, Keys
from famjax.convert.tensors import Tensor, Tensors, linear_kernel

SHAPE = dict.fromkeys(
    (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ),
    REQUIRED,
)
ROPE = dict.fromkeys(("rope_parameters", "rope_scaling", "rope_theta"))
# what most families share, with the defaults of transformers' LlamaConfig
USED = {
    **SHAPE,
    **ROPE,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
BIASES = {"attention_bias": False, "mlp_bias": False}


def parse(hf: HF) -> ModelConfig:
    heads = hf["num_attention_heads"]
    bias = hf.get("attention_bias", False)
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        layers=hf["num_hidden_layers"],
        width=hf["hidden_size"],
        heads=heads,
        kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
        mlp_width=hf["intermediate_size"],
        mlp=parse_activation(hf, {"silu": "swiglu"}, "hidden_act"),  # type: ignore[arg-type]
        tied=hf.get("tie_word_embeddings", False),
        mixer="full",
        capacity=hf["max_position_embeddings"],
        rope_base=rope_parameters(hf).get("rope_theta", 10_000.0),
        arch=ArchConfig(
            norm_eps=hf.get("rms_norm_eps", 1e-6),
            embed_scale=1.0,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=hf.get("mlp_bias", False),
            **parse_rope_scaling(rope_parameters(hf), hf["max_position_embeddings"]),
        ),
    )


def serialize(model: ResolvedModelConfig) -> HF:
    arch = model.arch
    return {
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "num_hidden_layers": model.layers,
        "hidden_size": model.width,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.mlp_width,
        "hidden_act": "silu",
        "tie_word_embeddings": model.tied,
        "max_position_embeddings": model.capacity,
        "rms_norm_eps": arch.norm_eps,
        "attention_bias": arch.qkv_bias,
        "mlp_bias": arch.mlp_bias,
        "rope_parameters": serialize_rope(model),
    }


def tensors(model: ModelConfig) -> Tensors:
    arch = model.arch
    kernels = {
        "mixer.qkv.q": "self_attn.q_proj",
        "mixer.qkv.k": "self_attn.k_proj",
        "mixer.qkv.v": "self_attn.v_proj",
        "mixer.qkv.out": "self_attn.o_proj",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    }
    norms = {"mixer.qkv.norm": "input_layernorm", "mlp.norm": "post_attention_layernorm"}
    if arch.post_norm:
        norms |= {
            "mixer.qkv.post": "post_attention_layernorm",
            "mlp.norm": "pre_feedforward_layernorm",
            "mlp.post": "post_feedforward_layernorm",
        }
    if arch.qk_norm:
        norms |= {
            "mixer.qkv.q_norm": "self_attn.q_norm",
            "mixer.qkv.k_norm": "self_attn.k_norm",
        }
    biases = ["mixer.qkv.q", "mixer.qkv.k", "mixer.qkv.v"] if arch.qkv_bias else []
    biases += ["mixer.qkv.out"] if arch.out_bias else []
    biases += ["mlp.gate", "mlp.up", "mlp.down"] if arch.mlp_bias else []
    layer = "model.layers.{}."
    layouts = {
        "embedding": Tensor("model.embed_tokens.weight", inputs=1),
        "norm.scale": Tensor("model.norm.weight"),
    }
    if not model.tied:
        layouts["head.kernel"] = linear_kernel("lm_head")
    for ours, theirs in kernels.items():
        layouts[f"layer.{ours}.kernel"] = linear_kernel(
            layer + theirs, 2 if ours.endswith("out") else 1
        )
    for ours, theirs in norms.items():
        layouts[f"layer.{ours}.scale"] = Tensor(f"{layer}{theirs}.weight")
    for ours in biases:
        layouts[f"layer.{ours}.bias"] = Tensor(f"{layer}{kernels[ours]}.bias")
    return layouts


LLAMA = Family("LlamaForCausalLM", parse, serialize, tensors, Keys(USED | BIASES, NO_WINDOW))
