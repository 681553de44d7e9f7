"""Streamed documents of any length, with facts among filler, and questions about them.

A document is [bos] head, context, question, answer. The context is filler of whole sentences, with
each fact at its depth. It is generated while it is read, so that ten million tokens take no more
memory than a thousand.
"""

from __future__ import annotations

import abc
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.data.sources import Key, Piece, Source, Split, TextSource
from famjax.tasks.long.filler import Filler, cycle_sentences, repeat_noise
from famjax.tasks.task import Task, answer_weight_error
from famjax.tokenizers.tokenizer import Tokenizer

# last number of the seed of a training and of an evaluated document; to draw a part of the document
# one more number is appended
_TRAINING, _EVALUATION = 0, 1
_CONTENT, _DEPTHS, _FILLER = 0, 1, 2
# largest number of a label; the one that takes the most tokens, for estimates of room
_LARGEST_NUMBER = 9_999_999


class Question(NamedTuple):
    """A question about a document.

    Attributes:
      text: the question with the white space before it, up to where the answer begins.
      references: strings that an answer should contain, all of them unless `any_of` is set.
      facts: indices of the facts that are needed to answer.
      wrong: for a question with few possible answers, the wrong ones; see
        `famjax.eval.long.score`. None if the references may be anywhere in the answer.
      any_of: whether one of the references suffices.
    """

    text: str
    references: tuple[str, ...]
    facts: tuple[int, ...]
    wrong: tuple[str, ...] | None = None
    any_of: bool = False

    @property
    def answer(self) -> str:
        """The answer that training documents have."""
        return " " + ", ".join(self.references[:1] if self.any_of else self.references) + "."


class Content(NamedTuple):
    """The content of a document, without the depths of its facts and the rest of its filler.

    Attributes:
      head: text before the context.
      facts: sentences that are put into the filler.
      questions: questions that may be asked.
      in_order: whether the facts keep their order in the context.
      separator: text after each fact and each sentence of the filler, or a space, which is only
        between them and encoded with the following one: tokenizers have words with a space before
        them.
      label: text before each fact and each sentence, in which "{}" is replaced by its number, from
        1; "" is no label.
      near: sentences that the filler takes first, wherever it puts them; other sentences fill the
        rest.
    """

    head: str
    facts: tuple[str, ...]
    questions: tuple[Question, ...]
    in_order: bool = False
    separator: str = " "
    label: str = ""
    near: tuple[str, ...] = ()


class Material(NamedTuple):
    """What a task has read from files.

    Attributes:
      texts: the filler, for a task that `has_files`.
      contents: for a task that `has_facts`, the contents from which a document takes one.
      version: version of the files, JSON-able; documents are the same only for the same version.
      source: source of the filler's texts, for a task that `has_files`.
    """

    texts: Filler | None = None
    contents: tuple[Content, ...] = ()
    version: Any = None
    source: TextSource | None = None


NO_MATERIAL = Material()


class Room(NamedTuple):
    """Room for the filler of a document.

    Attributes:
      tokens: number of tokens that fit.
      size: returns the maximum number of tokens of a sentence with its label and separator.
    """

    tokens: int
    size: Callable[[str], int]

    def count(self, sentences: Sequence[str]) -> int:
        """Return how many sentences fit if they have the mean size of the given ones."""
        return int(self.tokens / np.mean([self.size(each) for each in sentences]))


@dataclass(frozen=True)
class Document:
    """A document of a task.

    Attributes:
      content: content of the document.
      tokenizer: the tokenizer.
      filler: called with a number of tokens; returns sentences to fill them, the same ones in every
        call.
      depths: position of each fact in the context, from 0 to 1.
      length: maximum number of tokens, including bos, the longest question, and `max_written`.
      answer_tokens: minimum number of tokens that are reserved for the answer.
    """

    content: Content
    tokenizer: Tokenizer
    filler: Callable[[int], Iterator[str]]
    depths: tuple[float, ...]
    length: int
    answer_tokens: int

    @functools.cached_property
    def _facts(self) -> list[np.ndarray]:
        return [self._encode(fact) for fact in self.content.facts]

    def _encode(self, sentence: str, is_first: bool = False) -> np.ndarray:
        """Return the tokens of a fact or sentence with its separator, [n]."""
        text = separate(sentence, self.content.separator, is_first)
        return encode_sentence(self.tokenizer, text)

    def _label(self, number: int) -> np.ndarray:
        """Return the tokens of the label of a fact or sentence, by its number, [n]."""
        return encode_label(self.tokenizer, self.content.label, number)

    @functools.cached_property
    def _head(self) -> np.ndarray:
        head = self.tokenizer.encode(self.content.head)
        return np.concatenate([[self.tokenizer.bos_id], head]).astype(np.int32)

    @functools.cached_property
    def questions(self) -> list[np.ndarray]:
        """The tokens of each question, [n]."""
        return [self.tokenizer.encode(question.text) for question in self.content.questions]

    @functools.cached_property
    def max_written(self) -> int:
        """Number of tokens reserved for an answer.

        This is `answer_tokens`, or the length of the longest answer with eos if that is more.
        """
        answers = (question.answer for question in self.content.questions)
        return max(self.answer_tokens, *(len(self.tokenizer.encode(a)) + 1 for a in answers))

    @functools.cached_property
    def room(self) -> int:
        """Number of tokens of filler that fit; negative if not even facts and question do."""
        labels = len(self._facts) * len(self._label(_LARGEST_NUMBER))
        # without the space before it, a fact may have more tokens
        longer = [
            len(self._encode(fact, is_first=True)) - len(tokens)
            for fact, tokens in zip(self.content.facts, self._facts, strict=True)
        ]
        fixed = len(self._head) + sum(map(len, self._facts)) + max(map(len, self.questions))
        fixed += labels + max([0, *longer])
        return self.length - fixed - self.max_written

    def tokens(self) -> Iterator[np.ndarray]:
        """Yield the tokens before the question, in pieces [n] of one sentence each."""
        yield self._head
        for number, sentence in enumerate(self._sentences(), 1):
            tokens = self._encode(sentence, is_first=number == 1)
            yield np.concatenate([self._label(number), tokens])

    def _sentences(self) -> Iterator[str]:
        """Yield the facts, and as many sentences of the filler as fit, in their order."""
        waiting = sorted(range(len(self._facts)), key=lambda i: self.depths[i])
        written, number = 0, 1
        for sentence in self.filler(self.room):
            while waiting and self.depths[waiting[0]] * self.room <= written:
                yield self.content.facts[waiting.pop(0)]
                number += 1
            tokens = self._encode(sentence, is_first=number == 1)
            written += len(self._label(number)) + len(tokens)
            if written > self.room:
                break
            yield sentence
            number += 1
        for i in waiting:
            yield self.content.facts[i]


def separate(sentence: str, separator: str, is_first: bool = False) -> str:
    """Return a sentence with its separator: see `Content.separator`.

    Args:
      is_first: whether it is the first one of the context, which has no space before it.
    """
    if separator != " ":
        return sentence + separator
    return sentence if is_first else separator + sentence


@functools.lru_cache(maxsize=1024)
def encode_sentence(tokenizer: Tokenizer, sentence: str) -> np.ndarray:
    """Return the tokens of a sentence, [n]; cached, since noise repeats its sentences."""
    return tokenizer.encode(sentence)


def encode_label(tokenizer: Tokenizer, label: str, number: int) -> np.ndarray:
    """Return the tokens of a label with its number, [n]; none for the label ""."""
    return tokenizer.encode(label.format(number)) if label else np.zeros(0, np.int32)


def hash_contents(contents: Sequence[Content]) -> str:
    """Return the sha256, in hex, of `repr(tuple(contents))`.

    Contents may share large parts, whose `repr` would repeat them, so only the `repr` of one
    content is held at a time.
    """
    hashed = hashlib.sha256(b"(")
    for i, content in enumerate(contents):
        hashed.update(f"{', ' * (i > 0)}{content!r}".encode())
    hashed.update(b",)" if len(contents) == 1 else b")")
    return hashed.hexdigest()


class LongTask(Task):
    """A task on long documents. A new one is a file, and a line in `famjax.tasks`.

    Attributes:
      name: name in `data.task` and `famjax eval --tasks`.
      source: origin of the task, for the report.
      answer_tokens: number of tokens that an answer may take.
      facts_hint: for a task that `has_facts`, how to give its file of facts, for errors.
    """

    keys = ("data.long.*",)
    group = "long"
    options: tuple[str, ...] = ("lengths", "examples", "questions", "ablate")
    files = "FILES"
    evaluation = "famjax.eval.long:evaluate"
    documents_check = "famjax.eval.long:check_documents"
    headline = "score"
    name: str
    source: str
    answer_tokens: int
    facts_hint: str = ""

    @property
    def has_files(self) -> bool:
        """Whether the filler is text from files; if not, the task makes its own."""
        return False

    @property
    def has_facts(self) -> bool:
        """Whether the facts are read from a file, `data.long.facts`."""
        return False

    @abc.abstractmethod
    def make_content(self, rng: np.random.Generator, material: Material) -> Content:
        """Return the content of a document; equal `rng` and `material` give equal contents."""

    def make_filler(
        self,
        rng: np.random.Generator,
        content: Content,
        material: Material,
        room: Room,
    ) -> Iterator[str]:
        """Yield the filler's sentences of a document: from files if the task `has_files`, or noise.

        Args:
          rng: random generator; equal ones give equal sentences.
          content: content of the document.
          material: what `load` returned.
          room: room for the sentences. More may be yielded; the document takes those that fit.
        """
        return material.texts(rng) if material.texts else repeat_noise()

    def min_filler(
        self, rng: np.random.Generator, content: Content, size: Callable[[str], int]
    ) -> int:
        """Return a number of tokens with which `make_filler` never has too little room.

        Args:
          rng: equal to that of `make_filler`.
          content: content of the document.
          size: `Room.size`.
        """
        return 0

    def document(
        self,
        tokenizer: Tokenizer,
        length: int,
        seed: tuple[int, ...],
        material: Material = NO_MATERIAL,
        depth: float | None = None,
        grows: bool = False,
    ) -> Document:
        """Return a document, equal for equal seeds; its content does not depend on its length.

        Args:
          tokenizer: the tokenizer.
          length: maximum number of tokens, see `Document`.
          seed: numbers that identify the document.
          material: what `load` returned.
          depth: depth of the first fact of the first question; None draws it like the other depths.
          grows: whether a document that does not fit in `length` is longer, instead of an error.

        Raises:
          UserError: the document does not fit in `length`, or the tokenizer cannot express an
            answer.
        """
        content = self.make_content(np.random.default_rng([*seed, _CONTENT]), material)
        depths = np.random.default_rng([*seed, _DEPTHS]).random(len(content.facts))
        if depth is not None and content.facts:
            depths[content.questions[0].facts[0]] = depth
        if content.in_order:
            depths = np.sort(depths)

        label = len(encode_label(tokenizer, content.label, _LARGEST_NUMBER))

        def size(sentence: str) -> int:
            return label + len(encode_sentence(tokenizer, separate(sentence, content.separator)))

        def filler(room: int) -> Iterator[str]:
            rng = np.random.default_rng([*seed, _FILLER])
            return self.make_filler(rng, content, material, Room(room, size))

        min_room = None
        if grows:
            min_room = self.min_filler(np.random.default_rng([*seed, _FILLER]), content, size)
        return self.place(content, tokenizer, length, filler, tuple(depths.tolist()), min_room)

    def place(
        self,
        content: Content,
        tokenizer: Tokenizer,
        length: int,
        filler: Callable[[int], Iterator[str]] = lambda _: repeat_noise(),
        depths: tuple[float, ...] = (),
        min_room: int | None = None,
    ) -> Document:
        """Return a document with a given content. Most arguments are those of `Document`.

        Args:
          min_room: minimum number of tokens of filler, for which the document becomes longer than
            `length` if need be; None raises an error if it does not fit.

        Raises:
          UserError: the document does not fit in `length`, or the tokenizer cannot express an
            answer.
        """
        for question in content.questions:
            for reference in question.references:
                if reference not in tokenizer.decode(tokenizer.encode(reference)):
                    raise UserError(
                        f"{self.name}: tokenizer {tokenizer.name} cannot express {reference!r}; "
                        "take a run with one that knows all letters and digits"
                    )
        document = Document(content, tokenizer, filler, depths, length, self.answer_tokens)
        if min_room is not None:
            return replace(document, length=length + max(min_room - document.room, 0))
        if document.room < 0:
            raise UserError(
                f"{length:,} tokens do not hold facts, question and answer, which take "
                f"{length - document.room:,} with tokenizer {tokenizer.name}; ask for more"
            )
        return document

    def evaluated_document(
        self,
        tokenizer: Tokenizer,
        length: int,
        number: int,
        of: int,
        material: Material = NO_MATERIAL,
    ) -> Document:
        """Return document `number` of the `of` documents that are evaluated.

        The first fact of its first question has a random depth in the `number`-th of `of` equal
        parts, so that all depths are covered, unless the facts keep their order.
        """
        seed = (0, number, _EVALUATION)
        depth = (number % of + np.random.default_rng(seed).random()) / of
        return self.document(tokenizer, length, seed, material, depth)

    def load(
        self,
        files: str,
        facts: str,
        tokenizer: Tokenizer,
        seed: int = 0,
        holdout: int = 0,
        checked: Path | None = None,
    ) -> Material:
        """Read the files of the task.

        Args:
          files: files of the filler, in the form of `data.files`; "" is Python's standard library.
          facts: file of the facts; "" is none.
          tokenizer: the run's tokenizer.
          seed, holdout, checked: of the `TextSource` of the filler; evaluation holds out nothing.

        Raises:
          UserError: `facts` is missing, or given to a task with its own facts.
        """
        if facts and not self.has_facts:
            raise UserError(f"data.long.facts={facts}: {self.name} has its own facts; remove it")
        if self.has_facts and not facts:
            raise UserError(f"{self.name}: give the file with its facts, {self.facts_hint}")
        source = None
        if self.has_files:
            # an evaluation, which keeps no record, reads little of the files
            probe_only = checked is None
            source = TextSource(files, tokenizer, seed, holdout, "train", checked, probe_only)
        contents = self.read_facts(facts) if facts else ()
        version = [source and source.get_state(), hash_contents(contents)]
        texts = cycle_sentences(source) if source else None
        return self.arrange_facts(Material(texts, contents, version, source), facts)

    def arrange_facts(self, material: Material, facts: str) -> Material:
        """Return what `load` returns, for a task whose filler is made of the facts of others."""
        return material

    def read_facts(self, facts: str) -> tuple[Content, ...]:
        """Return the contents of a file of facts, for a task that `has_facts`."""
        return ()

    def make_source(
        self, config: Config, tokenizer: Tokenizer, split: Split, checked: Path | None
    ) -> Source:
        return LongSource(self, config, tokenizer, checked)

    def check(self, config: Config) -> Iterator[str]:
        long = config.data.long
        if long.other_weight >= 1:
            yield answer_weight_error("data.long.other_weight", long.other_weight)
        if long.min_length > long.max_length:
            yield (
                f"data.long.min_length={long.min_length} is more than "
                f"data.long.max_length={long.max_length}; swap them"
            )


class LongSource(Source):
    """Endless training documents, each with one question and its answer.

    Lengths are drawn so that each octave of lengths has the same number of tokens. A document that
    does not fit in its length is as long as it needs to be. Filler from files leaves out the text
    that is held out.
    """

    def __init__(
        self, task: LongTask, config: Config, tokenizer: Tokenizer, checked: Path | None = None
    ):
        self.task, self.tokenizer = task, tokenizer
        self.config, self.seed = config.data.long, config.seed
        self._holdout = config.data.holdout
        self._material = task.load(
            config.data.files, self.config.facts, tokenizer, config.seed, self._holdout, checked
        )
        # raise an error now if the minimum length is too small
        length = self.config.min_length
        for content in self._material.contents:
            task.place(content, tokenizer, length)
        document = task.document(tokenizer, length, self._document_seed(0, 0), self._material)
        list(islice(document.tokens(), 2))

    def key(self, lane: int, lanes: int, k: int, before: Key | None = None) -> Key:
        """Return [lane, number of the document, maximum number of tokens]."""
        c = self.config
        rng = np.random.default_rng(self._document_seed(lane, k))
        return [lane, k, round(1 / rng.uniform(1 / c.max_length, 1 / c.min_length))]

    def _document_seed(self, lane: int, k: int) -> tuple[int, ...]:
        return (self.seed, lane, k, _TRAINING)

    def _open(self, key: Key) -> tuple[Document, int]:
        lane, k, length = key
        seed = self._document_seed(lane, k)
        document = self.task.document(self.tokenizer, length, seed, self._material, grows=True)
        asked = int(np.random.default_rng([*seed, 3]).integers(len(document.questions)))
        return document, asked

    def open(self, key: Key, piece: int = 0) -> Iterator[Piece]:
        document, asked = self._open(key)
        weight = self.config.other_weight
        for i, tokens in zip(count(), document.tokens(), strict=False):
            if i >= piece:
                yield Piece(tokens, np.full(len(tokens), weight, np.float32))
        question = document.questions[asked]
        text = document.content.questions[asked].answer
        answer = np.append(self.tokenizer.encode(text), self.tokenizer.eos_id).astype(np.int32)
        weights = np.repeat(np.array([weight, 1], np.float32), [len(question), len(answer)])
        if piece <= i + 1:
            yield Piece(np.concatenate([question, answer]), weights)

    def get_state(self) -> dict[str, Any]:
        """Return a fingerprint of the files; keys and cursors are valid only for the same files."""
        state = {"material": self._material.version}
        if self._material.source:
            state["holdout"] = self._holdout
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        if state != self.get_state():
            raise UserError(
                f"{self.task.name}: data.files, data.holdout or data.long.facts changed since the "
                "run was saved; restore them, or start another run"
            )

    def save_checked(self) -> None:
        if self._material.source:
            self._material.source.save_checked()

    def report(self) -> str:
        c = self.config
        return f"{self.task.name} documents of {c.min_length:,} to {c.max_length:,} tokens"
