"""Copy, reverse and counting (Feedback Transformer v3 4.1.1): the answer follows the question.

Answers are predicted token by token, like text. They have weight 1, all other tokens weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from famjax.config.schema import ToyConfig
from famjax.data.sources import Piece
from famjax.tokenizers.words import BEGIN, SPECIALS


class _SequenceTask:
    """Base of the tasks in this module."""

    keys: tuple[str, ...] = ()
    answers_are_targets = False

    def last_answers(self, piece: Piece) -> np.ndarray | None:
        return None


def _make_episode(question: np.ndarray, separator: int, answer: np.ndarray) -> Piece:
    """Return an episode of BEGIN, question, separator and answer.

    The arguments are indices into the task's words.
    """
    task = np.concatenate([question, [separator], answer]) + len(SPECIALS)
    tokens = np.concatenate([[BEGIN], task]).astype(np.int32)
    weights = np.zeros(len(tokens), np.float32)
    weights[len(tokens) - len(answer) :] = 1
    return Piece(tokens, weights)


class Copy(_SequenceTask):
    """`steps` digits, "=", and the same digits again.

    Attributes: see `famjax.tasks.toy.ToyTask`.
    """

    words: tuple[str, ...] = (*"0123456789", "=")
    answers = range(len(SPECIALS), len(SPECIALS) + 10)
    steps = (40, 400)

    def __init__(self, config: ToyConfig):
        del config

    def episodes(self, rngs: Sequence[np.random.Generator], steps: int) -> list[Piece]:
        """Return an episode for each generator."""
        lines = (rng.integers(0, 10, steps) for rng in rngs)
        return [_make_episode(digits, 10, self.answer(digits)) for digits in lines]

    def answer(self, digits: np.ndarray) -> np.ndarray:
        return digits


class Reverse(Copy):
    """`steps` digits, "=", and the same digits backwards."""

    def answer(self, digits: np.ndarray) -> np.ndarray:
        return digits[::-1]


class Counting(_SequenceTask):
    """A number of A's from 1 to `steps`, "=", as many B's, and "."; B's and "." are the answer.

    Attributes: see `famjax.tasks.toy.ToyTask`.
    """

    words: tuple[str, ...] = ("A", "B", "=", ".")
    answers = range(len(SPECIALS) + 1, len(SPECIALS) + 4, 2)
    steps = (50, 50)

    def __init__(self, config: ToyConfig):
        del config

    def episodes(self, rngs: Sequence[np.random.Generator], steps: int) -> list[Piece]:
        """Return an episode for each generator."""
        counts = (int(rng.integers(1, steps + 1)) for rng in rngs)
        return [_make_episode(np.zeros(n, int), 2, np.array([1] * n + [3])) for n in counts]
