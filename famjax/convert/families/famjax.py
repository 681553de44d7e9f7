"""famjax's own family, for models that no Hugging Face family can represent, such as with memory.

The exported folder includes its PyTorch code (famjax/export/pytorch).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from famjax.config.resolved import resolve_model
from famjax.config.schema import ArchConfig, ModelConfig
from famjax.convert.families.common import Family
from famjax.convert.families.keys import HF, REQUIRED, Keys, UnsupportedKey
from famjax.convert.tensors import Tensor, Tensors, linear_kernel
from famjax.core.errors import UserError, nearest
from famjax.mixers import mixer_specs

# keys of how a model is computed; and `tied`, which is tie_word_embeddings
_LEFT = ("scan_layers", "remat", "dtype", "tied")
_FIELDS = [
    field.name
    for field in dataclasses.fields(ModelConfig)
    if field.default is not dataclasses.MISSING and field.name not in _LEFT
]
# keys that older exports lack, which were all of models with the defaults
_LATER = (
    *("fam_update", "fam_init", "fam_position", "fam_min_timescale", "fam_max_timescale"),
    *("delta_order", "recurrent_gate", "smeared_keys"),
)
_KEYS = Keys(
    dict.fromkeys((*_FIELDS, "arch", "tie_word_embeddings"), REQUIRED)
    | {name: getattr(ModelConfig(), name) for name in _LATER},
    {
        # its own code
        "auto_map": UnsupportedKey((None,), "", lambda value, hf: True),
        "rope_scaling": UnsupportedKey((None,), "arch.rope_scaling is what is read"),
    },
    aliases={
        "hidden_size": "width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "intermediate_size": "mlp_width",
    },
)
# the memory's parameters, and how many of their axes are rows of the checkpoint's tensor
_DELTA_MEMORY = {
    "key_smear.weight": 0,
    "rate_weight": 1,
    "rate_bias": 0,
    "gain": 0,
}


def parse(hf: HF) -> ModelConfig:
    arch: dict[str, Any] = hf["arch"]
    known = {field.name for field in dataclasses.fields(ArchConfig)}
    for name in arch.keys() - known:
        raise UserError(
            f"config.json: arch.{name} is unknown to this version of famjax{nearest(name, known)}; "
            "use the version that wrote it"
        )
    fields = {name: hf[name] for name in _FIELDS}
    return ModelConfig(**fields, tied=hf["tie_word_embeddings"], arch=ArchConfig(**arch))


def serialize(model: ModelConfig) -> HF:
    auto = {
        "AutoConfig": "configuration_famjax.FamjaxConfig",
        "AutoModelForCausalLM": "modeling_famjax.FamjaxForCausalLM",
    }
    sizes = resolve_model(model)
    return {
        "model_type": "famjax",
        "auto_map": auto,
        **{name: getattr(model, name) for name in _FIELDS},
        "kv_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "mlp_width": sizes.mlp_width,
        "tie_word_embeddings": model.tied,
        # as written: the PyTorch code knows its zeros, and older exports have them
        "arch": dataclasses.asdict(model.arch),
    }


def tensors(model: ModelConfig) -> Tensors:
    arch = model.arch
    gated = model.mlp in ("swiglu", "geglu")
    kernels = {f"mixer.qkv.{name}": f"attention.{name}" for name in ("q", "k", "v", "out")}
    maps = ("up", "gate", "down") if gated else ("up", "down")
    kernels |= {f"mlp.{name}": f"mlp.{name}" for name in maps}
    biased = ["mixer.qkv.q", "mixer.qkv.k", "mixer.qkv.v"] if arch.qkv_bias else []
    biased += ["mixer.qkv.out"] if arch.out_bias else []
    biased += [name for name in kernels if name.startswith("mlp")] if arch.mlp_bias else []
    norms = {"mixer.qkv.norm": "attention.norm", "mlp.norm": "mlp.norm"}
    if arch.post_norm:
        norms |= {"mixer.qkv.post": "attention.post_norm", "mlp.post": "mlp.post_norm"}
    layouts = {"embedding": Tensor("embed.weight", inputs=1), **_norm(model, "norm", "norm")}
    if not model.tied:
        layouts["head.kernel"] = linear_kernel("head")
    if arch.learned_positions:
        layouts["stack.positions.table"] = Tensor("positions.weight", inputs=1)
    if any(spec.has_memory for spec in mixer_specs(model)):
        layouts["stack.prompt"] = Tensor("prompt", inputs=1)
        if model.fam_update == "gated":
            for name in ("weight", "bias"):
                gate = f"mixer.memory_gate.{name}"
                layouts[f"layer.{gate}"] = Tensor(f"layers.{{}}.attention.memory_gate.{name}")
    if "delta" in model.mixer.split(","):
        for name, inputs in _DELTA_MEMORY.items():
            memory = f"delta_memory.{name}"
            layouts[f"layer.mixer.{memory}"] = Tensor(f"layers.{{}}.attention.{memory}", inputs)
    if model.smeared_keys:
        layouts["layer.mixer.key_smear.weight"] = Tensor("layers.{}.attention.key_smear.weight")
    layer = "layers.{}."
    for ours, theirs in kernels.items():
        layouts[f"layer.{ours}.kernel"] = linear_kernel(
            layer + theirs, 2 if ours.endswith("out") else 1
        )
    for ours in biased:
        layouts[f"layer.{ours}.bias"] = Tensor(f"{layer}{kernels[ours]}.bias")
    for ours, theirs in norms.items():
        layouts |= _norm(model, f"layer.{ours}", layer + theirs)
    if arch.qk_norm:
        for name in ("q_norm", "k_norm"):
            layouts[f"layer.mixer.qkv.{name}.scale"] = Tensor(f"{layer}attention.{name}.weight")
    return layouts


def _norm(model: ModelConfig, ours: str, theirs: str) -> Tensors:
    layouts = {f"{ours}.scale": Tensor(f"{theirs}.weight")}
    if model.norm == "layernorm":
        layouts[f"{ours}.bias"] = Tensor(f"{theirs}.bias")
    return layouts


FAMJAX = Family("FamjaxForCausalLM", parse, serialize, tensors, _KEYS)
