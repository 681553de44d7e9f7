"""Passkey retrieval (TransformerFAM 3.2, D.1, Figure 11): needle first, filler, then the question.

A document is generated lazily from (seed, lane, number, length), so that a million tokens take no
more memory than a hundred.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from famjax.config.derived import is_segmented
from famjax.config.schema import Config, PasskeyConfig
from famjax.core.errors import UserError, format_multiples
from famjax.data.sources import Key, Piece, Source, Split
from famjax.mixers import mixer_specs
from famjax.tasks.task import Task, answer_weight_error
from famjax.tokenizers.tokenizer import Tokenizer

NEEDLE = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
    "them. I will quiz you about the important information there. The pass key is {key}. "
    "Remember it. {key} is the pass key. "
)
FILLER = (
    "The grass is green. ",
    "The sky is blue. ",
    "The sun is yellow. ",
    "Here we go. ",
    "There and back again. ",
)
QUESTION = "What is the pass key? The pass key is "
# with several keys in one document the question asks for one of them, as in RULER's multi-key
# needles (arXiv 2404.06654, 3); this is not in the paper
NEEDLES = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
    "them. I will quiz you about the important information there. "
)
NAMED_NEEDLE = "The pass key of {name} is {key}. Remember it. {key} is the pass key of {name}. "
NAMED_QUESTION = "What is the pass key of {name}? The pass key of {name} is "
NAMES = ("Ada", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry")
_PIECE_TOKENS = 4096
# default lengths of evaluated documents, in tokens
LENGTHS = [256, 1024, 4096, 16384]


def sample_text() -> str:
    """Return text with every word and digit of the task, to train a tokenizer on.

    The texts of documents with several keys are not included.
    """
    keys = [f"{i:05d}" for i in range(0, 100_000, 997)]
    return "".join(NEEDLE.format(key=key) for key in keys) + "".join(FILLER) * 100 + QUESTION * 100


class Passkey:
    """The task in the tokens of one tokenizer.

    Args:
      tokenizer: any tokenizer; a token may be several digits.
      digits: number of digits of a key.
      keys: maximum number of keys in a document; if it is more than one, each key has a name.
      other_weight: loss weight of the tokens that are not the answer.
      needle_within: maximum number of tokens of filler before the needle.
      hard_keys: see `PasskeyConfig`.

    Attributes:
      answer_len: maximum number of tokens of an answer, including eos.
      question_len: maximum number of tokens of a question with its answer and eos.
      shortest: minimum number of tokens of a document with all keys, whichever is asked for.

    Raises:
      UserError: the tokenizer encodes different keys, or different names, to the same ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        digits: int,
        keys: int = 1,
        other_weight: float = 0.0,
        needle_within: int = 0,
        hard_keys: float = 0.0,
    ):
        self.tokenizer = tokenizer
        self.digits = digits
        self.names = NAMES[:keys] if keys > 1 else ()
        _check_tokenizer(tokenizer, [str(digit) * digits for digit in range(10)], "keys")
        _check_tokenizer(tokenizer, self.names, "names")
        self.other_weight = other_weight
        self.needle_within, self.hard_keys = needle_within, hard_keys
        self.filler = np.concatenate([tokenizer.encode(sentence) for sentence in FILLER])
        self.starts = np.cumsum([0, *(len(tokenizer.encode(s)) for s in FILLER[:-1])])
        self._questions: dict[str, np.ndarray] = {}
        # with tokens of several digits, keys differ in length: the longest of a sample sets the
        # limit, and keys with more tokens are not drawn
        self._longest_key = max(_sample_keys(digits), key=lambda key: len(tokenizer.encode(key)))
        self.answer_len = len(tokenizer.encode(self._longest_key)) + 1
        tails = (self.tail(name, self._longest_key) for name in self.names or [""])
        self.question_len = max(map(len, tails))
        self.shortest = self.shortest_with(keys)

    def shortest_with(self, count: int) -> int:
        """Return the minimum number of tokens that hold any `count` keys and any question."""
        keys = [self._longest_key] * count
        names = sorted(self.names, key=lambda name: len(self.tokenizer.encode(name)))
        return len(self.head(names[-count:], keys)) + self.question_len

    def head(
        self, names: Sequence[str], keys: Sequence[str], before: np.ndarray | tuple[()] = ()
    ) -> np.ndarray:
        """Return bos, the filler `before`, and the needle with all keys, [n]."""
        if self.names:
            named = zip(names, keys, strict=True)
            needles = (NAMED_NEEDLE.format(name=name, key=key) for name, key in named)
            needle = NEEDLES + "".join(needles)
        else:
            needle = NEEDLE.format(key=keys[0])
        tokens = self.tokenizer.encode(needle)
        return np.concatenate([[self.tokenizer.bos_id], before, tokens]).astype(np.int32)

    def question(self, name: str) -> np.ndarray:
        """Return the tokens that ask for a key by its name, [n]; a single key has no name."""
        if name not in self._questions:
            text = NAMED_QUESTION.format(name=name) if self.names else QUESTION
            self._questions[name] = self.tokenizer.encode(text)
        return self._questions[name]

    def tail(self, name: str, key: str) -> np.ndarray:
        """Return the question, its answer and eos, [n]."""
        answer = self.tokenizer.encode(key)
        parts = (self.question(name), answer, np.array([self.tokenizer.eos_id]))
        return np.concatenate(parts).astype(np.int32)

    def document(
        self,
        rng: np.random.Generator,
        length: int,
        follows: bool = False,
        asked: int | None = None,
        count: int | None = None,
    ) -> Iterator[Piece]:
        """Yield a document of `length` tokens, including bos and eos, in pieces.

        Args:
          rng: random generator; equal generators give equal documents. All documents about one
            needle must get equal generators.
          length: number of tokens.
          follows: whether the document has no needle, begins with the memory of the previous
            document, and asks for a key from there.
          asked: index of the key that is asked for; None draws it.
          count: number of keys, with names drawn from all; None is one for each name.

        Raises:
          UserError: needle and question do not fit in `length`.
        """
        names = self.names or ("",)
        keys = [self._draw_key(rng) for _ in range(count or len(names))]
        if len(keys) < len(names):
            names = tuple(names[i] for i in sorted(rng.permutation(len(names))[: len(keys)]))
        if asked is None:
            asked = int(rng.integers(len(keys))) if self.names else 0
        head, tail = self.head(names, keys), self.tail(names[asked], keys[asked])
        if follows:
            head = head[:0]
        filler = length - len(head) - len(tail)
        if filler < 0:
            raise UserError(
                f"passkey: {length} tokens do not hold needle and question, which take "
                f"{len(head) + len(tail)} with tokenizer {self.tokenizer.name}; ask for more"
            )
        start = int(rng.choice(self.starts))
        if self.needle_within and not follows:
            moved = int(rng.integers(min(self.needle_within, filler) + 1))
            head = self.head(names, keys, self._filler(start, moved))
            start, filler = start + moved, filler - moved
        yield self._context_piece(head, follows)
        for done in range(0, filler, _PIECE_TOKENS):
            size = min(_PIECE_TOKENS, filler - done)
            yield self._context_piece(self._filler(start + done, size))
        weights = np.full(len(tail), self.other_weight, np.float32)
        weights[len(self.question(names[asked])) : -1] = 1
        yield Piece(tail, weights)

    def _draw_key(self, rng: np.random.Generator) -> str:
        while True:
            key = rng.integers(0, 10, self.digits)
            if self.hard_keys and rng.random() < self.hard_keys:
                key = rng.choice(rng.choice(10, rng.integers(2, 4), replace=False), self.digits)
            text = "".join(map(str, key))
            if len(self.tokenizer.encode(text)) < self.answer_len:
                return text

    def _filler(self, start: int, count: int) -> np.ndarray:
        return self.filler[(start + np.arange(count)) % len(self.filler)]

    def _context_piece(self, tokens: np.ndarray, pass_state: bool = False) -> Piece:
        return Piece(tokens, np.full(len(tokens), self.other_weight, np.float32), pass_state)


def evaluated_task(tokenizer: Tokenizer, config: PasskeyConfig) -> Passkey:
    """Return the task on which a run with this config is evaluated: without hard keys."""
    return Passkey(tokenizer, config.digits, config.keys, needle_within=config.needle_within)


def _sample_keys(digits: int) -> list[str]:
    keys = np.random.default_rng(0).integers(10, size=(1000, digits))
    return ["".join(map(str, key)) for key in keys]


def _check_tokenizer(tokenizer: Tokenizer, words: Sequence[str], what: str) -> None:
    if len({tuple(tokenizer.encode(word)) for word in words}) < len(words):
        # any answer would be correct
        raise UserError(
            f"passkey: the tokenizer, {tokenizer.name}, does not tell {what} apart (words that "
            "it does not know are one token); take a run with data.tokenizer=bytes or another "
            f"that knows {'digits' if what == 'keys' else what}"
        )


class PasskeySource(Source):
    """Endless passkey documents, whose lengths grow as the model solves them.

    Args:
      config: config of the task.
      tokenizer: the tokenizer.
      seed: seed of the documents.
      block_len: the model's block length w. If another document continues with the memory of a
        document, the answer of the first one lies within one block, so that the memory before this
        block has not seen it.
    """

    def __init__(self, config: PasskeyConfig, tokenizer: Tokenizer, seed: int, block_len: int = 1):
        self.config, self.block_len = config, block_len
        self.seed = seed
        self.task = Passkey(
            tokenizer,
            config.digits,
            config.keys,
            config.other_weight,
            config.needle_within,
            config.hard_keys,
        )
        # minimum lengths of documents with 1, 2, ... keys
        self._shortest = [self.task.shortest_with(n) for n in range(1, config.keys + 1)]
        if config.min_length < self._shortest[0]:
            raise UserError(
                f"data.passkey.min_length={config.min_length}: needle and question take "
                f"{self._shortest[0]} tokens with tokenizer {tokenizer.name}; raise it to that"
            )
        question_len = self.task.question_len
        if 0 < config.ask_every < question_len:
            raise UserError(
                f"data.passkey.ask_every={config.ask_every}: the question takes "
                f"{question_len} tokens with tokenizer {tokenizer.name}; raise it to that"
            )
        self.longest = config.start_length

    def key(self, lane: int, lanes: int, k: int, before: Key | None = None) -> Key:
        """Return [lane, number of the needle, tokens, tokens still to follow, index of the part].

        If `keys` is more than one, the key also has the number of keys in the document. It is drawn
        from one to as many as fit, so that a model starts with few keys in short documents.

        The text about a needle is at most as long as the curriculum's current longest, rounded up
        to a block and to `multiple`. It is split into documents of `ask_every` tokens, after a
        first document with the remainder.
        """
        c = self.config
        if before and before[3]:
            # the needle is of the lane of its first document: a change of data.batch may give the
            # documents that follow to another lane
            lane, needle, _, rest, part, *count = before
            rest, part = rest - c.ask_every, part + 1
            rng = np.random.default_rng([self.seed, lane, needle, 2, part])
            length = self._end_anywhere(c.ask_every, rest, part, self.task.question_len, rng)
            return [lane, needle, length, rest, part, *count]
        rng = np.random.default_rng([self.seed, lane, k, 0])
        number = self._draw_number(rng)
        min_length = max(c.min_length, self._shortest[number - 1])
        length = self._draw_length(min_length, rng)
        length = -(-length // c.multiple) * c.multiple
        room = length - min_length
        if c.needle_within and c.ask_every:
            # the needle is in the first document; a random length of that one moves the needle
            room -= int(rng.integers(min(c.needle_within, room) + 1))
        rest = room // c.ask_every * c.ask_every if c.ask_every else 0
        key = [lane, k, self._end_anywhere(length - rest, rest, 0, min_length, rng), rest, 0]
        return key if c.keys == 1 else [*key, number]

    def _draw_length(self, min_length: int, rng: np.random.Generator) -> int:
        """Draw the length of a text about a needle, in tokens."""
        if self.config.lengths == "uniform":
            return int(rng.integers(min_length, self.longest + 1))
        # density 1 / L^2: each octave of lengths has the same number of tokens. The many short
        # documents teach which digit is which, the few long ones teach to keep the key
        return round(1 / rng.uniform(1 / self.longest, 1 / min_length))

    def _draw_number(self, rng: np.random.Generator) -> int:
        """Draw the number of keys in a document, of those that the current longest one can hold."""
        if self.config.keys == 1:
            return 1
        return int(rng.integers(bisect.bisect_right(self._shortest, self.longest))) + 1

    def _end_anywhere(
        self, length: int, rest: int, part: int, shortest: int, rng: np.random.Generator
    ) -> int:
        """Return a random length that ends in the same block, so that questions end anywhere in it.

        If `rest` tokens of the text follow in further documents, the whole answer lies in that
        block, so that the memory with which they begin has not seen it. To have answers across the
        end of a block, too, the last document's answer always crosses one, if the question is short
        enough.
        """
        w, answer = self.block_len, self.task.answer_len
        if not self.config.ask_every or self.config.multiple % w == 0:
            return length
        block_end = -(-length // w) * w
        first = max(block_end - w + (answer if rest else 1), shortest)
        last = block_end - w + answer - 1 if part and not rest else block_end
        return int(rng.integers(first, (last if first <= last else block_end) + 1))

    def open(self, key: Key, piece: int = 0) -> Iterator[Piece]:
        lane, needle, length, _, part, *count = key
        rng = np.random.default_rng([self.seed, lane, needle, 1])
        chosen = np.random.default_rng([self.seed, lane, needle, 3, part])
        number = count[0] if count else self.config.keys
        asked = int(chosen.integers(number))
        return islice(self.task.document(rng, length, part > 0, asked, number), piece, None)

    def get_state(self) -> dict[str, Any]:
        return {"longest": self.longest}

    def set_state(self, state: dict[str, Any]) -> None:
        self.longest = state["longest"]

    def advance(self, state: dict[str, Any], accuracy: float) -> dict[str, Any]:
        """Return the new state after a logging interval with this token accuracy of answers."""
        if accuracy < self.config.threshold:
            return state
        return {"longest": min(2 * state["longest"], self.config.max_length)}

    def report(self) -> str:
        count = f"1 to {self.config.keys} keys of " if self.config.keys > 1 else ""
        return (
            f"passkey documents of {self.config.min_length:,} to {self.longest:,} tokens, growing "
            f"to {self.config.max_length:,}; {count}{self.config.digits} digits"
        )


class PasskeyTask(Task):
    keys = ("data.passkey.*",)
    group = "passkey"
    options = ("lengths", "examples", "ablate")
    evaluation = "famjax.eval.passkey:evaluate"
    headline = "key_accuracy"

    def check(self, config: Config) -> Iterator[str]:
        p = config.data.passkey
        if p.min_length > p.max_length:
            yield (
                f"data.passkey.min_length={p.min_length} is more than "
                f"data.passkey.max_length={p.max_length}; swap them"
            )
        lengths = ("min_length", "start_length", "max_length")
        sizes = [getattr(p, name) for name in lengths]
        if sizes != sorted(sizes):
            settings = ", ".join(f"{n}={s}" for n, s in zip(lengths, sizes, strict=True))
            yield f"data.passkey: {settings} must be in ascending order"
        if p.other_weight >= 1:
            yield answer_weight_error("data.passkey.other_weight", p.other_weight)
        if p.ask_every:
            yield from _check_ask_every(config)

    def make_source(
        self, config: Config, tokenizer: Tokenizer, split: Split, checked: Path | None
    ) -> PasskeySource:
        block_len = config.model.block_len
        source = PasskeySource(config.data.passkey, tokenizer, config.seed, block_len)
        if config.data.passkey.ask_every and source.task.answer_len > block_len:
            raise UserError(
                f"model.block_len={block_len}: the answer takes "
                f"{source.task.answer_len} tokens with tokenizer {tokenizer.name}, and must fit in "
                "one block; raise it to that, or set data.passkey.ask_every=0"
            )
        return source

    def eval_options(self, config: Config, source: Any, capacity: int | None) -> str | None:
        shortest = source.of_task().task.shortest
        fit = [n for n in LENGTHS if shortest <= n and (capacity is None or n <= capacity)]
        if not fit and capacity is not None and shortest <= capacity:
            fit = [capacity]
        if not fit:
            return None
        return "" if fit == LENGTHS else f" --lengths {','.join(map(str, fit))}"


def _check_ask_every(config: Config) -> Iterator[str]:
    """Yield errors for settings that keep documents from starting with the previous memory."""
    m, d, p = config.model, config.data, config.data.passkey
    setting = f"data.passkey.ask_every={p.ask_every}"
    off = "or set data.passkey.ask_every=0"
    if p.ask_every % m.block_len:
        yield (
            f"{setting} is not a multiple of model.block_len={m.block_len}, so the memory would "
            f"contain the answers; take {format_multiples(p.ask_every, m.block_len)} {off}"
        )
    if d.layout == "packed":
        yield f"{setting} needs memory that packed rows do not carry; set data.layout=lanes {off}"
    if not is_segmented(m) and not any(spec.passes_memory for spec in mixer_specs(m)):
        where = f"model.mixer={m.mixer}" if m.stack == "residual" else f"model.stack={m.stack}"
        yield (
            f"{setting} needs a memory in addition to the window, and {where} has none; set "
            f"model.stack=residual with model.mixer=fam or model.mixer=delta, {off}"
        )
    if m.fam_previous > 1 and any(spec.has_memory_prompt for spec in mixer_specs(m)):
        yield f"{setting} carries one FAM; set model.fam_previous=1 {off}"
