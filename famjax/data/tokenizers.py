"""Text to token ids and back: bytes, SentencePiece, Hugging Face's tokenizers, or lists of words.

Every token stands for fixed bytes of UTF-8 (none for a special), so decoding is joining bytes; all
but lists of words give back the text they were given. That one table gives `decode`, decoding as
tokens arrive, and bits per byte.
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
from famjax.data.chat import ChatTemplate

# SentencePiece writes a space as this character, and so cannot tell the two apart.
_META = "\u2581"
# A ModelProto whose normalizer_spec has add_dummy_prefix (3) and remove_extra_whitespaces (4)
# false. Protocol buffers merge what is appended: a model is made to keep the text it is given, so
# that a document may be encoded in pieces.
_KEEP_TEXT = b"\x1a\x04\x18\x00\x20\x00"
# The trainer holds its text in memory and wants short sentences.
_TRAINING_BYTES = 256 << 20
_SENTENCE_CHARS = 2048
# A tokenizer in a folder: what defines it, and what Hugging Face keeps beside that
SENTENCEPIECE, HUGGING_FACE, WORDS = "tokenizer.model", "tokenizer.json", "words.txt"
_BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
)


class Tokenizer:
    """Token ids of text.

    Attributes:
      name: what `load_tokenizer` was given.
      vocab_size: v.
      bos_id, eos_id: ids put around a document.
      stop_ids: at which a written text ends; eos_id is one of them.
      token_bytes: [v] int32, the UTF-8 bytes each token stands for; 0 for specials.
      fingerprint: sha256, in hex, of what defines the ids.
      chat_template: writes a conversation as text; None if there is none.
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
        """Return the ids of `text`, [n] int32, with no specials added."""
        raise NotImplementedError

    def encode_rendered(self, text: str) -> np.ndarray:
        """Return the ids of text from `chat_template`, whose control tokens become their ids."""
        raise NotImplementedError

    def encode_chat(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True
    ) -> np.ndarray:
        """Return the ids of a conversation, [n] int32.

        As with `encode`, bos is left to the caller, even where the template writes it. Strings of
        control tokens are control tokens where the template wrote them, and text in a message.

        Args:
          messages: each with "role" and "content", and what else the template reads.
          add_generation_prompt: end with the words that begin an answer.

        Raises:
          UserError: there is no template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise UserError(
                f"tokenizer {self.name}: has no chat template; put chat_template.jinja beside its "
                "tokenizer.json, or write plain text"
            )
        return self.encode_rendered(self.chat_template.prompt(messages, add_generation_prompt))

    def token_to_bytes(self, token: int) -> bytes:
        """Return the bytes `token` stands for: none for specials and for ids beyond the vocabulary,
        which a model with a padded embedding table can produce."""
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
    """A SentencePiece model, made to keep leading and repeated spaces."""

    def __init__(self, name: str, content: bytes):
        self._model = sentencepiece.SentencePieceProcessor(model_proto=content + _KEEP_TEXT)
        # T5's models have no bos; its decoders start with the padding id.
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
        # A literal '▁' would come back as a space: it is written with its bytes instead.
        first, *rest = text.split(_META)
        ids = self._model.encode(first)
        for part in rest:
            ids += self._meta_ids + self._model.encode(part)
        return np.array(ids, np.int32)


class StreamDecoder:
    """Decodes token by token, emitting complete characters only.

    What `push` and `flush` returned, joined, equals `tokenizer.decode` of all tokens.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the characters that `token` completes."""
        return self._decoder.decode(self._tokenizer.token_to_bytes(int(token)))

    def flush(self) -> str:
        """Return what is left of an incomplete character, as U+FFFD, and start afresh."""
        return self._decoder.decode(b"", final=True)


def load_tokenizer(spec: str) -> Tokenizer:
    """Return the tokenizer `spec` names.

    Args:
      spec: "bytes", the path of a SentencePiece model, of a tokenizer.json or of a list of words
        (.txt), or that of a folder with one of them; of several, tokenizer.json is taken.

    Raises:
      UserError: nothing is there, it is damaged, or its tokens do not stand for fixed bytes.
    """
    if spec == "bytes":
        return ByteTokenizer()
    try:
        path = _definition(spec)
        regular_file_size(path)
        if path.suffix == ".json":
            # it imports this module
            from famjax.data.hugging_face import HuggingFaceTokenizer

            return HuggingFaceTokenizer(spec, path)
        if path.suffix == ".txt":
            from famjax.data.words import read_words

            return read_words(spec, path)
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"data.tokenizer={spec}: {error.strerror}; give 'bytes', the path of a SentencePiece "
            "model, of a tokenizer.json or of a list of words, or a folder with one of them"
        ) from None
    try:
        return SentencePieceTokenizer(spec, content)
    except (RuntimeError, ValueError, IndexError):
        raise UserError(f"data.tokenizer={spec}: the file is not a SentencePiece model") from None


def _definition(spec: str) -> Path:
    """Return the file that defines the tokenizer `spec` names."""
    path = Path(spec).expanduser()
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
    """Copy the tokenizer `spec` names into `folder`, where `load_saved_tokenizer` finds it.

    A SentencePiece model becomes folder/tokenizer.model, a list of words folder/words.txt; Hugging
    Face's become folder/tokenizer/.
    """
    if spec == "bytes":
        return
    source, home = _definition(spec), folder / "tokenizer"
    if source.suffix == ".txt":
        save_words(source.read_text(encoding="utf-8"), folder)
        return
    if source.suffix != ".json":
        _copy(source, folder / SENTENCEPIECE)
        # what a first try with another tokenizer may have left
        (home / HUGGING_FACE).unlink(missing_ok=True)
        return
    home.mkdir(exist_ok=True)
    _copy(source, home / HUGGING_FACE)
    for name in _BESIDE:
        if source.with_name(name).exists():
            _copy(source.with_name(name), home / name)
        else:
            (home / name).unlink(missing_ok=True)


def save_words(text: str, folder: Path) -> None:
    """Write a list of words into `folder`, where `load_saved_tokenizer` finds it."""
    for other in (folder / "tokenizer" / HUGGING_FACE, folder / SENTENCEPIECE):
        # what a first try with another tokenizer may have left
        other.unlink(missing_ok=True)
    (folder / WORDS).write_text(text, encoding="utf-8", newline="\n")


def _copy(source: Path, target: Path) -> None:
    with contextlib.suppress(shutil.SameFileError):
        shutil.copyfile(source, target)


def load_saved_tokenizer(folder: Path, spec: str) -> Tokenizer:
    """Return the tokenizer that `save_tokenizer(spec, folder)` kept.

    The path in `spec` is of the machine that the folder was written on, and is not opened.

    Raises:
      UserError: the copy is gone, or damaged.
    """
    if spec == "bytes":
        return load_tokenizer(spec)
    for copy in (folder / "tokenizer" / HUGGING_FACE, folder / SENTENCEPIECE, folder / WORDS):
        if copy.exists():
            return load_tokenizer(str(copy))
    raise UserError(
        f"{folder}: has lost its copy of the tokenizer {spec}; bring back tokenizer/, "
        f"{SENTENCEPIECE} or {WORDS}, whichever it had"
    )


def train_sentencepiece(files: str, vocab_size: int, out: str | Path) -> Tokenizer:
    """Train a lossless BPE model on text files, write it to `out` and return it.

    Args:
      files: as `data.files`; of a larger corpus, 256 MiB of randomly chosen documents are read.
      vocab_size: size asked for; a small text can yield fewer tokens (see the result's).
      out: path of the model to write.
    """
    # sources imports this module
    from famjax.data.sources import TextSource

    if vocab_size <= 0:
        raise UserError(f"vocab size {vocab_size}: must be positive")
    source = TextSource(files, ByteTokenizer(), seed=0, holdout=0)
    source.check_output_path(out)
    content = _train(_sentences(source.texts(), _TRAINING_BYTES), vocab_size)
    try:
        Path(out).write_bytes(content)
    except OSError as error:
        raise UserError(
            f"{out}: {error.strerror}; the model could not be written, give another --out"
        ) from None
    return SentencePieceTokenizer(str(out), content)


def _sentences(texts: Iterable[str], limit: int) -> Iterator[str]:
    """Yield short parts of `texts` up to about `limit` characters."""
    total = 0
    for text in texts:
        # A tab in a sentence makes the trainer drop it; tabs are left to the byte fallback.
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
            num_threads=1,  # the order of sums is part of the result
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
    if "cannot parse" in message:
        return f"vocab size {vocab_size}: too large"
    return f"tokenizer training, vocab size {vocab_size}: {message.strip()}"
