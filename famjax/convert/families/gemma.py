"""Gemma 1, 2 (caps, post-norms, every other layer local) and 3 (q/k norms, five of six local)."""

from __future__ import annotations

from dataclasses import replace

from famjax.convert.families import llama
from famjax.convert.families.common import HF, Family, gate, layer_types, mixers, rope, write_rope
from famjax.core.config import ModelConfig

_GATES = {"gelu_pytorch_tanh": "geglu"}


def read1(hf: HF) -> ModelConfig:
    # the first files say hidden_act="gelu" and mean the tanh approximation all the same
    known = _GATES | {"gelu": "geglu"}
    mlp = gate(hf, known, "hidden_activation", "hidden_act")
    model = llama.read(hf | {"hidden_act": "silu"})
    arch = replace(model.arch, norm_plus_one=True, embed_scale=0.0)
    tied = hf.get("tie_word_embeddings", True)
    return replace(model, mlp=mlp, tied=tied, arch=arch)  # type: ignore[arg-type]


def write1(model: ModelConfig) -> HF:
    hf = llama.write(model)
    del hf["mlp_bias"]
    return hf | {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}


def read2(hf: HF) -> ModelConfig:
    gate(hf, _GATES, "hidden_activation")
    model = read1(hf)
    arch = replace(
        model.arch,
        post_norm=True,
        query_scale=float(hf.get("query_pre_attn_scalar", 256)),
        attention_cap=float(hf.get("attn_logit_softcapping") or 0),
        logit_cap=float(hf.get("final_logit_softcapping") or 0),
    )
    kinds = ("sliding_attention", "full_attention")
    layers = mixers(hf, [kinds[i % 2] for i in range(model.layers)])
    return replace(model, arch=arch, **layers)


def write2(model: ModelConfig) -> HF:
    arch = model.arch
    hf = write1(model)
    del hf["hidden_act"]
    return hf | {
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": int(arch.query_scale),  # transformers takes no other
        "attn_logit_softcapping": arch.attention_cap or None,
        "final_logit_softcapping": arch.logit_cap or None,
        "layer_types": layer_types(model),
        "sliding_window": model.window,
    }


def read3(hf: HF) -> ModelConfig:
    every = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6
    kinds = [
        "sliding_attention" if (i + 1) % every else "full_attention"
        for i in range(hf["num_hidden_layers"])
    ]
    model = read2({"layer_types": kinds} | hf)
    local = rope(hf, "sliding_attention") if "rope_parameters" in hf else {}
    base = local.get("rope_theta") or hf.get("rope_local_base_freq") or 10_000.0
    arch = replace(model.arch, qk_norm=True, local_rope_base=float(base))
    return replace(model, rope_base=float(rope(hf).get("rope_theta", 1e6)), arch=arch)


def write3(model: ModelConfig) -> HF:
    local = {"rope_type": "default", "rope_theta": model.arch.local_rope_base}
    both = {"full_attention": write_rope(model), "sliding_attention": local}
    return write2(model) | {"model_type": "gemma3_text", "rope_parameters": both}


GEMMA = Family("GemmaForCausalLM", read1, write1, llama.tensors)
GEMMA2 = Family("Gemma2ForCausalLM", read2, write2, llama.tensors)
GEMMA3 = Family("Gemma3ForCausalLM", read3, write3, llama.tensors)
