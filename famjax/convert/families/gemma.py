"""Gemma 1, 2 (caps, post-norms, every other layer local) and 3 (q/k norms, five of six local)."""

from __future__ import annotations

from dataclasses import replace

from famjax.config.resolved import ResolvedModelConfig
from famjax.config.schema import ModelConfig
from famjax.convert.families import llama
from famjax.convert.families.common import (
    Family,
    layer_types,
    parse_activation,
    parse_mixers,
    parse_rope_scaling,
    serialize_rope,
)
from famjax.convert.families.keys import HF, NO_WINDOW, Keys, UnsupportedKey
from famjax.core.errors import UserError

_GATES = {"gelu_pytorch_tanh": "geglu"}
_TANH = "gelu_pytorch_tanh"
_USED1 = llama.USED | {
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": _TANH,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
_USED2 = {name: value for name, value in _USED1.items() if name != "hidden_act"} | {
    "num_key_value_heads": 4,
    "hidden_activation": _TANH,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_USED3 = {name: value for name, value in _USED2.items() if name != "attn_logit_softcapping"} | {
    "final_logit_softcapping": None,
    "rope_local_base_freq": None,
    "sliding_window_pattern": None,
}
_ACT = {"hidden_act": "hidden_activation is read"}
_KEYS1 = Keys(
    _USED1,
    NO_WINDOW
    | {"hidden_activation": UnsupportedKey((None, "gelu", _TANH), "hidden_act is what is read")},
)
_KEYS2 = Keys(_USED2, {}, _ACT)
_KEYS3 = Keys(
    _USED3,
    {
        "attn_logit_softcapping": UnsupportedKey(
            (None,), "transformers itself leaves it out; set it to null"
        )
    },
    _ACT | {"_sliding_window_pattern": "layer_types is read"},
)


def parse1(hf: HF) -> ModelConfig:
    # the first releases have hidden_act="gelu" but use the tanh approximation
    known = _GATES | {"gelu": "geglu"}
    mlp = parse_activation(hf, known, "hidden_act" if hf.get("hidden_act") else "hidden_activation")
    model = llama.parse(hf | {"hidden_act": "silu"})
    arch = replace(model.arch, norm_plus_one=True, embed_scale=0.0)
    tied = hf.get("tie_word_embeddings", True)
    return replace(model, mlp=mlp, tied=tied, arch=arch)  # type: ignore[arg-type]


def serialize1(model: ResolvedModelConfig) -> HF:
    hf = llama.serialize(model)
    del hf["mlp_bias"]
    return hf | {"model_type": "gemma", "hidden_act": "gelu_pytorch_tanh"}


def parse2(hf: HF) -> ModelConfig:
    parse_activation(hf, _GATES, "hidden_activation")
    model = parse1(hf)
    arch = replace(
        model.arch,
        post_norm=True,
        query_scale=float(hf.get("query_pre_attn_scalar", 256)),
        attention_cap=float(hf.get("attn_logit_softcapping") or 0),
        logit_cap=float(hf.get("final_logit_softcapping") or 0),
    )
    kinds = ("sliding_attention", "full_attention")
    layers = parse_mixers(hf, [kinds[i % 2] for i in range(model.layers)])
    return replace(model, arch=arch, **layers)


def serialize2(model: ResolvedModelConfig) -> HF:
    arch = model.arch
    hf = serialize1(model)
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


def parse3(hf: HF) -> ModelConfig:
    every = hf.get("sliding_window_pattern") or 6
    kinds = [
        "sliding_attention" if (i + 1) % every else "full_attention"
        for i in range(hf["num_hidden_layers"])
    ]
    whole, local = _ropes(hf)
    base = whole.get("rope_theta", 1_000_000.0)
    flat = {"rope_parameters": whole, "rope_scaling": None, "rope_theta": base}
    model = parse2(hf | flat | {"layer_types": hf.get("layer_types") or kinds})
    if parse_rope_scaling(local, hf["max_position_embeddings"]):
        raise UserError(
            "config.json: rope_parameters.sliding_attention: sliding layers support only "
            f"rope_type=default, not {local.get('rope_type') or local.get('type')!r}"
        )
    base = local.get("rope_theta", 10_000.0)
    return replace(model, arch=replace(model.arch, qk_norm=True, local_rope_base=float(base)))


def _ropes(hf: HF) -> tuple[HF, HF]:
    """Return the rope_parameters of global layers, and of local ones."""
    rope = hf.get("rope_parameters") or {}
    for name in rope.keys() - {"full_attention", "sliding_attention"}:
        raise UserError(
            f"config.json: rope_parameters.{name} is not a layer type; put it under "
            "full_attention or sliding_attention"
        )
    whole = rope.get("full_attention") or {"rope_type": "default"}
    local = rope.get("sliding_attention") or {}
    theta, frequency = hf.get("rope_theta"), hf.get("rope_local_base_freq")
    older = [{} if base is None else {"rope_theta": base} for base in (theta, frequency)]
    return older[0] | whole | (hf.get("rope_scaling") or {}), older[1] | local


def serialize3(model: ResolvedModelConfig) -> HF:
    local = {"rope_type": "default", "rope_theta": model.arch.local_rope_base}
    both = {"full_attention": serialize_rope(model), "sliding_attention": local}
    return serialize2(model) | {"model_type": "gemma3_text", "rope_parameters": both}


GEMMA = Family("GemmaForCausalLM", parse1, serialize1, llama.tensors, _KEYS1)
GEMMA2 = Family("Gemma2ForCausalLM", parse2, serialize2, llama.tensors, _KEYS2)
GEMMA3 = Family("Gemma3ForCausalLM", parse3, serialize3, llama.tensors, _KEYS3)
