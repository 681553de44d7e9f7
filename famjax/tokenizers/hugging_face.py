"""Hugging Face's tokenizer.json, with the other files in its folder, as a lossless tokenizer.

In two families of tokenizers every token represents fixed bytes. Byte-level BPE (GPT-2, Llama 3,
Qwen) represents each byte by a character. SentencePiece-like tokenizers (Llama 2, Mistral, Gemma)
write a space as '▁' and have byte tokens <0xHH> for what no other token covers. Normalizers that
only prepend a space or compose characters (NFC) are removed, so that text can be encoded in pieces.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from famjax.core.errors import UserError
from famjax.core.json_files import read_json, read_whole, shorten
from famjax.tokenizers.chat import ChatTemplate, split_escaped
from famjax.tokenizers.tokenizer import Tokenizer

_META = "\u2581"
_TO_META = {"type": "Replace", "pattern": {"String": " "}, "content": _META}
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
# Where text is cut before it is encoded. A literal '▁' is encoded by its bytes. Text that looks
# like a byte token is cut after its first character, so that it is not parsed as one.
_CUTS = f"({_META})|(?<=<)(?=0x[0-9A-F]{{2}}>)"
# bytes that never occur in UTF-8
_NO_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
# pre-tokenizers that split text and keep all of it, unless their "behavior" is Removed
_SPLITTERS = {"ByteLevel", "Split", "Digits", "Punctuation", "Metaspace", "UnicodeScripts"}
# Limits of gaps between ids: the table of all ids must not be a thousand times the size of the
# file.
_MAX_IDS_PER_TOKEN, _BYTES = 16, 256
_PROBE = " two  spaces\n\t\r\n   é e\u0301 漢字 😀 <s> </s> [INST] <0x0A> ▁ \0 I'm 1234 x\u00a0 "


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json: byte-level BPE, or SentencePiece-like with byte tokens.

    Control tokens (added tokens marked special) have no bytes, and only text that a chat template
    writes can contain them. Other added tokens represent their own text.

    BART's tokenizer, which puts bos and eos around every text, does so for sources and targets
    here, too; its decoder reads eos before a target (Lewis et al., 2019, as fairseq trained it).
    """

    def __init__(self, name: str, path: Path):
        self._where = f"data.tokenizer={name}"
        data = _read_json(path)
        try:
            spec, byte_level = _make_lossless(data, self._where)
            vocabulary = _get_vocabulary(spec)
            added = {token["content"]: token["id"] for token in spec["added_tokens"]}
            siblings = _SiblingFiles(path.parent, {**vocabulary, **added})
            bos, eos = self._find_bos_eos(siblings, path.with_name("tokenizer_config.json"))
            spec["added_tokens"] = _add_control_tokens(spec, vocabulary, {bos, eos})
            pieces = _make_token_bytes(spec, vocabulary, byte_level)
            framed = _frames_texts(data.get("post_processor"), bos, eos)
        except (KeyError, TypeError, AttributeError, ValueError, IndexError):
            raise UserError(f"{path}: not a tokenizer.json; fetch it again") from None
        if missing := _missing_bytes(pieces):
            raise UserError(
                f"{self._where}: has no token for the byte 0x{missing[0]:02X}, so it cannot encode "
                "every text; use another tokenizer"
            )
        self._json = json.dumps(spec, sort_keys=True)
        super().__init__(name, pieces, bos, eos, f"{self._json} {bos} {eos}".encode())
        if framed:
            self.start_id, self.first_id = eos, bos
        self.stop_ids |= siblings.stop_token_ids()
        specials = [token for token in spec["added_tokens"] if token["special"]]
        controls = {token["id"]: token["content"] for token in specials if token["content"]}
        self.control_ids = dict(zip(controls.values(), controls, strict=True))
        self._meta_ids: list[int] = []
        self._cuts = self._acting_cuts = None
        if not byte_level:
            self._meta_ids = [vocabulary[f"<0x{byte:02X}>"] for byte in _META.encode()]
            # Unigram matches control tokens in text like any other token; BPE's merges never
            # produce them
            unigram = spec["model"].get("type") == "Unigram"
            splits = [_split_pattern(control) for control in controls.values() if unigram]
            self._acting_cuts = re.compile(_CUTS)
            self._cuts = re.compile("|".join([_CUTS, *splits]))
        if (source := siblings.chat_template()) is not None:
            around = controls.get(bos, ""), controls.get(eos, "")
            self.chat_template = ChatTemplate(
                name, source, siblings.names(), *around, [*controls.values()]
            )
        if b"".join(map(self.token_to_bytes, self.encode(_PROBE))) != _PROBE.encode():
            raise UserError(
                f"{self._where}: changes the text it encodes in a way famjax does not know; use "
                "another tokenizer"
            )

    def _find_bos_eos(self, siblings: _SiblingFiles, config_path: Path) -> tuple[int, int]:
        """Return the ids of bos and eos; without a bos token, eos is used for both."""
        bos, eos = siblings.token("bos"), siblings.token("eos")
        if eos is None:
            raise UserError(f"{self._where}: names no eos_token; add one to {config_path}")
        bos = eos if bos is None else bos
        if not siblings.has_ids({bos, eos}):
            raise UserError(
                f"{self._where}: bos {bos} or eos {eos} is none of its tokens; name them in "
                f"{config_path}"
            )
        return bos, eos

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._ids(text), np.int32)

    def encode_source(self, text: str) -> np.ndarray:
        return self._framed(super().encode_source(text))

    def encode_target(self, text: str) -> np.ndarray:
        return self._framed(super().encode_target(text))

    def _framed(self, ids: np.ndarray) -> np.ndarray:
        return ids if self.first_id is None else np.append(np.int32(self.first_id), ids)

    def encode_rendered(self, text: str) -> np.ndarray:
        ids = [token for part, acting in split_escaped(text) for token in self._ids(part, acting)]
        return np.array(ids, np.int32)

    def _ids(self, text: str, acting: bool = False) -> list[int]:
        """Return the ids of text; control tokens in it are special if `acting`, else plain text."""
        backend, cuts = self._plain, self._cuts
        if acting:
            backend, cuts = self._acting, self._acting_cuts
        if cuts is None:
            return backend.encode(text, add_special_tokens=False).ids
        ids: list[int] = []
        for part in cuts.split(text):
            if part == _META:
                ids += self._meta_ids
            elif part:
                ids += backend.encode(part, add_special_tokens=False).ids
        return ids

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        backend = self._load()
        backend.encode_special_tokens = True
        return backend

    @cached_property
    def _acting(self) -> tokenizers.Tokenizer:
        return self._load()

    def _load(self) -> tokenizers.Tokenizer:
        try:
            return tokenizers.Tokenizer.from_str(self._json)
        except BaseException as error:  # panics of the Rust library are BaseExceptions
            if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                raise
            raise UserError(
                f"{self._where}: the tokenizers library cannot read it ({shorten(error, 200)}); "
                "fetch it again, or install a newer library"
            ) from None


def _split_pattern(token: str) -> str:
    """Return a pattern that matches the position after the first character of `token`."""
    return f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})"


def _make_lossless(data: dict[str, Any], where: str) -> tuple[dict[str, Any], bool]:
    """Return a lossless version of a tokenizer.json, and whether it is byte-level.

    Raises:
      UserError: its tokens do not represent fixed bytes.
    """

    def make_error(what: str) -> UserError:
        return UserError(
            f"{where}: {what}, so its tokens do not represent fixed bytes of text; use byte-level "
            "BPE or a SentencePiece-like tokenizer with byte tokens"
        )

    data = copy.copy(data)
    model = data["model"] = dict(data["model"])
    kind = model.get("type") or ("BPE" if "merges" in model else "no known model")
    if kind not in ("BPE", "Unigram"):
        raise make_error(f"is {kind}")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise make_error(f"marks words with {model[key]!r}")
    # drop settings for training or batching: dropout, truncation, padding, special tokens around
    # text
    if kind == "BPE":
        model["dropout"] = None
    data.update(truncation=None, padding=None, post_processor=None)

    normalizers = []
    for step in _flatten_steps(data.get("normalizer"), "normalizers"):
        if step == _TO_META:
            normalizers.append(step)
        elif step["type"] not in ("Prepend", "NFC"):
            raise make_error(f"has the normalizer {step['type']}")
    data["normalizer"] = {"type": "Sequence", "normalizers": normalizers}
    splitters = [
        _without_prefix_space(s) for s in _flatten_steps(data.get("pre_tokenizer"), "pretokenizers")
    ]
    for step in splitters:
        if step["type"] not in _SPLITTERS or step.get("behavior") == "Removed":
            raise make_error(f"has the pre-tokenizer {step['type']}, which drops text")
        if step.get("replacement", _META) != _META:
            raise make_error(f"writes spaces as {step['replacement']!r}")
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": splitters}
    # added tokens must not absorb spaces around them, unless they are special
    data["added_tokens"] = [
        token if token["special"] else {**token, "lstrip": False, "rstrip": False}
        for token in data.get("added_tokens") or []
    ]
    kinds = [step["type"] for step in splitters]
    if "ByteLevel" in kinds and not normalizers:
        return data, True
    if (normalizers or "Metaspace" in kinds) and model.get("byte_fallback"):
        return data, False
    raise make_error("is neither byte-level nor has it byte tokens")


def _frames_texts(post_processor: Any, bos: int, eos: int) -> bool:
    """Return whether a tokenizer.json puts bos and eos around every text as BART's does."""
    if not isinstance(post_processor, dict) or post_processor.get("type") != "RobertaProcessing":
        return False
    return [post_processor[end][1] for end in ("cls", "sep")] == [bos, eos]


def _add_control_tokens(
    spec: dict[str, Any], vocabulary: dict[str, int], ends: set[int]
) -> list[dict[str, Any]]:
    """Return the added tokens, including bos and eos (`ends`) as special tokens."""
    added = [{**t, "special": t["special"] or t["id"] in ends} for t in spec["added_tokens"]]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    missing = ends - {token["id"] for token in added}
    new = [(number, text) for text, number in vocabulary.items() if number in missing]
    return added + [{"id": n, "content": text, **flags, "special": True} for n, text in new]


def _flatten_steps(step: dict[str, Any] | None, parts: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, with nested sequences flattened."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [inner for part in step[parts] for inner in _flatten_steps(part, parts)]
    return [step]


def _without_prefix_space(step: dict[str, Any]) -> dict[str, Any]:
    """Return the pre-tokenizer changed so that it adds no space before the text."""
    if step["type"] == "ByteLevel":
        return {**step, "add_prefix_space": False}
    if step["type"] == "Metaspace":
        without = {key: value for key, value in step.items() if key != "add_prefix_space"}
        return {**without, "prepend_scheme": "never"}
    return step


def _get_vocabulary(spec: dict[str, Any]) -> dict[str, int]:
    vocabulary = spec["model"]["vocab"]
    if isinstance(vocabulary, dict):
        return vocabulary
    return {piece: number for number, (piece, _) in enumerate(vocabulary)}


def _make_token_bytes(
    spec: dict[str, Any], vocabulary: dict[str, int], byte_level: bool
) -> list[bytes]:
    """Return the bytes of each id; unused ids have none."""
    alphabet = _byte_alphabet()

    def encode_token(token: str) -> bytes:
        if not byte_level:
            byte = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace(_META, " ").encode()
        if all(character in alphabet for character in token):
            return bytes(alphabet[character] for character in token)
        return token.encode()

    added = spec["added_tokens"]
    ids = [*vocabulary.values(), *(token["id"] for token in added)]
    size = 1 + max(ids)
    if min(ids) < 0 or size > _MAX_IDS_PER_TOKEN * len(ids) + _BYTES:
        raise ValueError("ids out of range")
    pieces = [b""] * size
    for token, number in vocabulary.items():
        pieces[number] = encode_token(token)
    for token in added:
        text = token["content"] if byte_level else token["content"].replace(_META, " ")
        pieces[token["id"]] = b"" if token["special"] else text.encode()
    return pieces


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of GPT-2's alphabet; printable bytes map to themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


def _missing_bytes(pieces: list[bytes]) -> list[int]:
    present = {piece[0] for piece in pieces if len(piece) == 1}
    return sorted(set(range(256)) - present - _NO_UTF8)


class _SiblingFiles:
    """The settings in the files that are in the same folder as a tokenizer.json.

    Args:
      folder: the folder.
      ids: the ids of all tokens, by token.
    """

    def __init__(self, folder: Path, ids: Mapping[str, int]):
        self._folder, self._ids = folder, ids
        self._config = self._read("tokenizer_config.json")
        self._map = self._read("special_tokens_map.json")

    def _read(self, name: str) -> dict[str, Any]:
        path = self._folder / name
        return _read_json(path) if path.exists() else {}

    def has_ids(self, ids: set[int]) -> bool:
        return ids <= set(self._ids.values())

    def names(self) -> dict[str, str]:
        """Return the variables bos_token and eos_token for a chat template; "" if missing."""
        return {f"{role}_token": self._name(role) or "" for role in ("bos", "eos")}

    def _name(self, role: str) -> str | None:
        for settings in (self._config, self._map):
            token = settings.get(f"{role}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and token:
                return token
        return None

    def token(self, role: str) -> int | None:
        """Return the id of the token `role`, "bos" or "eos"; None if there is no such token."""
        if (name := self._name(role)) is not None:
            if (number := self._ids.get(name)) is None:
                raise UserError(
                    f"{self._folder}: {role}_token is {name!r}, which the vocabulary does not "
                    "have; fix tokenizer_config.json"
                )
            return number
        for file in ("generation_config.json", "config.json"):
            if numbers := self._read_token_ids(file, f"{role}_token_id"):
                return numbers[0]
        return None

    def stop_token_ids(self) -> frozenset[int]:
        """Return the ids, in addition to eos, at which generation stops.

        As in transformers, those of config.json count if there is no generation_config.json. The
        config may be another tokenizer's.
        """
        if (self._folder / "generation_config.json").exists():
            return frozenset(self._read_token_ids("generation_config.json", "eos_token_id"))
        numbers = set(self._read_token_ids("config.json", "eos_token_id"))
        return frozenset(numbers & set(self._ids.values()))

    def _read_token_ids(self, file: str, key: str) -> list[int]:
        value = self._read(file).get(key)
        numbers = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(number) is int and 0 <= number < 2**31 for number in numbers):
            raise UserError(f"{self._folder / file}: {key} is {shorten(value)}; write ids")
        return numbers

    def chat_template(self) -> str | None:
        """Return the source of the chat template; None if there is none."""
        path = self._folder / "chat_template.jinja"
        if path.exists():
            try:
                return read_whole(path, "fetch it again").decode("utf-8")
            except UnicodeDecodeError:
                raise UserError(f"{path}: not UTF-8; fetch it again") from None
        template = self._config.get("chat_template")
        if isinstance(template, list):
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default")
        if template is not None and not isinstance(template, str):
            raise UserError(
                f"{self._folder / 'tokenizer_config.json'}: chat_template is not a text; fix it"
            )
        return template


def _read_json(path: Path) -> dict[str, Any]:
    value = read_json(path, "fetch it again")
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object; fetch it again")
    return value
