"""Context-free baselines of a text: the scores that a model has to beat.

unigram: the frequencies of the predicted tokens of this text itself. Its loss is the entropy of
those frequencies, a lower bound for any fixed distribution; one estimated on other text is worse.
It is small for few tokens of a large vocabulary. Its accuracy is the share of the commonest token.

uniform: equal probabilities for all tokens of the vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Guess(NamedTuple):
    """Negative log-likelihood in nats, and correct predictions, summed over the tokens."""

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
        """Return the scores of the counted tokens' own frequencies; see the module."""
        seen = self._counts[self._counts > 0]
        total = int(seen.sum())
        return Guess(-float(seen @ np.log(seen / total)), float(seen.max(initial=0)))

    def uniform(self) -> Guess:
        """Return the scores of equal probabilities, with the expected number of correct tokens."""
        v, total = len(self._counts), int(self._counts.sum())
        return Guess(total * math.log(v), total / v)
