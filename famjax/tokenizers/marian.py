"""Marian's tokenizer: a SentencePiece model for each language, and one table of ids for both.

Its models normalize white space, so that it is not lossless.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from famjax.core.errors import UserError, did_you_mean
from famjax.core.json_files import parse_json, read_whole, shorten
from famjax.tokenizers.tokenizer import Tokenizer

# the models of sources and of targets, and the ids of their pieces
MARIAN_FILES = ("source.spm", "target.spm", "vocab.json")
# a table of the targets' ids alone, which a few models have
_OTHER_VOCABULARY = "target_vocab.json"
# SentencePiece represents a space by this character
_META = "\u2581"
_END, _PADDING, _UNKNOWN = "</s>", "<pad>", "<unk>"
# the target language of a model with several, at the start of a source
_LANGUAGE = re.compile(r"^>>.+?<<")


class MarianTokenizer(Tokenizer):
    """The tokenizer in a folder with the files `MARIAN_FILES`, such as Helsinki-NLP/opus-mt-de-en.

    `encode` is for sources. Targets begin with padding, as the models were trained, and padding is
    never written. A source that begins with an unknown language raises a `UserError`, if the table
    has languages.

    Args:
      name: argument of `load_tokenizer`.
      folder: the folder.

    Raises:
      UserError: a file is missing or damaged, lacks a special token, or padding is not its last id.
    """

    is_lossless = False

    def __init__(self, name: str, folder: Path):
        if (folder / _OTHER_VOCABULARY).exists():
            raise UserError(
                f"{folder / _OTHER_VOCABULARY}: sources and targets have one table of ids here; "
                "take a model with vocab.json alone"
            )
        contents = []
        for file in MARIAN_FILES:
            try:
                contents.append(read_whole(folder / file, "copy or download it again"))
            except OSError as error:
                raise UserError(
                    f"{folder / file}: {error.strerror}; a Marian tokenizer is "
                    f"{', '.join(MARIAN_FILES)}: copy all of them"
                ) from None
        self._source, self._target = (
            _load_model(folder / file, content)
            for file, content in zip(MARIAN_FILES[:2], contents, strict=False)
        )
        self._ids = _parse_vocabulary(folder / MARIAN_FILES[2], contents[2])
        pieces = [b""] * (max(self._ids.values()) + 1)
        for piece, token in self._ids.items():
            pieces[token] = piece.replace(_META, " ").encode("utf-8")
        for special, text in ((_END, b""), (_PADDING, b""), (_UNKNOWN, "\ufffd".encode())):
            pieces[self._ids[special]] = text
        padding, end = self._ids[_PADDING], self._ids[_END]
        super().__init__(name, pieces, padding, end, b"".join(contents))
        self.unknown_id = self._ids[_UNKNOWN]
        self.token_bytes[self.unknown_id] = 0
        if padding != self.vocab_size - 1:
            raise UserError(
                f"{folder / MARIAN_FILES[2]}: {_PADDING} has the id {padding}, and must have the "
                f"last, {self.vocab_size - 1}, so that it is never written; take another model"
            )
        self.output_size = padding
        self._languages = {piece for piece in self._ids if _LANGUAGE.fullmatch(piece)}

    def encode(self, text: str) -> np.ndarray:
        match = _LANGUAGE.match(text)
        if match is None:
            return self._to_ids(self._source.encode(text, out_type=str))
        language, rest = match[0], text[match.end() :]
        if self._languages and language not in self._languages:
            known = sorted(piece[2:-2] for piece in self._languages)
            raise UserError(
                f"{shorten(language)}: not a language of {self.name}"
                f"{did_you_mean(language[2:-2], known)} (known: {shorten(', '.join(known), 200)})"
            )
        return self._to_ids([language, *self._source.encode(rest, out_type=str)])

    def encode_target(self, text: str) -> np.ndarray:
        return self._to_ids(self._target.encode(text, out_type=str))

    def _to_ids(self, pieces: list[str]) -> np.ndarray:
        unknown = self._ids[_UNKNOWN]
        return np.array([self._ids.get(piece, unknown) for piece in pieces], np.int32)

    def decode(self, ids: Any) -> str:
        # the models put a space in front of a text
        return super().decode(ids).removeprefix(" ")


def _load_model(path: Path, content: bytes) -> Any:
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=content)
    except (RuntimeError, ValueError):
        raise UserError(f"{path}: not a SentencePiece model; copy or download it again") from None


def _parse_vocabulary(path: Path, content: bytes) -> dict[str, int]:
    try:
        found = parse_json(content.decode("utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}); copy or download it again") from None
    if not isinstance(found, dict) or not all(
        type(token) is int and 0 <= token < 10**7 for token in found.values()
    ):
        raise UserError(f"{path}: not a table of pieces and ids; copy or download it again")
    for special in (_END, _PADDING, _UNKNOWN):
        if special not in found:
            raise UserError(f"{path}: has no {special}; copy or download it again")
    return found
