"""Context-free baselines of a text: the scores that a model has to beat.

unigram: predicts by the token frequencies of the evaluated text itself. Its loss is the entropy of
these frequencies, which is a lower bound for any fixed distribution; a distribution estimated on
other text is worse. The loss is small if the text has few tokens of a large vocabulary. The
accuracy is the share of the commonest token.

uniform: gives all tokens of the vocabulary the same probability.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Guess(NamedTuple):
    """Negative log-likelihood in nats and number of correct predictions, summed over tokens."""

    nll: float
    correct: float


class TokenCounts:
    """Counts how often each token occurs in a stream.

    Args:
      vocab_size: number of different tokens.
    """

    def __init__(self, vocab_size: int):
        self._counts = np.zeros(vocab_size, np.int64)

    def add(self, tokens: np.ndarray) -> None:
        """Count tokens, any shape."""
        np.add.at(self._counts, tokens, 1)

    def unigram(self) -> Guess:
        """Return the scores of predictions by the counted tokens' own frequencies."""
        seen = self._counts[self._counts > 0]
        total = int(seen.sum())
        return Guess(-float(seen @ np.log(seen / total)), float(seen.max(initial=0)))

    def uniform(self) -> Guess:
        """Return the scores of equal probabilities; `correct` is the expected number."""
        v, total = len(self._counts), int(self._counts.sum())
        return Guess(total * math.log(v), total / v)
