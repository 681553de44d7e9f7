"""Tokenizers: bytes, SentencePiece, Hugging Face's tokenizer.json, or word lists.

Every token represents fixed bytes of UTF-8 (special tokens none), so decoding concatenates bytes.
All but word lists are lossless. The table of bytes by token gives `decode`, streaming decoding, and
bits per byte.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import io
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from famjax.core.errors import UserError
from famjax.core.json_files import regular_file_size
from famjax.core.paths import expanded
from famjax.data.chat import ChatTemplate

# SentencePiece writes a space as this character, and cannot distinguish the two.
_META = "\u2581"
# A ModelProto whose normalizer_spec sets add_dummy_prefix (3) and remove_extra_whitespaces (4) to
# false. Protocol buffers merge appended messages: this makes a model lossless, so that a document
# can be encoded in pieces.
_KEEP_TEXT = b"\x1a\x04\x18\x00\x20\x00"
# The trainer keeps its text in memory and expects short sentences.
_TRAINING_BYTES = 256 << 20
_SENTENCE_CHARS = 2048
# A tokenizer in a folder: the file that defines it, and those that Hugging Face keeps beside it
SENTENCEPIECE, HUGGING_FACE, WORDS = "tokenizer.model", "tokenizer.json", "words.txt"
_SIBLING_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
)


class Tokenizer:
    """Converts text to token ids and back.

    Attributes:
      name: the argument of `load_tokenizer`.
      vocab_size: v.
      bos_id, eos_id: ids around a document.
      stop_ids: ids at which generation stops; eos_id is one of them.
      token_bytes: [v] int32, the number of UTF-8 bytes of each token; 0 for specials.
      fingerprint: sha256, in hex, of the definition of the ids.
      chat_template: renders a conversation as text; None if there is none.
    """

    chat_template: ChatTemplate | None = None

    def __init__(
        self, name: str, pieces: Sequence[bytes], bos_id: int, eos_id: int, content: bytes
    ):
        self.name = name
        self.vocab_size = len(pieces)
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.stop_ids = frozenset([eos_id])
        self.token_bytes = np.array([len(piece) for piece in pieces], np.int32)
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self._pieces = tuple(pieces)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, [n] int32, without added specials."""
        raise NotImplementedError

    def encode_rendered(self, text: str) -> np.ndarray:
        """Return the ids of text from `chat_template`, with control tokens as their ids."""
        raise NotImplementedError

    def encode_chat(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True
    ) -> np.ndarray:
        """Return the ids of a conversation, [n] int32.

        As with `encode`, the caller adds bos, even if the template writes it. A control token's
        string is a control token if the template wrote it, and plain text inside a message.

        Args:
          messages: each with "role" and "content", and other fields that the template uses.
          add_generation_prompt: append the header of an assistant message.

        Raises:
          UserError: there is no template, or it rejects the messages.
        """
        if self.chat_template is None:
            raise UserError(
                f"tokenizer {self.name}: has no chat template; put chat_template.jinja beside its "
                "tokenizer.json, or write plain text"
            )
        return self.encode_rendered(
            self.chat_template.render_prompt(messages, add_generation_prompt)
        )

    def token_to_bytes(self, token: int) -> bytes:
        """Return the bytes of `token`: none for specials and for ids beyond the vocabulary, which a
        model with a padded embedding table can produce."""
        return self._pieces[token] if 0 <= token < self.vocab_size else b""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_to_bytes(int(token)) for token in ids).decode("utf-8", "replace")


class ByteTokenizer(Tokenizer):
    """The 256 bytes, then bos and eos."""

    def __init__(self) -> None:
        pieces = [bytes([byte]) for byte in range(256)] + [b"", b""]
        super().__init__("bytes", pieces, bos_id=256, eos_id=257, content=b"bytes")

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model that keeps leading and repeated spaces."""

    def __init__(self, name: str, content: bytes):
        self._model = sentencepiece.SentencePieceProcessor(model_proto=content + _KEEP_TEXT)
        # T5's models have no bos; their decoders start with the padding id.
        bos = self._model.bos_id() if self._model.bos_id() >= 0 else self._model.pad_id()
        if bos < 0 or self._model.eos_id() < 0:
            raise UserError(f"{name}: the model has no bos or no eos; train one with both")
        pieces = [self._bytes(token) for token in range(self._model.vocab_size())]
        super().__init__(name, pieces, bos, self._model.eos_id(), content)
        self.token_bytes[self._model.unk_id()] = 0
        self._meta_ids = self._byte_ids(_META)

    def _bytes(self, token: int) -> bytes:
        if self._model.is_control(token):
            return b""
        if self._model.is_unknown(token):
            return "\ufffd".encode()
        piece = self._model.id_to_piece(token)
        if self._model.is_byte(token):
            return bytes([int(piece[3:5], 16)])  # <0x1F>
        return piece.replace(_META, " ").encode("utf-8")

    def _byte_ids(self, text: str) -> list[int]:
        ids = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in text.encode("utf-8")]
        return ids if all(map(self._model.is_byte, ids)) else [self._model.unk_id()]

    def encode(self, text: str) -> np.ndarray:
        # A literal '▁' would decode to a space, so it is encoded by its bytes instead.
        first, *rest = text.split(_META)
        ids = self._model.encode(first)
        for part in rest:
            ids += self._meta_ids + self._model.encode(part)
        return np.array(ids, np.int32)


class StreamDecoder:
    """Decodes token by token, emitting complete characters only.

    The concatenated results of `push` and `flush` equal `tokenizer.decode` of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the characters that `token` completes."""
        return self._decoder.decode(self._tokenizer.token_to_bytes(int(token)))

    def flush(self) -> str:
        """Return U+FFFD for an incomplete character, if any, and reset."""
        return self._decoder.decode(b"", final=True)


def load_tokenizer(spec: str) -> Tokenizer:
    """Return the tokenizer that `spec` names.

    Args:
      spec: "bytes", the path of a SentencePiece model, of a tokenizer.json or of a word list
        (.txt), or of a folder with one of them; tokenizer.json has precedence.

    Raises:
      UserError: it is missing or damaged, or its tokens do not represent fixed bytes.
    """
    if spec == "bytes":
        return ByteTokenizer()
    try:
        path = _definition_file(spec)
        regular_file_size(path)
        if path.suffix == ".json":
            # circular import
            from famjax.data.hugging_face import HuggingFaceTokenizer

            return HuggingFaceTokenizer(spec, path)
        if path.suffix == ".txt":
            from famjax.data.words import read_words

            return read_words(spec, path)
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"data.tokenizer={spec}: {error.strerror}; give 'bytes', the path of a SentencePiece "
            "model, of a tokenizer.json or of a word list, or a folder with one of them"
        ) from None
    try:
        return SentencePieceTokenizer(spec, content)
    except (RuntimeError, ValueError, IndexError):
        raise UserError(f"data.tokenizer={spec}: the file is not a SentencePiece model") from None


def _definition_file(spec: str) -> Path:
    """Return the file that defines the tokenizer `spec` names."""
    path = expanded(spec)
    if not path.is_dir():
        return path
    for name in (HUGGING_FACE, SENTENCEPIECE, WORDS):
        if (path / name).is_file():
            return path / name
    raise UserError(
        f"data.tokenizer={spec}: the folder has no {HUGGING_FACE} and no {SENTENCEPIECE}; give one "
        "that has, or 'bytes'"
    )


def save_tokenizer(spec: str, folder: Path) -> None:
    """Copy the tokenizer that `spec` names into `folder`, for `load_saved_tokenizer`.

    A SentencePiece model becomes folder/tokenizer.model, a word list folder/words.txt, and Hugging
    Face's files folder/tokenizer/.
    """
    if spec == "bytes":
        return
    source, home = _definition_file(spec), folder / "tokenizer"
    if source.suffix == ".txt":
        save_words(source.read_text(encoding="utf-8"), folder)
        return
    if source.suffix != ".json":
        _copy(source, folder / SENTENCEPIECE)
        # left over from an earlier attempt with another tokenizer
        (home / HUGGING_FACE).unlink(missing_ok=True)
        return
    home.mkdir(exist_ok=True)
    _copy(source, home / HUGGING_FACE)
    for name in _SIBLING_FILES:
        if source.with_name(name).exists():
            _copy(source.with_name(name), home / name)
        else:
            (home / name).unlink(missing_ok=True)


def save_words(text: str, folder: Path) -> None:
    """Write a word list into `folder`, for `load_saved_tokenizer`."""
    for other in (folder / "tokenizer" / HUGGING_FACE, folder / SENTENCEPIECE):
        # left over from an earlier attempt with another tokenizer
        other.unlink(missing_ok=True)
    (folder / WORDS).write_text(text, encoding="utf-8", newline="\n")


def _copy(source: Path, target: Path) -> None:
    with contextlib.suppress(shutil.SameFileError):
        shutil.copyfile(source, target)


def load_saved_tokenizer(folder: Path, spec: str) -> Tokenizer:
    """Return the tokenizer that `save_tokenizer(spec, folder)` saved.

    The path in `spec` may be of another machine, and is not opened.

    Raises:
      UserError: the copy is missing or damaged.
    """
    if spec == "bytes":
        return load_tokenizer(spec)
    for copy in (folder / "tokenizer" / HUGGING_FACE, folder / SENTENCEPIECE, folder / WORDS):
        if copy.exists():
            return load_tokenizer(str(copy))
    raise UserError(
        f"{folder}: has lost its copy of the tokenizer {spec}; restore tokenizer/, "
        f"{SENTENCEPIECE} or {WORDS}, whichever it had"
    )


def train_sentencepiece(files: str, vocab_size: int, out: str | Path) -> Tokenizer:
    """Train a lossless BPE model on text files, write it to `out` and return it.

    Args:
      files: as `data.files`; of a larger corpus, 256 MiB of randomly chosen documents are read.
      vocab_size: the requested size; a small text can yield fewer tokens (see the result's).
      out: output path of the model.
    """
    # circular import
    from famjax.data.sources import TextSource

    if vocab_size <= 0:
        raise UserError(f"vocab size {vocab_size}: must be positive")
    source = TextSource(files, ByteTokenizer(), seed=0, holdout=0)
    source.check_output_path(out)
    content = _train(_iter_sentences(source.texts(), _TRAINING_BYTES), vocab_size)
    try:
        Path(out).write_bytes(content)
    except OSError as error:
        raise UserError(
            f"{out}: {error.strerror}; the model could not be written, give another --out"
        ) from None
    return SentencePieceTokenizer(str(out), content)


def _iter_sentences(texts: Iterable[str], limit: int) -> Iterator[str]:
    """Yield short parts of `texts` up to about `limit` characters."""
    total = 0
    for text in texts:
        # The trainer drops sentences with a tab; tabs are left to the byte fallback.
        yield from re.findall(rf"[^\t]{{1,{_SENTENCE_CHARS}}}", text)
        total += len(text)
        if total >= limit:
            return


def _train(sentences: Iterator[str], vocab_size: int) -> bytes:
    content = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sentences,
            model_writer=content,
            model_type="bpe",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=8 * _SENTENCE_CHARS,
            num_threads=1,  # the result depends on the order of summation
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(_training_error(str(error), vocab_size)) from None
    return content.getvalue()


def _training_error(message: str, vocab_size: int) -> str:
    if "sentences_.empty" in message:
        return "tokenizer training: the files hold no text"
    if needed := re.search(r"smaller than required_chars. \d+ vs (\d+)", message):
        return f"vocab size {vocab_size}: too small for this text, which needs {needed[1]} or more"
    if "insert_id" in message:
        return f"vocab size {vocab_size}: holds not even the special tokens; give 300 or more"
    if "cannot parse" in message:
        return f"vocab size {vocab_size}: too large"
    return f"tokenizer training, vocab size {vocab_size}: {message.strip()}"
