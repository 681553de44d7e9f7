"""What predictions without context score on a text: the least that a model has to beat.

unigram: each token has the frequency it has among the tokens that are predicted in this very text.
Its loss is the entropy of those frequencies, the least that any fixed distribution can have here;
one that is estimated on other text has more. Few tokens of a large vocabulary make it small. Its
accuracy is the share of the commonest token.

uniform: all tokens of the vocabulary are equally likely.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Guess(NamedTuple):
    """Nats and hits, summed over the tokens."""

    nll: float
    correct: float


class TokenCounts:
    """Counts of the tokens of a stream, [v].

    Args:
      vocab_size: v.
    """

    def __init__(self, vocab_size: int):
        self._counts = np.zeros(vocab_size, np.int64)

    def add(self, tokens: np.ndarray) -> None:
        """Count tokens, any shape."""
        np.add.at(self._counts, tokens, 1)

    def unigram(self) -> Guess:
        """Return what the frequencies of the counted tokens score on them; see the module."""
        seen = self._counts[self._counts > 0]
        total = int(seen.sum())
        return Guess(-float(seen @ np.log(seen / total)), float(seen.max(initial=0)))

    def uniform(self) -> Guess:
        """Return what equal probabilities score; the expected number of hits."""
        v, total = len(self._counts), int(self._counts.sum())
        return Guess(total * math.log(v), total / v)
