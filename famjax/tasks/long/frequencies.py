"""Tasks that count words: RULER's `cwe` and `fwe` (arXiv 2404.06654, 3 and B).

A document is a list of words in random order, of which some occur more often than others. It has no
facts at particular depths: the whole list has to be remembered.
"""

from __future__ import annotations

import bisect
import string
from collections.abc import Callable, Iterator

import numpy as np

from famjax.core.errors import UserError
from famjax.data.shuffle import permuted_index
from famjax.tasks.long.document import Content, LongTask, Material, Question, Room
from famjax.tasks.long.words import ADJECTIVES, NOUNS

_PAIRS = len(ADJECTIVES) * len(NOUNS)


class CommonWords(LongTask):
    """A numbered list of words, in which ten words occur 30 times, and all others three times."""

    name = "cwe"
    source = "RULER, arXiv 2404.06654"
    answer_tokens = 120
    common, often, seldom = 10, 30, 3
    min_words = 120

    def make_content(self, rng: np.random.Generator, material: Material) -> Content:
        first = int(rng.integers(_PAIRS))
        head = (
            "Below is a numbered list of words. In these words, some appear more often than "
            "others. Memorize the ones that appear most often.\n"
        )
        text = (
            f"\nQuestion: What are the {self.common} most common words in the above list? "
            f"Answer: The top {self.common} words that appear most often in the list are:"
        )
        words = tuple(_pair((first + i) % _PAIRS) for i in range(self.common))
        return Content(head, (), (Question(text, words, ()),))

    def make_filler(
        self,
        rng: np.random.Generator,
        content: Content,
        material: Material,
        room: Room,
    ) -> Iterator[str]:
        words, other = content.questions[0].references, self._rare_words(rng, content)
        # numbers get longer along the list, so a second estimate takes words from the middle of
        # the list of the first estimate
        middle = room.count([f"{i}. {other(i)}" for i in range(1, 201)]) // 2
        total = room.count([f"{middle + i}. {other(i)}" for i in range(200)])
        if total < self.min_words:
            raise UserError(
                f"{self.name}: only {total} words fit, too few for any to be common; at least "
                f"{self.min_words} are needed, in documents "
                f"{self.min_words / max(total, 1):.1f} times as long"
            )
        # in a short list, common words are at most half of it
        often = min(self.often, total // (2 * self.common))
        total = self.common * often + (total - self.common * often) // self.seldom * self.seldom
        seed = int(rng.integers(2**32))
        for position in range(total):
            index = permuted_index(position, total, seed)
            rare, is_common = index - self.common * often, index < self.common * often
            word = words[index // often] if is_common else other(rare // self.seldom)
            yield f"{position + 1}. {word}"

    def min_filler(
        self, rng: np.random.Generator, content: Content, size: Callable[[str], int]
    ) -> int:
        other = self._rare_words(rng, content)
        # numbers that are longer than those of the estimate in `make_filler`
        mean = np.mean([size(f"{1000 + i}. {other(i)}") for i in range(200)])
        return int(self.min_words * mean) + 1

    def _rare_words(self, rng: np.random.Generator, content: Content) -> Callable[[int], str]:
        """Return a function from a number to a rare word; all differ from the common words, too."""
        first, shift = _index(content.questions[0].references[0]), int(rng.integers(_PAIRS))

        def other(number: int) -> str:
            around, place = divmod(number, _PAIRS - self.common)
            place = (place + shift) % (_PAIRS - self.common)
            return _pair((first + self.common + place) % _PAIRS + around * _PAIRS)

        return other


class FrequentWords(LongTask):
    """Coded words, of which the k-th has a frequency of k^-2; the first one is dots."""

    name = "fwe"
    source = "RULER, arXiv 2404.06654"
    answer_tokens = 50
    # minimum number of words with which each of the four most frequent ones occurs more often than
    # the next one
    min_words = 53

    def make_content(self, rng: np.random.Generator, material: Material) -> Content:
        head = (
            "Read the following coded text and track the frequency of each coded word. Find the "
            "three most frequently appeared coded words. "
        )
        text = (
            "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are "
            "the three most frequently appeared words in the above coded text? Answer: According "
            "to the coded text above, the three most frequently appeared words are:"
        )
        words: list[str] = []
        while len(words) < 3:
            word = _coded(rng)
            if word not in words:
                words.append(word)
        return Content(head, (), (Question(text, tuple(words), ()),))

    def make_filler(
        self,
        rng: np.random.Generator,
        content: Content,
        material: Material,
        room: Room,
    ) -> Iterator[str]:
        words = ["....", *content.questions[0].references]
        total = room.count(_sample_coded(rng))
        if total < self.min_words:
            raise UserError(
                f"{self.name}: only {total} words fit, of which the most frequent ones would be "
                f"equally frequent; at least {self.min_words} are needed, in documents "
                f"{self.min_words / max(total, 1):.1f} times as long"
            )
        zeta = np.pi**2 / 6
        ends: list[int] = []
        while (size := int(total * (len(ends) + 1) ** -2.0 / zeta)) > 0:
            ends.append((ends[-1] if ends else 0) + size)
        while len(words) < len(ends):
            word = _coded(rng)
            if word not in words:
                words.append(word)
        seed = int(rng.integers(2**32))
        for position in range(ends[-1]):
            yield words[bisect.bisect_right(ends, permuted_index(position, ends[-1], seed))]

    def min_filler(
        self, rng: np.random.Generator, content: Content, size: Callable[[str], int]
    ) -> int:
        return int(self.min_words * np.mean([size(word) for word in _sample_coded(rng)])) + 1


def _pair(index: int) -> str:
    """Return the word of an index. All words differ, and consecutive ones have no common part."""
    index, pair = divmod(index, _PAIRS)
    noun, adjective = divmod(pair, len(ADJECTIVES))
    word = f"{ADJECTIVES[adjective]}-{NOUNS[(noun + adjective) % len(NOUNS)]}"
    while index:
        index, noun = divmod(index - 1, len(NOUNS))
        word += f"-{NOUNS[noun]}"
    return word


def _index(word: str) -> int:
    """Return the index of a word that has two parts; the inverse of `_pair`."""
    adjective, noun = word.split("-")
    row = ADJECTIVES.index(adjective)
    return (NOUNS.index(noun) - row) % len(NOUNS) * len(ADJECTIVES) + row


def _sample_coded(rng: np.random.Generator) -> list[str]:
    """Return 100 words with the share of dots that a document has."""
    return ["...."] * 61 + [_coded(rng) for _ in range(39)]


def _coded(rng: np.random.Generator) -> str:
    return "".join(rng.choice(list(string.ascii_lowercase), 6))
