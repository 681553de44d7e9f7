"""The tokenizer interface, the tokenizer of bytes, and streaming decoding.

Every token represents fixed UTF-8 bytes (special tokens none), so that decoding concatenates bytes.
`decode`, streaming decoding and bits per byte all follow from the table of each token's bytes,
except that Marian's tokenizers decode with their own model. All tokenizers are lossless, except
word lists, Marian's, and SentencePiece models that normalize text or have no byte tokens.
"""

from __future__ import annotations

import abc
import codecs
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from famjax.core.errors import UserError
from famjax.core.json_files import shorten
from famjax.tokenizers.chat import ChatTemplate


class Tokenizer(abc.ABC):
    """Converts text to token ids and back.

    Attributes:
      name: the argument of `load_tokenizer`.
      vocab_size: v, number of tokens.
      bos_id, eos_id: ids of the tokens around a document.
      stop_ids: ids at which generation stops, including eos_id.
      control_ids: ids of control tokens by their strings; they decode to no text.
      output_size: generation only writes ids below this one.
      start_id: what a decoder reads before a target; bos_id unless the model was trained otherwise.
      first_id: the id that every target begins with, as `encode_target` has it; None for none.
      unknown_id: the id of text that has no token; None if all text has tokens.
      token_bytes: [v] int32, the number of UTF-8 bytes of each token; 0 for special tokens.
      fingerprint: sha256, in hex, of the file or data that defines the ids.
      chat_template: template that renders a conversation as text; None if there is none.
      is_lossless: whether decoding returns any text that was encoded.
    """

    chat_template: ChatTemplate | None = None
    is_lossless = True

    def __init__(
        self, name: str, pieces: Sequence[bytes], bos_id: int, eos_id: int, content: bytes
    ):
        self.name = name
        self.vocab_size = self.output_size = len(pieces)
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.stop_ids = frozenset([eos_id])
        self.control_ids: Mapping[str, int] = {}
        self.start_id = bos_id
        self.first_id: int | None = None
        self.unknown_id: int | None = None
        self.token_bytes = np.array([len(piece) for piece in pieces], np.int32)
        self.fingerprint = hashlib.sha256(content).hexdigest()
        self._pieces = tuple(pieces)

    @abc.abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, [t] int32, without adding special tokens."""

    def encode_source(self, text: str) -> np.ndarray:
        """Return the ids of a source for an encoder: those of the text, and eos."""
        return np.append(self.encode(text), np.int32(self.eos_id))

    def encode_target(self, text: str) -> np.ndarray:
        """Return the ids of a target, without `start_id` and eos."""
        return self.encode(text)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return `encode_source` and `encode_target` of each source and target."""
        return [
            (self.encode_source(source), self.encode_target(target)) for source, target in pairs
        ]

    def reads(self, source: np.ndarray) -> bool:
        """Return whether all of a source's text had tokens; `source` is its `encode_source`."""
        return self.unknown_id is None or self.unknown_id not in source

    def writes(self, target: np.ndarray, text: str) -> bool:
        """Return whether a target's ids decode to the same text, except for white space."""
        return self.is_lossless or self.decode(target).split() == text.split()

    def encode_rendered(self, text: str) -> np.ndarray:
        """Return the ids of text from `chat_template`, in which control tokens are special."""
        return self.encode(text)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        continues: bool = False,
    ) -> np.ndarray:
        """Return the ids of a conversation, [t] int32.

        As with `encode`, the caller has to add bos, even if the template writes it. The string of a
        control token becomes that token if the template wrote it, but is plain text inside a
        message.

        Args:
          messages: each with "role" and "content", and other fields that the template uses.
          add_generation_prompt: append the header of an assistant message.
          continues: whether the conversation continues a document, and the caller adds no bos. The
            template's is kept then if it has several, as SmolLM2's, whose bos begins each message.

        Raises:
          UserError: there is no template, or it rejects the messages.
        """
        if self.chat_template is None:
            raise UserError(
                f"tokenizer {self.name}: has no chat template; put chat_template.jinja beside its "
                "tokenizer.json, or write plain text"
            )
        return self.encode_rendered(
            self.chat_template.render_prompt(messages, add_generation_prompt, continues)
        )

    def stop_ids_with(self, stop: Sequence[str]) -> frozenset[int]:
        """Return `stop_ids`, and the ids of stop strings that are control tokens."""
        return self.stop_ids | {self.control_ids[s] for s in stop if s in self.control_ids}

    def token_to_bytes(self, token: int) -> bytes:
        """Return the bytes of `token`.

        Special tokens have none, and neither have ids beyond the vocabulary, which a model with a
        padded embedding table can produce.
        """
        return self._pieces[token] if 0 <= token < self.vocab_size else b""

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.token_to_bytes(int(token)) for token in ids).decode("utf-8", "replace")


def check_same_ids(new: Tokenizer, old: Tokenizer, given: str, model: str) -> None:
    """Raise a `UserError` if an id is another text in `new` than in `old`, a model's tokenizer.

    Control tokens and unused ids may differ: no text becomes one, and a tokenizer with a chat
    template may give them names.

    Args:
      given: the option that named `new`, with its value.
      model: the model of `old`.
    """
    for i in range(min(new.vocab_size, old.vocab_size)):
        ours, theirs = new.token_to_bytes(i), old.token_to_bytes(i)
        if ours != theirs and new.token_bytes[i] and old.token_bytes[i]:
            raise UserError(
                f"{given}: id {i} is {_show(ours)}, but {_show(theirs)} in the tokenizer of "
                f"{model}, with which the weights were trained; leave it out, or give a tokenizer "
                "with the same ids"
            )


def _show(piece: bytes) -> str:
    try:
        return shorten(repr(piece.decode("utf-8")))
    except UnicodeDecodeError:
        return shorten(repr(piece))


class ByteTokenizer(Tokenizer):
    """The 256 bytes, then bos and eos."""

    def __init__(self) -> None:
        pieces = [bytes([byte]) for byte in range(256)] + [b"", b""]
        super().__init__("bytes", pieces, bos_id=256, eos_id=257, content=b"bytes")

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)


class StreamDecoder:
    """Decodes token by token, and returns complete characters only.

    The concatenated results of `push` and `flush` equal `tokenizer.decode` of all tokens, except
    that Marian's `decode` drops a leading space.
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
