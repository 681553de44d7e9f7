"""SentencePiece models as tokenizers, and the training of lossless ones."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence

import numpy as np
import sentencepiece

from famjax.core.errors import UserError
from famjax.tokenizers.tokenizer import Tokenizer

# SentencePiece represents a space by this character, and cannot distinguish the two.
_META = "\u2581"
# A ModelProto whose normalizer_spec sets add_dummy_prefix (3) and remove_extra_whitespaces (4) to
# false. Protocol buffers merge a message that is appended to another. So with this one appended a
# model keeps spaces, and a document can be encoded in pieces. Other normalization stays: published
# models were trained on normalized text.
_KEEP_TEXT = b"\x1a\x04\x18\x00\x20\x00"
# text that a model changes if it normalizes, or lacks byte tokens
_PROBE = "two  spaces\n\tﬁ Ａ 漢 😀"
# maximum characters of a training sentence: the trainer expects short ones
SENTENCE_CHARS = 2048


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
        self.unknown_id = self._model.unk_id()
        self.token_bytes[self.unknown_id] = 0
        self._meta_ids = self._byte_ids(_META)
        self.is_lossless = self.decode(self.encode(_PROBE)) == _PROBE

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
        # A literal '▁' would decode to a space, so it is encoded as byte tokens instead.
        first, *rest = text.split(_META)
        ids = self._model.encode(first)
        for part in rest:
            ids += self._meta_ids + self._model.encode(part)
        return np.array(ids, np.int32)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[np.ndarray, np.ndarray]]:
        sources, targets = (self._encode_all([pair[side] for pair in pairs]) for side in (0, 1))
        eos = np.int32(self.eos_id)
        return [
            (np.append(source, eos), target)
            for source, target in zip(sources, targets, strict=True)
        ]

    def _encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return `encode` of each text, computed on all cores."""
        found = self._model.encode(list(texts), num_threads=-1)
        return [
            self.encode(text) if _META in text else np.array(ids, np.int32)
            for text, ids in zip(texts, found, strict=True)
        ]


def train_model(sentences: Iterator[str], vocab_size: int) -> bytes:
    """Return a lossless BPE model of the sentences.

    Raises:
      UserError: the text does not suit the vocabulary size, or cannot be read.
    """
    content = io.BytesIO()
    unreadable: list[UserError] = []

    def readable() -> Iterator[str]:
        try:
            yield from sentences
        except UserError as error:
            # the trainer would raise the error as a RuntimeError with more text around it
            unreadable.append(error)

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=readable(),
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
            max_sentence_length=8 * SENTENCE_CHARS,
            num_threads=1,  # with more threads, the order of summation varies
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        if not unreadable:
            raise UserError(_training_error(str(error), vocab_size)) from None
    if unreadable:
        raise unreadable[0]
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
