"""GPT-2: learned positions, and kernels stored as [inputs outputs]."""

from __future__ import annotations

from famjax.config.resolved import ResolvedModelConfig
from famjax.config.schema import ArchConfig, ModelConfig
from famjax.convert.families.common import Family, parse_activation
from famjax.convert.families.keys import HF, NO_WINDOW, REQUIRED, Keys, UnsupportedKey
from famjax.convert.tensors import Part, Tensor, Tensors

_GATES = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact"}
_SCORES = "attention scores are divided by the square root of the head size, and by nothing else"
_KEYS = Keys(
    {
        **dict.fromkeys(("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"), REQUIRED),
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
    },
    NO_WINDOW
    | {
        "scale_attn_weights": UnsupportedKey((True,), _SCORES),
        "scale_attn_by_inverse_layer_idx": UnsupportedKey((None, False), _SCORES),
    },
    {
        "reorder_and_upcast_attn": "the same sums in float32",
        "n_ctx": "n_positions is read",
        **dict.fromkeys(("rope_parameters", "rope_scaling", "rope_theta"), "positions are learned"),
        **dict.fromkeys(
            (
                "summary_type",
                "summary_use_proj",
                "summary_activation",
                "summary_proj_to_labels",
                "summary_first_dropout",
            ),
            "of models with another head",
        ),
    },
    {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
)


def parse(hf: HF) -> ModelConfig:
    width, heads = hf["n_embd"], hf["n_head"]
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        layers=hf["n_layer"],
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        mlp_width=hf.get("n_inner") or 4 * width,
        mlp=parse_activation(hf, _GATES, "activation_function"),  # type: ignore[arg-type]
        norm="layernorm",
        tied=hf.get("tie_word_embeddings", True),
        mixer="full",
        capacity=hf["n_positions"],
        arch=ArchConfig(
            norm_eps=hf.get("layer_norm_epsilon", 1e-5),
            embed_scale=1.0,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            rotary_fraction=0.0,
            positions="learned",
        ),
    )


def serialize(model: ResolvedModelConfig) -> HF:
    return {
        "model_type": "gpt2",
        "vocab_size": model.vocab_size,
        "n_embd": model.width,
        "n_head": model.heads,
        "n_layer": model.layers,
        "n_inner": model.mlp_width,
        "n_positions": model.capacity,
        "activation_function": "gelu" if model.mlp == "gelu_exact" else "gelu_new",
        "tie_word_embeddings": model.tied,
        "layer_norm_epsilon": model.arch.norm_eps,
    }


def tensors(model: ModelConfig) -> Tensors:
    layer = "transformer.h.{}."
    layouts = {
        "embedding": Tensor("transformer.wte.weight", inputs=1),
        "stack.positions.table": Tensor("transformer.wpe.weight", inputs=1),
        "norm.scale": Tensor("transformer.ln_f.weight"),
        "norm.bias": Tensor("transformer.ln_f.bias"),
    }
    if not model.tied:
        layouts["head.kernel"] = Tensor("lm_head.weight", 1, transposed=True)
    for ours, theirs in (("mixer.qkv.norm", "ln_1"), ("mlp.norm", "ln_2")):
        layouts[f"layer.{ours}.scale"] = Tensor(f"{layer}{theirs}.weight")
        layouts[f"layer.{ours}.bias"] = Tensor(f"{layer}{theirs}.bias")
    for index, ours in enumerate("qkv"):
        part = Part(index, 3, model.width)
        layouts[f"layer.mixer.qkv.{ours}.kernel"] = Tensor(
            f"{layer}attn.c_attn.weight", 1, part=part
        )
        layouts[f"layer.mixer.qkv.{ours}.bias"] = Tensor(f"{layer}attn.c_attn.bias", part=part)
    maps = (("mixer.qkv.out", "attn.c_proj", 2), ("mlp.up", "mlp.c_fc", 1))
    for ours, theirs, inputs in (*maps, ("mlp.down", "mlp.c_proj", 1)):
        layouts[f"layer.{ours}.kernel"] = Tensor(f"{layer}{theirs}.weight", inputs)
        layouts[f"layer.{ours}.bias"] = Tensor(f"{layer}{theirs}.bias")
    return layouts


GPT2 = Family("GPT2LMHeadModel", parse, serialize, tensors, _KEYS)
