"""famjax's own family, for models that no Hugging Face family represents, as those with a memory.

The exported folder includes its PyTorch code (famjax/export/pytorch).
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from famjax.config.derived import has_linear_cross
from famjax.config.older import rename_arch_keys
from famjax.config.resolved import resolve_model
from famjax.config.schema import (
    ArchConfig,
    EncoderConfig,
    FeedbackConfig,
    LinearConfig,
    ModelConfig,
)
from famjax.convert.families.common import Family
from famjax.convert.families.keys import HF, REQUIRED, Keys, UnsupportedKey
from famjax.convert.tensors import Tensor, Tensors, linear_kernel
from famjax.core.errors import UserError, did_you_mean
from famjax.mixers import mixer_specs

_DECODER, _ENCODER_DECODER = "ForCausalLM", "ForConditionalGeneration"
# stacks that modeling_famjax_feedback computes
FEEDBACK = ("feedback", "transformer")
_Group = TypeVar("_Group", ArchConfig, EncoderConfig, FeedbackConfig, LinearConfig)

# keys that are not exported: how a model is computed, and `tied`, which is tie_word_embeddings
_LEFT = ("scan_layers", "remat", "dtype", "tied")
_FIELDS = [
    field.name
    for field in dataclasses.fields(ModelConfig)
    if field.default is not dataclasses.MISSING and field.name not in _LEFT
]
# keys that older exports lack, since their models all had the defaults
_LATER = (
    *("fam_update", "fam_init", "fam_position"),
    *("fam_min_timescale", "fam_max_timescale", "fam_gate_threshold"),
    *("delta_order", "delta_heads", "recurrent_gate", "smeared_keys"),
    *("short_conv", "ngram_memory", "ngram_slots"),
)
_KEYS = Keys(
    dict.fromkeys((*_FIELDS, "arch", "tie_word_embeddings"), REQUIRED)
    | {name: getattr(ModelConfig(), name) for name in _LATER}
    | dict.fromkeys(("encoder", "linear", "feedback")),
    {
        "is_encoder_decoder": UnsupportedKey((None,), "", lambda value, hf: True),
        # the PyTorch code in the folder
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
    fields = {name: hf[name] for name in _FIELDS}
    return ModelConfig(
        **fields,
        tied=hf["tie_word_embeddings"],
        arch=_parse_group(hf, "arch", ArchConfig),
        encoder=_parse_group(hf, "encoder", EncoderConfig),
        linear=_parse_group(hf, "linear", LinearConfig),
        feedback=_parse_group(hf, "feedback", FeedbackConfig),
    )


def _parse_group(hf: HF, group: str, kind: type[_Group]) -> _Group:
    """Return a dataclass of `ModelConfig` from its key of config.json, which may be missing."""
    if hf[group] is None:
        return kind()
    found: dict[str, Any] = rename_arch_keys(hf[group]) if kind is ArchConfig else hf[group]
    known = {field.name for field in dataclasses.fields(kind)}
    for name in found.keys() - known:
        raise UserError(
            f"config.json: {group}.{name} is unknown to this version of famjax"
            f"{did_you_mean(name, known)}; use the version that wrote it"
        )
    return kind(**found)


def serialize(model: ModelConfig) -> HF:
    name = "AutoModelForSeq2SeqLM" if model.encoder.layers else "AutoModelForCausalLM"
    groups: HF = {}
    if model.encoder.layers:
        groups |= {"encoder": dataclasses.asdict(model.encoder), "is_encoder_decoder": True}
    if _has_feature_map(model) or has_linear_cross(model):
        groups["linear"] = dataclasses.asdict(model.linear)
    if model.stack in FEEDBACK:
        groups["feedback"] = dataclasses.asdict(model.feedback)
    module, kind = pytorch_class(model)
    config = "FamjaxFeedbackConfig" if model.stack in FEEDBACK else "FamjaxConfig"
    sizes = resolve_model(model)
    return groups | {
        "model_type": "famjax",
        "architectures": [kind],
        "auto_map": {
            "AutoConfig": f"configuration_famjax.{config}",
            name: f"{module}.{kind}",
        },
        **{name: getattr(model, name) for name in _FIELDS},
        "kv_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "mlp_width": sizes.mlp_width,
        "tie_word_embeddings": model.tied,
        # not resolved: the PyTorch code knows what its zeros mean, and older exports have them
        "arch": dataclasses.asdict(model.arch),
    }


def pytorch_class(model: ModelConfig) -> tuple[str, str]:
    """Return the module of famjax/export/pytorch with a model's class, and the class."""
    kind = _ENCODER_DECODER if model.encoder.layers else _DECODER
    if model.stack in FEEDBACK:
        return "modeling_famjax_feedback", f"FamjaxFeedback{kind}"
    module = "modeling_famjax_seq2seq" if model.encoder.layers else "modeling_famjax"
    return module, f"Famjax{kind}"


def _has_feature_map(model: ModelConfig) -> bool:
    return any(spec.has_feature_map for spec in mixer_specs(model))


def tensors(model: ModelConfig) -> Tensors:
    arch = model.arch
    layouts = {"embedding": Tensor("embed.weight", inputs=1)}
    if arch.pre_norm:
        layouts |= _norm(model, "norm", "norm")
    if arch.logit_bias:
        layouts["logit_bias"] = Tensor("head.bias")
    if not model.tied:
        layouts["head.kernel"] = linear_kernel("head")
    layouts |= _positions(model, "stack", "")
    if model.short_conv:
        layouts["stack.short_conv.kernel"] = Tensor("short_conv.kernel", inputs=2)
    if model.ngram_memory:
        layouts["stack.ngram_memory.kernel"] = Tensor("ngram_memory.kernel", inputs=2)
        layouts["stack.ngram_memory.bias"] = Tensor("ngram_memory.bias", inputs=1)
    if any(spec.has_memory_prompt for spec in mixer_specs(model)):
        layouts["stack.prompt"] = Tensor("prompt", inputs=1)
        if model.fam_update == "gated":
            for name in ("weight", "bias"):
                gate = f"mixer.memory_gate.{name}"
                layouts[f"layer.{gate}"] = Tensor(f"layers.{{}}.attention.memory_gate.{name}")
    if "delta" in model.mixer.split(","):
        for name, inputs in _DELTA_MEMORY.items():
            memory = f"delta_memory.{name}"
            layouts[f"layer.mixer.{memory}"] = Tensor(f"layers.{{}}.attention.{memory}", inputs)
    if _has_feature_map(model):
        layouts |= _feature_map("mixer", "attention")
    if has_linear_cross(model):
        layouts |= _feature_map("cross", "cross")
    if model.stack in FEEDBACK:
        layouts |= _feedback(model)
    if model.smeared_keys:
        layouts["layer.mixer.key_smear.weight"] = Tensor("layers.{}.attention.key_smear.weight")
    layer = _sublayers(model, {"mixer.qkv": "attention", "mlp": "mlp"}, "layer", "layers.{}")
    if not model.encoder.layers:
        return layouts | layer
    # the layers of an encoder have no index: their arrays are stacked
    of_encoder = _sublayers(
        model, {"qkv": "attention", "mlp": "mlp"}, "encoder.layers.0", "encoder.layers.{}"
    )
    cross = _sublayers(model, {"cross.qkv": "cross"}, "layer", "layers.{}")
    layouts |= _positions(model, "encoder", "encoder.")
    if arch.pre_norm:
        layouts |= _norm(model, "encoder.norm", "encoder.norm")
    if not model.encoder.shared:
        layouts["source_embedding"] = Tensor("source_embed.weight", inputs=1)
    return layouts | layer | of_encoder | cross


def _feature_map(ours: str, theirs: str) -> Tensors:
    shapes = {"kernel": ("weight", 2), "bias": ("bias", 1), "tau": ("tau", 0)}
    return {
        f"layer.{ours}.map.{name}": Tensor(f"layers.{{}}.{theirs}.map.{other}", inputs)
        for name, (other, inputs) in shapes.items()
    }


def _feedback(model: ModelConfig) -> Tensors:
    """Return the layouts of what only a feedback stack has."""
    layouts = {
        "stack.distances": Tensor("distances", 1),
        "stack.mix": Tensor("mix", 1),
        "layer.span": Tensor("layers.{}.span"),
        "stack.keys.k_norm.scale": Tensor("keys.k_norm.weight"),
    }
    for name in ("k", "v"):
        layouts[f"stack.keys.{name}.kernel"] = linear_kernel(f"keys.{name}")
        layouts[f"stack.keys.{name}.bias"] = Tensor(f"keys.{name}.bias")
    return layouts | _norm(model, "stack.keys.norm", "keys.norm")


def _positions(model: ModelConfig, ours: str, theirs: str) -> Tensors:
    """Return the layouts of what decoder or encoder apply to embeddings.

    Args:
      ours: prefix of the names here.
      theirs: prefix of the names in the checkpoint, with its dot.
    """
    layouts = Tensors()
    if model.arch.positions == "learned":
        layouts[f"{ours}.positions.table"] = Tensor(f"{theirs}positions.weight", inputs=1)
    if model.arch.embed_norm:
        layouts |= _norm(model, f"{ours}.embed_norm", f"{theirs}embed_norm")
    return layouts


def _sublayers(model: ModelConfig, names: dict[str, str], ours: str, theirs: str) -> Tensors:
    """Return the layouts of a layer's attentions, and of its feed-forward, "mlp".

    Args:
      names: the sublayers' names here, each with its name in the checkpoint.
      ours, theirs: prefixes of the names here and in the checkpoint.
    """
    arch, layouts = model.arch, Tensors()
    maps = ("up", "gate", "down") if model.mlp in ("swiglu", "geglu") else ("up", "down")
    for own, other in names.items():
        is_mlp = own == "mlp"
        for name in maps if is_mlp else ("q", "k", "v", "out"):
            here, there = f"{ours}.{own}.{name}", f"{theirs}.{other}.{name}"
            layouts[f"{here}.kernel"] = linear_kernel(there, 2 if name == "out" else 1)
            has_bias = arch.out_bias if name == "out" else arch.qkv_bias
            if arch.mlp_bias if is_mlp else has_bias:
                layouts[f"{here}.bias"] = Tensor(f"{there}.bias")
        layouts |= _norm(model, f"{ours}.{own}.norm", f"{theirs}.{other}.norm")
        if arch.post_norm:
            layouts |= _norm(model, f"{ours}.{own}.post", f"{theirs}.{other}.post_norm")
        if arch.qk_norm and not is_mlp:
            for name in ("q_norm", "k_norm"):
                layouts[f"{ours}.{own}.{name}.scale"] = Tensor(f"{theirs}.{other}.{name}.weight")
    return layouts


def _norm(model: ModelConfig, ours: str, theirs: str) -> Tensors:
    layouts = {f"{ours}.scale": Tensor(f"{theirs}.weight")}
    if model.norm == "layernorm":
        layouts[f"{ours}.bias"] = Tensor(f"{theirs}.bias")
    return layouts


FAMJAX = Family(f"Famjax{_DECODER}", parse, serialize, tensors, _KEYS)
