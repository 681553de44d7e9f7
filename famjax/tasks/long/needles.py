"""Needles in a haystack: RULER's eight tasks (Hsieh et al. 2024, arXiv 2404.06654, 3 and B).

Needles and questions have RULER's wording, so that results are comparable with those elsewhere. The
words of the keys are our own.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from famjax.tasks.long.document import Content, LongTask, Material, Question, Room
from famjax.tasks.long.words import ADJECTIVES, NOUNS

Kind = Literal["words", "numbers", "uuids"]
Haystack = Literal["noise", "texts", "needles"]

_HEAD = (
    "{Some} special magic {kind} {are} hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n"
)
_NEEDLE = "One of the special magic {kind} for {key} is: {value}."
_QUESTION = (
    "\nWhat {are_all} the special magic {kind} for {query} mentioned in the provided text? "
    "The special magic {kind} for {query} mentioned in the provided text {are}"
)


def _number(rng: np.random.Generator) -> str:
    return str(rng.integers(10**6, 10**7))


def _words(rng: np.random.Generator) -> str:
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def _uuid(rng: np.random.Generator) -> str:
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


_DRAW: dict[str, Callable[[np.random.Generator], str]] = {
    "numbers": _number,
    "words": _words,
    "uuids": _uuid,
}


@dataclass(frozen=True)
class Needles(LongTask):
    """Needles that each give a value of a key, and questions for the values of some keys.

    Attributes:
      name: RULER's name of the task.
      haystack: the filler: noise, sentences of texts, or other needles.
      kind: kind of the values.
      key_kind: kind of the keys.
      keys_in: number of keys in the document.
      values: number of values of each key.
      queries: number of keys in one question.
    """

    name: str
    haystack: Haystack
    kind: Kind = "numbers"
    key_kind: Kind = "words"
    keys_in: int = 1
    values: int = 1
    queries: int = 1
    source = "RULER, arXiv 2404.06654"
    answer_tokens = 128

    @property
    def has_files(self) -> bool:
        return self.haystack == "texts"

    @property
    def switches(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("data.files", "data.holdout") if self.has_files else ()

    def make_content(self, rng: np.random.Generator, material: Material) -> Content:
        pairs: dict[str, list[str]] = {}
        while len(pairs) < self.keys_in:
            key = _DRAW[self.key_kind](rng)
            pairs.setdefault(key, [_DRAW[self.kind](rng) for _ in range(self.values)])
        facts = tuple(self._needle(key, value) for key, values in pairs.items() for value in values)
        keys = list(pairs)
        groups = [
            tuple((first + i) % len(keys) for i in range(self.queries))
            for first in range(0, len(keys), self.queries)
        ]
        questions = tuple(self._question(keys, pairs, group) for group in groups)
        singular = self.queries * self.values == 1
        head = _HEAD.format(
            Some="A" if singular else "Some",
            kind=self.kind[:-1] if singular else self.kind,
            are="is" if singular else "are",
        )
        return Content(head, facts, questions)

    def _needle(self, key: str, value: str) -> str:
        return _NEEDLE.format(kind=self.kind, key=key, value=value)

    def _question(
        self, keys: list[str], pairs: dict[str, list[str]], group: tuple[int, ...]
    ) -> Question:
        """Return the question for the keys with the indices in `group`."""
        singular = self.queries * self.values == 1
        names = [keys[i] for i in group]
        query = names[0] if len(names) == 1 else f"{', '.join(names[:-1])}, and {names[-1]}"
        text = _QUESTION.format(
            are_all="is" if singular else "are all",
            are="is" if singular else "are",
            kind=self.kind[:-1] if singular else self.kind,
            query=query,
        )
        references = tuple(value for name in names for value in pairs[name])
        facts = tuple(i * self.values + j for i in group for j in range(self.values))
        return Question(text, references, facts)

    def make_filler(
        self,
        rng: np.random.Generator,
        content: Content,
        material: Material,
        room: Room,
    ) -> Iterator[str]:
        if self.haystack != "needles":
            yield from super().make_filler(rng, content, material, room)
        asked = " ".join(question.text for question in content.questions)
        while True:
            key = _DRAW[self.key_kind](rng)
            if key not in asked:
                yield self._needle(key, _DRAW[self.kind](rng))


NEEDLES = {
    task.name: task
    for task in (
        Needles("niah_single_1", "noise"),
        Needles("niah_single_2", "texts"),
        Needles("niah_single_3", "texts", kind="uuids"),
        Needles("niah_multikey_1", "texts", keys_in=4),
        Needles("niah_multikey_2", "needles"),
        Needles("niah_multikey_3", "needles", kind="uuids", key_kind="uuids"),
        Needles("niah_multivalue", "texts", values=4),
        Needles("niah_multiquery", "texts", keys_in=4, queries=4),
    )
}
