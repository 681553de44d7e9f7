"""The keys of config.json: used, harmless, or an error if their value is not supported.

transformers keeps any key, and some of them change the model, for example to attention that is not
causal. tests/convert/test_keys.py compares these lists with the installed version's classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from famjax.core.errors import UserError

HF = dict[str, Any]


class Required:
    """The default of a required key."""


REQUIRED = Required()


class UnsupportedKey(NamedTuple):
    """A key with values that famjax does not support.

    Attributes:
      neutral: the values without effect.
      why: what is not supported, for the error message.
      allowed: (value, the whole config.json) -> whether another value has no effect either.
    """

    neutral: tuple[Any, ...]
    why: str
    allowed: Callable[[Any, HF], bool] = lambda value, hf: False


class Keys(NamedTuple):
    """The keys of a family.

    Attributes:
      used: the keys that `Family.parse` reads, with their defaults.
      unsupported: unsupported keys of this family; `UNSUPPORTED` has those of all families.
      harmless: keys of this family without effect, with the reason; `HARMLESS` has those of all
        families.
      aliases: alias -> key; if both are given, transformers takes the alias.
    """

    used: Mapping[str, Any]
    unsupported: Mapping[str, UnsupportedKey] = {}
    harmless: Mapping[str, str] = {}
    aliases: Mapping[str, str] = {}


def _has_no_model_code(value: Any, hf: HF) -> bool:
    kinds = ("AutoTokenizer", "AutoProcessor", "AutoImageProcessor", "AutoFeatureExtractor")
    return isinstance(value, dict) and set(value) <= set(kinds)


def all_layers_full(value: Any, hf: HF) -> bool:
    """Return whether all layer_types are full attention."""
    return isinstance(value, list) and set(value) <= {"full_attention"}


_OFF = (None, False)
_WINDOW = "this family has no sliding windows"
UNSUPPORTED = {
    "quantization_config": UnsupportedKey((None,), "take the model as it was before quantization"),
    "compression_config": UnsupportedKey((None,), "take the model as it was before compression"),
    "auto_map": UnsupportedKey(
        (None, {}),
        "the model has its own code, which is not run; if its layers are the family's anyway, "
        "remove the key",
        _has_no_model_code,
    ),
    "per_layer_config": UnsupportedKey((None, {}), "all layers have the same shape here"),
    "use_bidirectional_attention": UnsupportedKey(_OFF, "attention is causal here"),
    "is_causal": UnsupportedKey((None, True), "attention is causal here"),
    "is_encoder_decoder": UnsupportedKey(_OFF, "only decoders are supported"),
    "tie_encoder_decoder": UnsupportedKey(_OFF, "only decoders are supported"),
    "add_cross_attention": UnsupportedKey(_OFF, "only decoders are supported"),
    "cross_attention_hidden_size": UnsupportedKey((None,), "only decoders are supported"),
    "pruned_heads": UnsupportedKey((None, {}, []), "all layers have the same heads here"),
    "attention_chunk_size": UnsupportedKey((None,), "chunked attention is not supported"),
    "partial_rotary_factor": UnsupportedKey((None, 1), "this family rotates whole heads"),
    "rope_interleaved": UnsupportedKey(_OFF, "rotated pairs are halves of a head, not neighbors"),
    "use_mrope": UnsupportedKey(_OFF, "multi-axis rotary positions (M-RoPE) are not supported"),
}
# unsupported keys of families with full attention in all layers
NO_WINDOW = {
    "sliding_window": UnsupportedKey((None,), _WINDOW),
    "use_sliding_window": UnsupportedKey(_OFF, _WINDOW),
    "layer_types": UnsupportedKey((None,), _WINDOW, all_layers_full),
}


def _invert(reasons: Mapping[str, str]) -> dict[str, str]:
    return {name: why for why, names in reasons.items() for name in names.split()}


HARMLESS = _invert(
    {
        "says what it is": "model_type architectures _name_or_path name_or_path _commit_hash "
        "transformers_version transformers.js_config is_llama_config unsloth_version unsloth_fixed",
        "of the files: all is read into float32": "dtype torch_dtype use_bfloat16",
        "how it is computed": "_attn_implementation attn_implementation "
        "_attn_implementation_internal _experts_implementation experts_implementation "
        "_experts_implementation_internal _attn_implementation_autoset _flash_attn_2_enabled "
        "gradient_checkpointing torchscript use_cache cache_implementation base_model_tp_plan "
        "base_model_pp_plan base_model_ep_plan base_model_fsdp_plan",
        "the same sums in pieces": "pretraining_tp chunk_size_feed_forward",
        "what a call gives": "return_dict use_return_dict output_attentions _output_attentions "
        "output_hidden_states tie_last_hidden_states keys_to_ignore_at_inference",
        "of models with another head": "id2label label2id num_labels problem_type "
        "finetuning_task task_specific_params classifier_dropout",
        "of the tokenizer": "bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id "
        "mask_token_id unk_token_id decoder_start_token_id prefix tokenizer_class "
        "model_max_length",
        "of generate()": "assistant_confidence_threshold assistant_lookbehind bad_words_ids "
        "begin_suppress_tokens diversity_penalty do_sample early_stopping "
        "encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff eta_cutoff "
        "exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty "
        "max_length min_length max_new_tokens no_repeat_ngram_size num_assistant_tokens "
        "num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences "
        "output_scores remove_invalid_values repetition_penalty return_dict_in_generate "
        "suppress_tokens target_lookbehind temperature top_k top_p typical_p",
        "of training in transformers": "initializer_range attention_dropout hidden_dropout "
        "resid_pdrop embd_pdrop attn_pdrop",
        "nothing without per_layer_config": "per_layer_attributes is_heterogeneous "
        "allow_global_per_layer_attribute_access serialize_explicit_per_layer_config",
        "of transformers' classes": "attribute_map base_config_key default_rope_type "
        "default_theta extra_config_files extra_files ignore_keys_at_rope_validation sub_configs "
        "sub_configs_defaults _auto_class _post_init_done",
    }
)


def resolve(hf: HF, keys: Keys) -> HF:
    """Return the keys that a family uses, with defaults for those that are missing.

    Raises:
      UserError: an unsupported key changes the model.
      KeyError: a required key is missing.
    """
    for other, name in keys.aliases.items():
        if other in hf:
            hf = hf | {name: hf[other]}
    for name, refused in (UNSUPPORTED | dict(keys.unsupported)).items():
        value = hf.get(name)
        if name in keys.used or name not in hf or value in refused.neutral:
            continue
        if not refused.allowed(value, hf):
            raise UserError(
                f"config.json: {name}={_short(value)} is not supported for "
                f"{hf.get('model_type')}: {refused.why}"
            )
    resolved = dict(keys.used) | {name: hf[name] for name in keys.used if name in hf}
    for name, value in resolved.items():
        if isinstance(value, Required):
            raise KeyError(name)
    return resolved


def find_unknown_keys(hf: HF, keys: Keys) -> list[str]:
    """Return the keys of a config.json that are set but unknown to famjax."""
    known = {*keys.used, *keys.unsupported, *keys.harmless, *keys.aliases, *UNSUPPORTED, *HARMLESS}
    return sorted(
        name for name, value in hf.items() if name not in known and value not in (None, False)
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
