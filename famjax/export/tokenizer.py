"""Writes a run's tokenizer as files for `transformers.AutoTokenizer`, with the same ids.

tokenizer.json is plain JSON and written without Hugging Face's libraries.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

from famjax.core.json_files import parse_json
from famjax.core.paths import expanded
from famjax.export.check import silence_transformers
from famjax.tokenizers.load import HUGGING_FACE, SENTENCEPIECE, save_words
from famjax.tokenizers.marian import MARIAN_FILES, MarianTokenizer
from famjax.tokenizers.sentence_piece import SentencePieceTokenizer
from famjax.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from famjax.tokenizers.words import BEGIN, LINE_END, UNKNOWN, WordTokenizer

_CONFIG = "tokenizer_config.json"
# files of a Hugging Face tokenizer; not config.json, which is another model's
_COPIED = (
    HUGGING_FACE,
    _CONFIG,
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
# difficult text; without "▁", which SentencePiece's format cannot tell from a space
_SAMPLE = (
    "The cat  sat on\tthe mat,\n\n and  the dog — très bien — said: 'I've 1234567 £ and 猫が'.\n"
    "    def f(x):\r\n        return x**2 \U0001f600  "
)

Json = dict[str, Any]


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> list[str]:
    """Write a run's tokenizer, and return lines about the comparison with it."""
    if isinstance(tokenizer, ByteTokenizer):
        _write(folder, _byte_tokenizer(), "<bos>", "<eos>")
        return _compare(tokenizer, folder, "please report it")
    if isinstance(tokenizer, WordTokenizer):
        _write(folder, _word_tokenizer(tokenizer), tokenizer.words[BEGIN], tokenizer.words[BEGIN])
        save_words(tokenizer.text(), folder)
        return _compare(tokenizer, folder, "white space beyond ASCII is the cause")
    home = expanded(tokenizer.name)
    if isinstance(tokenizer, SentencePieceTokenizer):
        _write(folder, *_sentencepiece_tokenizer(home.read_bytes(), tokenizer))
        shutil.copyfile(home, folder / SENTENCEPIECE)
        return _compare(tokenizer, folder, f"take {SENTENCEPIECE} with the sentencepiece library")
    # a Hugging Face folder, or the tokenizer.json of a run
    origin = home if home.is_dir() else home.parent
    is_marian = isinstance(tokenizer, MarianTokenizer)
    for name in (*_COPIED[1:], *MARIAN_FILES) if is_marian else _COPIED:
        if (origin / name).exists():
            shutil.copyfile(origin / name, folder / name)
    if is_marian:
        _name_class(folder / _CONFIG)
        return _compare(tokenizer, folder, "take famjax's")
    _add_padding(folder / _CONFIG, tokenizer)
    why = "famjax does not apply its normalization, such as a space added before the text"
    return _compare(tokenizer, folder, why)


def _name_class(path: Path) -> None:
    """Name Marian's class in a tokenizer_config.json that names none.

    Without it transformers finds the class from config.json, which may be that of our own model.
    """
    config: Any = {}
    with contextlib.suppress(OSError, ValueError):
        config = parse_json(path.read_text(encoding="utf-8"))
    if isinstance(config, dict) and not config.get("tokenizer_class"):
        text = json.dumps(config | {"tokenizer_class": "MarianTokenizer"}, indent=2)
        path.write_text(text + "\n", encoding="utf-8")


def _add_padding(path: Path, tokenizer: Tokenizer) -> None:
    """Use eos as the padding token if a tokenizer_config.json has none."""
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    # not named by this file alone
    eos = {token: name for name, token in tokenizer.control_ids.items()}.get(tokenizer.eos_id)
    if isinstance(config, dict) and not config.get("pad_token") and eos:
        text = json.dumps(config | {"pad_token": eos}, indent=2, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")


def _compare(tokenizer: Tokenizer, folder: Path, otherwise: str) -> list[str]:
    """Compare the ids of transformers' tokenizer for the folder with ours, if it is installed."""
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError:
        return []
    ids = tokenizer.encode(_SAMPLE).tolist()
    # the tokenizer does not need the model's code
    readers: tuple[tuple[Any, Json], ...] = (
        (AutoTokenizer, {"trust_remote_code": False}),
        (PreTrainedTokenizerFast, {}),
    )
    problem = "gives other ids for some texts"
    for kind, options in readers:
        try:
            with silence_transformers():
                theirs = kind.from_pretrained(folder, **options)
        except Exception:
            # of many kinds; an export without transformers' tokenizer is still of use
            if kind is AutoTokenizer:
                problem = "cannot read the tokenizer"
            continue
        if theirs.encode(_SAMPLE, add_special_tokens=False) == ids:
            # AutoTokenizer substitutes another class for some families, such as Qwen 2
            same = f"compared with transformers' {kind.__name__}: the same {len(ids)} ids of a text"
            return [same if kind is AutoTokenizer else f"{same}; AutoTokenizer {problem}"]
    return [f"transformers' AutoTokenizer {problem}: {otherwise}"]


def _write(folder: Path, made: Json, bos: str, eos: str) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        # padding in batches, which the attention mask hides
        "pad_token": eos,
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    for name, content in ((HUGGING_FACE, made), (_CONFIG, config)):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")


def _added_token(token: int, content: str, special: bool) -> Json:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": content, **flags, "special": special}


def _tokenizer_json(added: list[Json], **parts: Json | None) -> Json:
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer"))
    return {"version": "1.0", **empty, "added_tokens": added, "post_processor": None} | parts


def _byte_tokenizer() -> Json:
    """Return a byte-level BPE without merges; its vocabulary is the bytes in BPE's alphabet."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    level["use_regex"] = False
    vocabulary = {letters[byte]: byte for byte in range(256)}
    return _tokenizer_json(
        [_added_token(256, "<bos>", True), _added_token(257, "<eos>", True)],
        pre_tokenizer=level,
        decoder=level,
        model={"type": "BPE", "vocab": vocabulary, "merges": []},
    )


def _word_tokenizer(tokenizer: WordTokenizer) -> Json:
    """Return the tokenizer.json of a word list, in which line ends are a word."""
    words = tokenizer.words
    line: Json = {"type": "Replace", "pattern": {"String": "\n"}, "content": f" {words[LINE_END]} "}
    return _tokenizer_json(
        [_added_token(BEGIN, words[BEGIN], True)],
        normalizer=line,
        pre_tokenizer={"type": "WhitespaceSplit"},
        model={
            "type": "WordLevel",
            "vocab": {word: i for i, word in enumerate(words)},
            "unk_token": words[UNKNOWN],
        },
    )


def _sentencepiece_tokenizer(content: bytes, tokenizer: Tokenizer) -> tuple[Json, str, str]:
    """Return a SentencePiece model's tokenizer.json, and its bos and eos.

    Like famjax it keeps all spaces and adds no prefix space.
    """
    from sentencepiece import sentencepiece_model_pb2 as format

    model_proto: Any = format.ModelProto  # type: ignore[attr-defined]
    proto = model_proto.FromString(content)
    pieces = [piece.piece for piece in proto.pieces]
    scores = [piece.score for piece in proto.pieces]
    kinds = model_proto.SentencePiece
    added = [
        _added_token(i, piece.piece, piece.type != kinds.USER_DEFINED)
        for i, piece in enumerate(proto.pieces)
        if piece.type in (kinds.CONTROL, kinds.UNKNOWN, kinds.USER_DEFINED)
    ]
    spec = proto.trainer_spec
    if spec.model_type == spec.BPE:
        model: Json = {
            "type": "BPE",
            "unk_token": pieces[spec.unk_id],
            "fuse_unk": True,
            "byte_fallback": spec.byte_fallback,
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": _merges(pieces, scores),
        }
    else:
        model = {
            "type": "Unigram",
            "unk_id": spec.unk_id,
            "vocab": [list(pair) for pair in zip(pieces, scores, strict=True)],
            "byte_fallback": spec.byte_fallback,
        }
    space: Json = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps = [space]
    if charsmap := proto.normalizer_spec.precompiled_charsmap:
        text = base64.b64encode(charsmap).decode()
        steps.insert(0, {"type": "Precompiled", "precompiled_charsmap": text})
    back: Json = space | {"pattern": {"String": "▁"}, "content": " "}
    made = _tokenizer_json(
        added,
        normalizer={"type": "Sequence", "normalizers": steps},
        decoder={
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}],
        },
        model=model,
    )
    return made, pieces[tokenizer.bos_id], pieces[tokenizer.eos_id]


def _merges(pieces: list[str], scores: list[float]) -> list[list[str]]:
    """Return the merges of the pieces, in SentencePiece's order."""
    ids = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for token in sorted(range(len(pieces)), key=lambda i: -scores[i]):
        piece = pieces[token]
        cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        there = [cut for cut in cuts if cut[0] in ids and cut[1] in ids]
        merges += sorted(there, key=lambda cut: (ids[cut[0]], ids[cut[1]]))
    return [list(pair) for pair in merges]
