"""Text generation, optionally from the memory of a document of any size."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import jax
import numpy as np

from famjax.core.errors import UserError
from famjax.data.files import read_text_pieces
from famjax.eval.progress import TokenProgress
from famjax.eval.sampling import Sampling
from famjax.eval.streaming import PIECE, Streamer, StreamState, rechunk
from famjax.tokenizers.tokenizer import StreamDecoder
from famjax.train.run import Run

# target latency of a generated piece, since text is streamed
PIECE_SECONDS = 0.1


class Generator:
    """Generates text with a run: `"".join(Generator(run).generate("Once"))`."""

    def __init__(self, run: Run):
        self._run = run
        self._tokenizer = run.tokenizer
        self._streamer = Streamer(run.model, 1)

    def read_document(self, document: Path | str, quiet: bool = True) -> StreamState:
        """Return the memory of a document: the path of a file, or the text itself as a string.

        A file of any size is read in constant memory. The document starts with bos but has no eos,
        so that it can be continued.

        Raises:
          UserError: the file is not a single text, or exceeds the KV cache of full attention.
        """
        is_file = isinstance(document, Path)
        texts = read_text_pieces(str(document)) if is_file else iter([str(document)])
        stream = self._streamer.new_stream()
        with TokenProgress("reading", _document_bytes(document), quiet) as progress:
            for i, tokens in enumerate(rechunk(self._encode(texts, progress), stream.chunk)):
                with nullcontext() if i else progress.compiling():
                    stream.read(tokens)
        return stream.state

    def _encode(self, texts: Iterator[str], progress: TokenProgress) -> Iterator[np.ndarray]:
        """Yield bos and the tokens of the texts, [1 n] each."""
        yield np.array([[self._tokenizer.bos_id]], np.int32)
        for text in texts:
            tokens = self._tokenizer.encode(text)
            yield tokens[None]
            progress.advance(len(tokens), len(text.encode()))

    def generate(
        self,
        prompt: str,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        seed: int = 0,
        state: StreamState | None = None,
        chat: bool = False,
    ) -> Iterator[str]:
        """Return an iterator over the generated text, in pieces of whole characters.

        It stops at one of the tokenizer's `stop_ids`, before the first stop string, or after
        `max_tokens`.

        Args:
          prompt: text to continue.
          max_tokens: maximum number of tokens.
          temperature: 0 decodes greedily.
          top_k: sample from so many of the likeliest tokens; 0 = all.
          top_p: sample from the likeliest tokens that together reach this probability.
          stop: stop strings, not empty.
          seed: random seed; the same call returns the same text.
          state: initial memory, not modified; None starts a document.
          chat: the prompt is a user's message, the generated text the reply.

        Raises:
          UserError: a number out of range, an empty stop string, an empty prompt with a state, more
            tokens than full attention's KV cache, or chat with a tokenizer without a template.
        """
        if state is not None and not prompt:
            raise UserError("the prompt is empty; a saved memory needs at least one character")
        if chat:
            tokens = self._tokenizer.encode_chat([{"role": "user", "content": prompt}])
        else:
            tokens = self._tokenizer.encode(prompt)
        if state is None:
            tokens = np.append(self._tokenizer.bos_id, tokens)
        return self.continue_tokens(
            tokens, max_tokens, temperature, top_k, top_p, stop, seed, state
        )

    def continue_tokens(
        self,
        tokens: np.ndarray,
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        seed: int = 0,
        state: StreamState | None = None,
    ) -> Iterator[str]:
        """As `generate`, from a prompt of tokens [t], with bos if it starts a document."""
        check_sampling(max_tokens, temperature, top_k, top_p, stop, seed)
        stream = self._streamer.new_stream()
        if state is not None:
            stream.state = state
        stream.read(tokens[None])
        key = jax.random.key(seed)
        size = self._tokenizer.vocab_size
        sampling = Sampling(key, float(temperature), top_k, float(top_p), size)
        return _cut_at_stop(
            stop, self._decode_tokens(self._sample_tokens(stream, max_tokens, sampling))
        )

    def _sample_tokens(self, stream: Streamer, count: int, sampling: Sampling) -> Iterator[int]:
        """Yield up to `count` tokens, excluding the stop token.

        A program generates a piece of tokens; pieces double from one token while they are fast.
        """
        stops = np.array(sorted(self._tokenizer.stop_ids), np.int32)
        tokens, size = stream.draw(sampling), 1
        while True:
            for number in tokens.tolist():
                if number in stops:
                    return
                yield number
            count -= len(tokens)
            if not count:
                return
            began = time.perf_counter()
            tokens = stream.write(tokens[-1], min(size, count), sampling, stops)
            quick = time.perf_counter() - began < PIECE_SECONDS
            size = min(2 * size, PIECE) if quick else max(size // 2, 1)

    def _decode_tokens(self, tokens: Iterator[int]) -> Iterator[str]:
        decoder = StreamDecoder(self._tokenizer)
        for token in tokens:
            yield decoder.push(token)
        yield decoder.flush()


def _document_bytes(document: Path | str) -> int | None:
    """Return the bytes of a document's text, or None if only reading would tell."""
    if isinstance(document, str):
        return len(document.encode())
    compressed = document.suffix in (".gz", ".xz")
    return document.stat().st_size if document.is_file() and not compressed else None


def check_sampling(
    max_tokens: int, temperature: float, top_k: int, top_p: float, stop: Sequence[str], seed: int
) -> None:
    """Refuse what `Generator.generate` cannot sample with.

    Raises:
      UserError: a number out of its range, or an empty stop string.
    """
    if max_tokens < 1:
        raise UserError(f"max_tokens={max_tokens}: must be at least 1")
    if not 0 <= temperature < float("inf"):
        raise UserError(f"temperature={temperature}: must be 0 (the likeliest token) or more")
    if not 0 <= top_k < 2**31:
        raise UserError(f"top_k={top_k}: must be 0 (all tokens) or more, and less than {2**31}")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p={top_p}: must be more than 0 and at most 1")
    if not 0 <= seed < 2**32:
        raise UserError(f"seed={seed}: must be from 0 to {2**32 - 1}")
    if "" in stop:
        raise UserError("a stop string is empty; give at least one character")


def _cut_at_stop(stop: Sequence[str], texts: Iterator[str]) -> Iterator[str]:
    """Yield texts up to the first stop string, holding back a possible beginning of one."""
    held = ""
    for text in texts:
        held += text
        stops_at = [at for at in (held.find(s) for s in stop) if at >= 0]
        if stops_at:
            held = held[: min(stops_at)]
            break
        keep = _partial_stop(held, stop)
        if keep < len(held):
            yield held[: len(held) - keep]
            held = held[len(held) - keep :]
    if held:
        yield held


def _partial_stop(text: str, stop: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of a stop string."""
    longest = max((len(s) for s in stop), default=1) - 1
    ends = range(min(longest, len(text)), 0, -1)
    return next((n for n in ends if any(s.startswith(text[len(text) - n :]) for s in stop)), 0)
