"""A Hugging Face folder: safetensors, config.json, tokenizer, model card.

A model that a Hugging Face family can represent is written as a model of that family. All others
include their PyTorch code (famjax/export/pytorch).
"""

from __future__ import annotations

import importlib
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from famjax.config.schema import ModelConfig
from famjax.convert.families import FAMILIES, native_family, normalize_model
from famjax.convert.families.common import Family
from famjax.convert.families.famjax import FAMJAX, pytorch_class
from famjax.convert.families.famjax import serialize as serialize_famjax
from famjax.convert.families.keys import HF
from famjax.convert.load import load_pretrained
from famjax.convert.open import is_hugging_face
from famjax.convert.save import save_tensors
from famjax.core.errors import UserError
from famjax.core.json_files import read_json
from famjax.core.optional import missing_message, missing_modules
from famjax.export import check, pytorch
from famjax.export.card import model_card
from famjax.export.source import ExportSource
from famjax.export.tokenizer import write_tokenizer
from famjax.models.language_model import LanguageModel
from famjax.tokenizers.tokenizer import Tokenizer
from famjax.train.run_folder import find_source_config

# each needs those before it
CODE = (
    "configuration_famjax",
    "attention_famjax",
    "linear_famjax",
    "ngrams_famjax",
    "short_conv_famjax",
    "modeling_famjax",
    "modeling_famjax_seq2seq",
    "modeling_famjax_feedback",
)
_GENERATION, _ENDS = "generation_config.json", ("bos_token_id", "eos_token_id")
_START, _BAD = "decoder_start_token_id", "bad_words_ids"
# keys of the source's config.json that are dropped: older names, and properties of its files
_STALE = (
    "rope_theta",
    "rope_scaling",
    "rope_local_base_freq",
    "rotary_emb_base",
    "sliding_window_pattern",
    "_sliding_window_pattern",
    "torch_dtype",
    "quantization_config",
    "auto_map",
    "_name_or_path",
    "transformers_version",
)


def write(source: ExportSource, folder: Path) -> list[str]:
    """Write the folder and return lines about the comparison with the run."""
    before = _source_config(source.folder, source.run.config.init)
    reference, source = source.reference_model(), source.merge_adapters()
    family = native_family(source.model, str(before.get("model_type"))) or FAMJAX
    tensors = family.tensors(normalize_model(source.model))
    save_tensors(source.run.model, source.model, tensors, folder, source.dtype)
    config = _target_config(family, source.model, before, source.run.tokenizer, source.dtype)
    if family is not FAMJAX and source.model.arch.positions.startswith("sinusoidal"):
        # these families compute a table, which the longest source must fit as well as targets
        data, size = source.run.config.data, "max_position_embeddings"
        longest = (data.source_length or data.length) if source.run.step else 0
        config[size] = max(config[size], longest)
    is_same_family = FAMILIES.get(before.get("model_type", "")) is family
    untrained = _START in before and is_same_family and source.run.step == 0
    if untrained and source.run.tokenizer.first_id is None:
        # targets begin as they did, with BART weights and another tokenizer
        config[_START] = before[_START]
    _write_json(folder / "config.json", config)
    notes = write_tokenizer(source.run.tokenizer, folder)
    if (folder / _GENERATION).exists():
        _correct_generation(folder / _GENERATION, config)
    else:
        names = (*_ENDS, _START, "pad_token_id", "forced_bos_token_id", "forced_eos_token_id", _BAD)
        _write_json(folder / _GENERATION, {name: config[name] for name in names if name in config})
    if family is FAMJAX:
        module, _ = pytorch_class(source.model)
        for name in CODE[: CODE.index(module) + 1]:
            shutil.copyfile(Path(pytorch.__file__).with_name(f"{name}.py"), folder / f"{name}.py")
    (folder / "README.md").write_text(model_card(source, family, bool(before)), encoding="utf-8")
    return _compare(reference, source, family, folder) + notes


def _source_config(run: Path, init: str) -> HF:
    """Return the config.json that a run, or its `init`, was converted from."""
    path = find_source_config(run, init)
    if path is None and is_hugging_face(run):
        path = run / "config.json"
    if path is None:
        return {}
    found = read_json(path, "remove it, or restore it")
    if not isinstance(found, dict):
        raise UserError(f"{path}: not a table of keys; remove it, or restore it")
    return found


def _target_config(
    family: Family, model: ModelConfig, before: HF, tokenizer: Tokenizer, dtype: str
) -> HF:
    shape = (
        serialize_famjax(model) if family is FAMJAX else family.serialize(normalize_model(model))
    )
    stops = sorted(tokenizer.stop_ids)
    ends = dict(zip(_ENDS, (tokenizer.bos_id, stops if len(stops) > 1 else stops[0]), strict=True))
    carried = {name: value for name, value in before.items() if name not in _STALE}
    eos = before.get("eos_token_id")
    if eos is not None and not set(eos if isinstance(eos, list) else [eos]) <= tokenizer.stop_ids:
        # belongs to another tokenizer
        carried = {name: value for name, value in carried.items() if name not in (*ends, _BAD)}
    if FAMILIES.get(before.get("model_type", "")) is not family:
        # another family's keys have other meanings; only special tokens carry over
        carried = {name: value for name, value in carried.items() if name in ends}
    loaded: HF = {"architectures": [family.architecture], "dtype": dtype}
    if model.encoder.layers:
        loaded[_START] = tokenizer.start_id
        if tokenizer.first_id is not None:
            loaded["forced_bos_token_id"] = tokenizer.first_id
        if forbidden := range(tokenizer.output_size, tokenizer.vocab_size):
            loaded[_BAD] = [[token] for token in forbidden]
        # the default of another library may be no id of this vocabulary
        carried = {"pad_token_id": tokenizer.bos_id} | carried
    return ends | carried | loaded | shape


def _correct_generation(path: Path, config: HF) -> None:
    """Give a copied generation_config.json the start and the forbidden tokens of config.json."""
    copied = read_json(path, "remove it, or restore it")
    if not isinstance(copied, dict):
        return
    changed = {_BAD: config[_BAD]} if _BAD in config else {}
    start = config.get(_START)
    if start is not None and copied.get(_START) not in (None, start):
        # a token that must follow another start would be written twice
        copied = {name: value for name, value in copied.items() if name != "forced_bos_token_id"}
        changed[_START] = start
    if changed:
        _write_json(path, copied | changed)


def _write_json(path: Path, content: HF) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _compare(
    reference: LanguageModel, source: ExportSource, family: Family, folder: Path
) -> list[str]:
    tokens, last = check.sample_tokens(source.model)
    run = check.run_logits(reference, tokens, last)
    with warnings.catch_warnings():
        # about unknown keys of the source's config.json, reported at its conversion
        warnings.simplefilter("ignore", UserWarning)
        _, again = load_pretrained(folder, capacity=check.sample_capacity(source.model))
    notes = [
        check.compare_logits(
            "famjax reading it back", check.compute_logits(again, tokens, last), run
        )
    ]
    if missing := missing_modules(("torch", "transformers")):
        return [*notes, f"not compared with transformers: {missing_message(missing)}"]
    kind = _transformers_class(family, source.model)
    return [*notes, check.compare_logits(*_transformers_logits(kind, folder, tokens, last), run)]


def _transformers_class(family: Family, model: ModelConfig) -> Any:
    """Return the class that loads the folder."""
    import transformers

    if family is not FAMJAX:
        has_encoder = model.encoder.layers > 0
        return (
            transformers.AutoModelForSeq2SeqLM if has_encoder else transformers.AutoModelForCausalLM
        )
    # the same code as in the folder; as remote code it would be copied to the user's cache
    module, kind = pytorch_class(model)
    return getattr(importlib.import_module(f"{pytorch.__name__}.{module}"), kind)


def _transformers_logits(
    kind: Any, folder: Path, tokens: np.ndarray, last: int
) -> tuple[str, np.ndarray]:
    """Return transformers' version and its logits [b last v]."""
    import torch
    import transformers

    with check.silence_transformers():
        model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(tokens)
    # an encoder-decoder reads the same tokens as source and target, as in `check.compute_logits`
    has_encoder = model.config.is_encoder_decoder
    rest = {"decoder_input_ids": ids} if has_encoder else {"logits_to_keep": last}
    with torch.no_grad():
        logits = model(ids, **rest).logits[:, -last:]
    return f"transformers {transformers.__version__}", logits.float().numpy()
