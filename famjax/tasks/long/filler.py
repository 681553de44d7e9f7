"""Endless filler for long documents: noise, or the sentences of texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import count, repeat

import numpy as np

from famjax.core.errors import UserError
from famjax.data.sources import TextSource

# called with a document's generator; yields the sentences of its filler
Filler = Callable[[np.random.Generator], Iterator[str]]

# RULER's noise, which is the same as in the passkey task
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_END = re.compile(r"(?<=[.!?])\s+")
# longer sentences are split into pieces of this many characters
_LONGEST = 1000


def repeat_noise() -> Iterator[str]:
    return repeat(NOISE)


def cycle_sentences(source: TextSource) -> Filler:
    """Return a filler that repeats all documents of a source, starting at a random place."""

    def filler(rng: np.random.Generator) -> Iterator[str]:
        first, empty = int(rng.integers(len(source))), 0
        skip_share = float(rng.random())
        for k in count(first):
            texts = source.document_texts(k, skip_share if k == first else 0.0)
            sentences = (sentence for text in texts for sentence in split_sentences(text))
            if (sentence := next(sentences, None)) is None:
                empty += 1
                if empty > len(source):
                    raise UserError("the texts of the filler are empty; give files with text")
                continue
            empty = 0
            yield sentence
            yield from sentences

    return filler


def shuffle_forever(texts: Sequence[str]) -> Filler:
    """Return a filler that repeats texts, each time in another random order."""

    def filler(rng: np.random.Generator) -> Iterator[str]:
        while True:
            for i in rng.permutation(len(texts)):
                yield texts[i]

    return filler


def split_sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text, without the white space between them."""
    for line in text.splitlines():
        for sentence in _END.split(line.strip()):
            for at in range(0, len(sentence), _LONGEST):
                yield sentence[at : at + _LONGEST]
