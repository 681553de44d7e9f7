"""BART: Marian's layers, with learned positions and normalized embeddings."""

from __future__ import annotations

from famjax.config.resolved import ResolvedModelConfig
from famjax.config.schema import ArchConfig, ModelConfig
from famjax.convert.families import marian
from famjax.convert.families.common import Family
from famjax.convert.families.keys import HF, Keys, UnsupportedKey

# rows of the table of positions before that of the first position
_OFFSET = 2
_KEYS = Keys(
    marian.USED,
    marian.UNSUPPORTED_HERE
    | {
        "tie_word_embeddings": UnsupportedKey((None, True), "encoder, decoder and head share one"),
        "normalize_embedding": UnsupportedKey((None, True), "embeddings have a norm"),
        "static_position_embeddings": UnsupportedKey((None, False), "positions are learned"),
    },
    marian.HARMLESS_HERE,
    marian.ALIASES,
)


def parse(hf: HF) -> ModelConfig:
    added = {"positions": "learned", "position_offset": _OFFSET, "embed_norm": True}
    return marian.parse_sizes(hf, ArchConfig(**marian.arch_of(hf) | added), shared=True)


def serialize(model: ResolvedModelConfig) -> HF:
    return marian.serialize_sizes(model) | {"model_type": "bart"}


BART = Family("BartForConditionalGeneration", parse, serialize, marian.tensors, _KEYS)
