"""Text generation, optionally from the memory of a document of any size."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from famjax.core.errors import UserError
from famjax.data.files import is_compressed, read_text_pieces
from famjax.eval.beam import BeamSettings
from famjax.eval.lane_stream import LaneStream
from famjax.eval.progress import TokenProgress
from famjax.eval.sampling import Sampling
from famjax.eval.stream_functions import TOKENS_PER_CALL
from famjax.eval.streaming import Streamer, StreamState, rechunk
from famjax.tokenizers.tokenizer import StreamDecoder
from famjax.train.run import Run

# target latency of a generated piece, since text is streamed
PIECE_SECONDS = 0.1
# largest |alpha|: beyond it the length penalty of long texts overflows float32
_MAX_PENALTY = 5


class Hypothesis(NamedTuple):
    """A text that beam search found.

    Attributes:
      text: the text without its stop token, cut before the first stop string.
      score: log p / length ** length_penalty.
      tokens: number of tokens, including the stop token.
    """

    text: str
    score: float
    tokens: int


class Generator:
    """Generates text with a run: `"".join(Generator(run).generate("Once"))`.

    Raises:
      UserError: the model has an encoder.
    """

    def __init__(self, run: Run):
        if run.config.model.encoder.layers:
            raise UserError(
                "this model has an encoder, which reads a source: write its target with "
                "famjax.eval.translator.Translator"
            )
        self._run = run
        self._tokenizer = run.tokenizer
        self._streamer = Streamer(run.model, 1)

    def read_document(self, document: Path | str, quiet: bool = True) -> StreamState:
        """Read a document, and return the memory of it.

        A file of any size is read in constant memory. The document starts with bos but has no eos,
        so that it can be continued.

        Args:
          document: the path of a file, or the text itself as a string.
          quiet: whether to hide the progress.

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
        *,
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
          top_k: sample from the `top_k` likeliest tokens; 0 = all.
          top_p: sample from the likeliest tokens that together reach this probability.
          stop: stop strings, which must not be empty; strings of control tokens stop at the token.
          seed: random seed; the same call returns the same text.
          state: initial memory, not modified; None starts a document.
          chat: whether the prompt is a user's message, and the generated text the reply.

        Raises:
          UserError: a number is out of range, a stop string is empty, the prompt is empty although
            a state is given, the tokens exceed full attention's KV cache, or `chat` is set and the
            tokenizer has no chat template.
        """
        tokens = self._encode_prompt(prompt, state, chat)
        return self.continue_tokens(
            tokens,
            max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop=stop,
            seed=seed,
            state=state,
        )

    def _encode_prompt(self, prompt: str, state: StreamState | None, chat: bool) -> np.ndarray:
        """Return the tokens [t] of a prompt, with bos if it starts a document."""
        if chat:
            message = {"role": "user", "content": prompt}
            tokens = self._tokenizer.encode_chat([message], continues=state is not None)
        else:
            tokens = self._tokenizer.encode(prompt)
        # of a chat the template writes tokens, whatever the prompt
        if state is not None and not (prompt and len(tokens)):
            what = f"{prompt!r} has no token" if prompt else "is empty"
            raise UserError(f"the prompt {what}; after a memory it needs at least one token")
        return np.append(self._tokenizer.bos_id, tokens) if state is None else tokens

    def search(
        self,
        prompt: str,
        beams: int,
        max_tokens: int = 256,
        *,
        length_penalty: float = 1.0,
        no_repeat_ngram: int = 0,
        stop: Sequence[str] = (),
        state: StreamState | None = None,
        chat: bool = False,
        best: int | None = None,
    ) -> list[Hypothesis]:
        """Return the likeliest texts that beam search finds, best first: at most `beams`.

        Args:
          prompt, stop, state, chat: as in `generate`. Stop strings do not end the search; they cut
            the texts that it finds.
          beams: number of hypotheses that are extended at once; 1 is greedy decoding.
          max_tokens: maximum number of tokens. Device memory is allocated for all of them.
          length_penalty: a text's score is log p / length ** length_penalty; 0 is log p.
          no_repeat_ngram: size of the n-grams that must not occur twice in the prompt and the text;
            0 allows repetitions.
          best: how many texts are wanted; None is `beams`. The fewer, the earlier a search ends.

        Raises:
          UserError: a number is out of range, or as `generate`.
        """
        settings = self._settings(beams, max_tokens, length_penalty, no_repeat_ngram, stop, best)
        tokens = self._encode_prompt(prompt, state, chat)
        stream = self._read_prompt(tokens, state)
        return self._search(stream, settings, [tokens], stop)[0]

    def search_all(
        self,
        prompts: Sequence[str],
        beams: int = 1,
        max_tokens: int = 256,
        *,
        length_penalty: float = 1.0,
        no_repeat_ngram: int = 0,
        stop: Sequence[str] = (),
        chat: bool = False,
        batch: int = 32,
    ) -> list[Hypothesis]:
        """Return the likeliest text after each prompt, searching for several at a time.

        Where n-grams that must not repeat leave no text, it is empty and its score -inf.

        Args:
          prompts: texts to continue, each of which starts a document.
          beams, max_tokens, length_penalty, no_repeat_ngram, stop, chat: as in `search`.
          batch: how many prompts are continued together; those of about equal lengths are.

        Raises:
          UserError: as `search`.
        """
        settings = self._settings(beams, max_tokens, length_penalty, no_repeat_ngram, stop, 1)
        if not prompts:
            return []
        left = self.max_tokens(prompts, chat=chat)
        if left is not None and max_tokens > left:
            raise UserError(
                f"max_tokens={max_tokens}: does not fit the model's cache after the longest "
                f"prompt; give at most {left:,}"
            )
        texts = [self._encode_prompt(prompt, None, chat) for prompt in prompts]
        lanes = LaneStream(self._run.model, min(batch, len(texts)))
        by_number: dict[int, Hypothesis] = {}
        by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        for first in range(0, len(texts), lanes.batch):
            numbers = by_length[first : first + lanes.batch]
            own = [texts[i] for i in numbers]
            # lanes that are left over repeat a prompt: few shapes mean few compiled programs
            own += own[-1:] * (lanes.batch - len(own))
            stream = lanes.new_stream()
            stream.read_texts(own)
            best = self._search(stream, settings, own, stop)
            for i, hypotheses in zip(numbers, best, strict=False):
                by_number[i] = hypotheses[0] if hypotheses else Hypothesis("", -math.inf, 0)
        return [by_number[i] for i in range(len(texts))]

    def _settings(
        self,
        beams: int,
        max_tokens: int,
        length_penalty: float,
        no_repeat_ngram: int,
        stop: Sequence[str],
        best: int | None,
    ) -> BeamSettings:
        size = self._tokenizer.output_size
        check_search(beams, max_tokens, length_penalty, no_repeat_ngram, stop, size)
        return BeamSettings(
            beams,
            max_tokens,
            vocab_size=self._tokenizer.vocab_size,
            length_penalty=float(length_penalty),
            no_repeat_ngram=no_repeat_ngram,
            best=best,
            output_size=size,
        )

    def max_tokens(
        self, prompts: Sequence[str], state: StreamState | None = None, chat: bool = False
    ) -> int | None:
        """Return how many tokens can be written after each prompt; None is any number.

        Args:
          prompts, state, chat: as in `search_all` and `generate`.

        Raises:
          UserError: a prompt exceeds full attention's KV cache.
        """
        capacity = self._run.model.stack.capacity
        if capacity is None:
            return None
        sizes = [len(self._encode_prompt(prompt, state, chat)) for prompt in prompts]
        left = capacity - (0 if state is None else state.tokens)
        longest = max(sizes)
        if longest > left:
            raise UserError(
                f"prompt {sizes.index(longest) + 1} of {len(sizes)}: its {longest:,} tokens do not "
                f"fit the model's cache, which has room for {left:,}; shorten it"
            )
        # the last token is not read
        return left - longest + 1

    def _search(
        self,
        stream: Streamer,
        settings: BeamSettings,
        prompts: Sequence[np.ndarray],
        stop: Sequence[str],
    ) -> list[list[Hypothesis]]:
        """Return the hypotheses of each row of a stream that has read the prompts, best first."""
        counted = [tokens if settings.no_repeat_ngram else tokens[:0] for tokens in prompts]
        hypotheses = jax.device_get(
            stream.search(settings, self._stop_ids(stop), _pad_prompts(counted))
        )
        return [
            [
                Hypothesis(
                    self._decode_hypothesis(tokens[:length], stop), float(score), int(length)
                )
                for tokens, length, score in zip(*row, strict=True)
                if length
            ]
            for row in zip(*hypotheses, strict=True)
        ]

    def _decode_hypothesis(self, tokens: np.ndarray, stop: Sequence[str]) -> str:
        written = tokens[:-1] if tokens[-1] in self._stop_ids(stop) else tokens
        return "".join(cut_at_stop(stop, self._decode_tokens(iter(written.tolist()))))

    def _stop_ids(self, stop: Sequence[str]) -> np.ndarray:
        return np.array(sorted(self._tokenizer.stop_ids_with(stop)), np.int32)

    def _read_prompt(self, tokens: np.ndarray, state: StreamState | None) -> Streamer:
        """Return a stream that has read tokens [t] after a state, or from the start."""
        stream = self._streamer.new_stream()
        if state is not None:
            stream.state = state
        stream.read(tokens[None])
        return stream

    def continue_tokens(
        self,
        tokens: np.ndarray,
        max_tokens: int = 256,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        stop: Sequence[str] = (),
        seed: int = 0,
        state: StreamState | None = None,
    ) -> Iterator[str]:
        """Like `generate`, but the prompt is tokens [t], with bos if it starts a document."""
        check_sampling(max_tokens, temperature, top_k, top_p, stop, seed)
        stream = self._read_prompt(tokens, state)
        key = jax.random.key(seed)
        size = self._tokenizer.output_size
        sampling = Sampling(key, float(temperature), top_k, float(top_p), size)
        return cut_at_stop(
            stop, self._decode_tokens(self._sample_tokens(stream, max_tokens, sampling, stop))
        )

    def _sample_tokens(
        self, stream: Streamer, count: int, sampling: Sampling, stop: Sequence[str]
    ) -> Iterator[int]:
        """Yield up to `count` tokens, excluding the stop token.

        A compiled program generates a piece of several tokens. Pieces start at one token, and
        double while a piece takes less than `PIECE_SECONDS`.
        """
        stops = self._stop_ids(stop)
        tokens, size, final_len = stream.draw(sampling), 1, stream.tokens + count
        while True:
            for number in tokens.tolist():
                if number in stops:
                    return
                yield number
            count -= len(tokens)
            if not count:
                return
            began = time.perf_counter()
            tokens = stream.write(tokens[-1], min(size, count), sampling, stops, final_len)
            quick = time.perf_counter() - began < PIECE_SECONDS
            size = min(2 * size, TOKENS_PER_CALL) if quick else max(size // 2, 1)

    def _decode_tokens(self, tokens: Iterator[int]) -> Iterator[str]:
        decoder = StreamDecoder(self._tokenizer)
        for token in tokens:
            yield decoder.push(token)
        yield decoder.flush()


def _document_bytes(document: Path | str) -> int | None:
    """Return the size of a document's text in bytes; None if it is not known before reading."""
    if isinstance(document, str):
        return len(document.encode())
    known = document.is_file() and not is_compressed(str(document))
    return document.stat().st_size if known else None


def check_sampling(
    max_tokens: int, temperature: float, top_k: int, top_p: float, stop: Sequence[str], seed: int
) -> None:
    """Check the arguments of `Generator.generate`.

    Raises:
      UserError: a number is out of its range, or a stop string is empty.
    """
    _check_writing(max_tokens, stop)
    if not 0 <= temperature < float("inf"):
        raise UserError(f"temperature={temperature}: must be 0 (the likeliest token) or more")
    if not 0 <= top_k < 2**31:
        raise UserError(f"top_k={top_k}: must be 0 (all tokens) or more, and less than {2**31}")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p={top_p}: must be more than 0 and at most 1")
    if not 0 <= seed < 2**32:
        raise UserError(f"seed={seed}: must be from 0 to {2**32 - 1}")


def check_search(
    beams: int,
    max_tokens: int,
    length_penalty: float,
    no_repeat_ngram: int,
    stop: Sequence[str],
    vocab_size: int,
) -> None:
    """Check the arguments of `Generator.search`.

    Raises:
      UserError: a number is out of its range, or a stop string is empty.
    """
    _check_writing(max_tokens, stop)
    check_beams(beams, length_penalty, no_repeat_ngram, vocab_size)


def check_beams(beams: int, length_penalty: float, no_repeat_ngram: int, vocab_size: int) -> None:
    """Raise a `UserError` if a setting of beam search is out of its range."""
    if not 1 <= beams <= vocab_size:
        raise UserError(f"beam={beams}: must be from 1 to {vocab_size}, the size of the vocabulary")
    if not -_MAX_PENALTY <= length_penalty <= _MAX_PENALTY:
        raise UserError(
            f"length_penalty={length_penalty}: must be from -{_MAX_PENALTY} to {_MAX_PENALTY}"
        )
    if no_repeat_ngram < 0:
        raise UserError(f"no_repeat_ngram={no_repeat_ngram}: must be 0 (no limit) or more")


def _check_writing(max_tokens: int, stop: Sequence[str]) -> None:
    if max_tokens < 1:
        raise UserError(f"max_tokens={max_tokens}: must be at least 1")
    if "" in stop:
        raise UserError("a stop string is empty; give at least one character")


def _pad_prompts(prompts: Sequence[np.ndarray]) -> np.ndarray:
    """Return tokens [t] padded with -1 on the left to [b p], with p a power of two, or 0.

    Few lengths p mean few compiled programs.
    """
    longest = max(map(len, prompts))
    width = 1 << (longest - 1).bit_length() if longest else 0
    padded = [np.pad(t, (width - len(t), 0), constant_values=-1) for t in prompts]
    return np.stack(padded).astype(np.int32)


def cut_at_stop(stop: Sequence[str], texts: Iterator[str]) -> Iterator[str]:
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
