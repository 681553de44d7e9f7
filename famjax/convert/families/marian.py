"""Marian: an encoder-decoder with sinusoidal positions, and the layout that it shares with BART."""

from __future__ import annotations

from famjax.config.resolved import ResolvedModelConfig
from famjax.config.schema import ArchConfig, EncoderConfig, ModelConfig
from famjax.convert.families.common import Family, parse_activation
from famjax.convert.families.keys import HF, NO_WINDOW, REQUIRED, Keys, UnsupportedKey
from famjax.convert.tensors import Tensor, Tensors, linear_kernel
from famjax.core.errors import UserError

_ACTIVATIONS = {
    "gelu": "gelu_exact",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "swish": "swish",
    "silu": "swish",
}
_NAMES = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
# a layer's projections here, and in the checkpoint; the output projection has two inputs
_PROJECTIONS = (("q", "q_proj", 1), ("k", "k_proj", 1), ("v", "v_proj", 1), ("out", "out_proj", 2))
# sizes that encoder and decoder have apart in config.json
_BOTH = ("attention_heads", "ffn_dim")

USED = {
    **dict.fromkeys(
        (
            "vocab_size",
            "d_model",
            "encoder_layers",
            "decoder_layers",
            *(f"{side}_{size}" for side in ("encoder", "decoder") for size in _BOTH),
            "max_position_embeddings",
        ),
        REQUIRED,
    ),
    "activation_function": "gelu",
    "scale_embedding": False,
}
UNSUPPORTED_HERE = NO_WINDOW | {
    "is_encoder_decoder": UnsupportedKey((None, True), "the model has an encoder"),
    "is_decoder": UnsupportedKey((None, False), "the model has an encoder"),
    "normalize_before": UnsupportedKey((None, False), "norms follow the residual sums"),
    "add_final_layer_norm": UnsupportedKey((None, False), "there is no final norm"),
}
HARMLESS_HERE = {
    **dict.fromkeys(
        (
            *("dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop"),
            *("init_std", "classif_dropout"),
        ),
        "of training in transformers",
    ),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "rope_theta"), "positions are absolute"),
    "add_bias_logits": "final_logits_bias is always read",
    "extra_pos_embeddings": "the size of the table is read",
    "force_bos_token_to_be_generated": "of generate()",
    "output_past": "what a call gives",
    "_num_labels": "of models with another head",
}
ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "encoder_attention_heads",
    "num_hidden_layers": "encoder_layers",
}
_KEYS = Keys(
    USED
    | {
        "decoder_vocab_size": None,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
    },
    UNSUPPORTED_HERE
    | {
        "normalize_embedding": UnsupportedKey((None, False), "embeddings have no norm"),
        "static_position_embeddings": UnsupportedKey((None, True), "positions are sinusoids"),
    },
    HARMLESS_HERE,
    ALIASES,
)


def parse_sizes(hf: HF, arch: ArchConfig, shared: bool) -> ModelConfig:
    """Return the model of a config.json.

    Args:
      arch: what differs between the families; the rest is filled in.
      shared: whether encoder and decoder share an embedding.
    """
    for size in _BOTH:
        encoder, decoder = hf[f"encoder_{size}"], hf[f"decoder_{size}"]
        if encoder != decoder:
            raise UserError(
                f"config.json: encoder_{size}={encoder} and decoder_{size}={decoder}: encoder and "
                "decoder have the same sizes here, only their depths differ"
            )
    width, heads = hf["d_model"], hf["decoder_attention_heads"]
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        layers=hf["decoder_layers"],
        width=width,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        mlp_width=hf["decoder_ffn_dim"],
        mlp=parse_activation(hf, _ACTIVATIONS, "activation_function"),  # type: ignore[arg-type]
        norm="layernorm",
        tied=hf.get("tie_word_embeddings", True),
        mixer="full",
        capacity=hf["max_position_embeddings"],
        encoder=EncoderConfig(layers=hf["encoder_layers"], shared=shared),
        arch=arch,
    )


def arch_of(hf: HF) -> HF:
    """Return the fields of `ArchConfig` that the families share."""
    biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias", "logit_bias"), True)
    return biases | {
        "norm_eps": 1e-5,
        "pre_norm": False,
        "rotary_fraction": 0.0,
        "embed_scale": 0.0 if hf["scale_embedding"] else 1.0,
    }


def parse(hf: HF) -> ModelConfig:
    other = hf["decoder_vocab_size"]
    if other not in (None, hf["vocab_size"]):
        raise UserError(
            f"config.json: decoder_vocab_size={other} is not vocab_size={hf['vocab_size']}: "
            "encoder and decoder have one vocabulary here"
        )
    shared = bool(hf["share_encoder_decoder_embeddings"])
    if shared and not hf["tie_word_embeddings"]:
        raise UserError(
            "config.json: tie_word_embeddings=false with share_encoder_decoder_embeddings=true: "
            "an embedding that encoder and decoder share is that of the head; set true, or both "
            "false"
        )
    arch = ArchConfig(positions="sinusoidal_halves", **arch_of(hf))
    return parse_sizes(hf, arch, shared)


def serialize_sizes(model: ResolvedModelConfig) -> HF:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("attention_heads", model.heads), ("ffn_dim", model.mlp_width))
    }
    return {
        "vocab_size": model.vocab_size,
        "d_model": model.width,
        "encoder_layers": model.encoder.layers,
        "decoder_layers": model.layers,
        **sides,
        "max_position_embeddings": model.capacity,
        "activation_function": _NAMES.get(model.mlp, model.mlp),
        "scale_embedding": model.arch.embed_scale != 1,
        "tie_word_embeddings": model.tied,
        "is_encoder_decoder": True,
    }


def serialize(model: ResolvedModelConfig) -> HF:
    return serialize_sizes(model) | {
        "model_type": "marian",
        "decoder_vocab_size": model.vocab_size,
        "share_encoder_decoder_embeddings": model.encoder.shared,
    }


def tensors(model: ModelConfig) -> Tensors:
    """Return the layouts of both families; tables of positions and embedding norms are BART's."""
    side = "shared" if model.encoder.shared else "decoder.embed_tokens"
    layouts = {
        "embedding": Tensor(f"model.{side}.weight", inputs=1),
        "logit_bias": Tensor("final_logits_bias", is_row=True),
    }
    if not model.encoder.shared:
        layouts["source_embedding"] = Tensor("model.encoder.embed_tokens.weight", inputs=1)
    if not model.tied:
        layouts["head.kernel"] = linear_kernel("lm_head")
    for ours, theirs in (("encoder", "encoder"), ("stack", "decoder")):
        if model.arch.positions == "learned":
            name = f"model.{theirs}.embed_positions.weight"
            layouts[f"{ours}.positions.table"] = Tensor(name, inputs=1)
        if model.arch.embed_norm:
            layouts |= _norm(f"{ours}.embed_norm", f"model.{theirs}.layernorm_embedding")
    encoder, decoder = "model.encoder.layers.{}", "model.decoder.layers.{}"
    return (
        layouts
        # the layers of an encoder have no index: their arrays are stacked
        | _attention("encoder.layers.0.qkv", f"{encoder}.self_attn")
        | _feed_forward("encoder.layers.0.mlp", encoder)
        | _attention("layer.mixer.qkv", f"{decoder}.self_attn")
        | _attention("layer.cross.qkv", f"{decoder}.encoder_attn")
        | _feed_forward("layer.mlp", decoder)
    )


def _attention(ours: str, theirs: str) -> Tensors:
    layouts = _norm(f"{ours}.norm", f"{theirs}_layer_norm")
    for here, there, inputs in _PROJECTIONS:
        layouts |= _linear(f"{ours}.{here}", f"{theirs}.{there}", inputs)
    return layouts


def _feed_forward(ours: str, layer: str) -> Tensors:
    norm = _norm(f"{ours}.norm", f"{layer}.final_layer_norm")
    return norm | _linear(f"{ours}.up", f"{layer}.fc1") | _linear(f"{ours}.down", f"{layer}.fc2")


def _linear(ours: str, theirs: str, inputs: int = 1) -> Tensors:
    return {
        f"{ours}.kernel": linear_kernel(theirs, inputs),
        f"{ours}.bias": Tensor(f"{theirs}.bias"),
    }


def _norm(ours: str, theirs: str) -> Tensors:
    return {f"{ours}.scale": Tensor(f"{theirs}.weight"), f"{ours}.bias": Tensor(f"{theirs}.bias")}


MARIAN = Family("MarianMTModel", parse, serialize, tensors, _KEYS)
