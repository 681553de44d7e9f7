"""Algorithmic task: programs that the model executes as it reads (FT v3 7.4, Table 7).

A program has `steps` statements. The target at the ";" of a print statement is the printed value,
which the model never reads. Statements are drawn as the paper describes and its Table 7 shows: each
kind is equally likely, and impossible statements are drawn again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from famjax.config.schema import ToyConfig
from famjax.data.sources import Piece
from famjax.tokenizers.words import BEGIN, SPECIALS

VARIABLES = ("x", "y", "z", "p", "r")
LOWEST, HIGHEST = 1, 10
_VALUES = tuple(str(value) for value in range(LOWEST, HIGHEST + 1))
_SIGNS = ("=", "++", "--", "if", "print", "<", ">", ":", ";")
_KINDS = ("=", "++", "--", "print", "if")
_NESTED = _KINDS[:3]

Values = dict[str, int]


class Algorithmic:
    """Programs of up to 5 variables. Attributes: see `famjax.tasks.toy.ToyTask`."""

    keys: tuple[str, ...] = ("data.toy.variables",)
    answers_are_targets = True
    steps = (100, 100)
    answers = range(len(SPECIALS), len(SPECIALS) + len(_VALUES))

    def __init__(self, config: ToyConfig):
        self._variables = VARIABLES[: config.variables]
        self.words = (*_VALUES, *_SIGNS, *self._variables)
        self._ids = {word: i for i, word in enumerate(self.words, len(SPECIALS))}

    def episodes(self, rngs: Sequence[np.random.Generator], steps: int) -> list[Piece]:
        """Return a program for each generator."""
        return [self._program(random.Random(int(rng.integers(2**63))), steps) for rng in rngs]

    def _program(self, rng: random.Random, steps: int) -> Piece:
        values: Values = {}
        tokens, targets = [BEGIN], {}
        for _ in range(steps):
            words = draw_statement(rng, values, self._variables, _KINDS)
            tokens += [self._ids[word] for word in words]
            if words[0] == "print":
                targets[len(tokens) - 1] = self._ids[str(values[words[1]])]
        # all other targets have weight 0
        answers, weights = np.zeros(len(tokens), np.int32), np.zeros(len(tokens), np.float32)
        answers[list(targets)], weights[list(targets)] = list(targets.values()), 1
        return Piece(np.array(tokens, np.int32), weights, targets=answers)

    def last_answers(self, piece: Piece) -> np.ndarray | None:
        """Guess the value that the same variable had at its last print."""
        assert piece.targets is not None
        printed: dict[int, int] = {}
        guesses = []
        for at in np.flatnonzero(piece.weights):
            name = int(piece.tokens[at - 1])
            guesses.append(printed.get(name, -1))
            printed[name] = int(piece.targets[at])
        return np.array(guesses)


def draw_statement(
    rng: random.Random, values: Values, variables: Sequence[str], kinds: Sequence[str]
) -> list[str]:
    """Draw a statement of one of `kinds`, and execute it on `values`."""
    while True:
        words = _try_statement(rng, values, variables, _choose(rng, kinds))
        if words:
            return words


def _try_statement(
    rng: random.Random, values: Values, variables: Sequence[str], kind: str
) -> list[str] | None:
    """Draw a statement of a kind and execute it; None if that is impossible."""
    names = [name for name in variables if (name in values) == (kind != "=")]
    if not names:
        return None
    name = _choose(rng, names)
    if kind == "=":
        values[name] = _draw_value(rng)
        return [name, "=", str(values[name]), ";"]
    if kind == "print":
        return ["print", name, ";"]
    if kind == "if":
        return _draw_conditional(rng, values, variables, name)
    changed = values[name] + (1 if kind == "++" else -1)
    if not LOWEST <= changed <= HIGHEST:
        return None
    values[name] = changed
    return [name, kind, ";"]


def _draw_conditional(
    rng: random.Random, values: Values, variables: Sequence[str], name: str
) -> list[str] | None:
    """Draw "if NAME SIGN RIGHT : STATEMENT", and execute it; None if that is impossible.

    The sign is < or >, and the right side a value or another variable. The nested statement must be
    possible even if it is not executed.
    """
    if rng.random() < 0.5:
        others = [other for other in values if other != name]
        if not others:
            return None
        right = _choose(rng, others)
        bound = values[right]
    else:
        bound = _draw_value(rng)
        right = str(bound)
    sign = _choose(rng, "<>")
    true = values[name] < bound if sign == "<" else values[name] > bound
    nested = draw_statement(rng, values if true else dict(values), variables, _NESTED)
    return ["if", name, sign, right, ":", *nested]


def _draw_value(rng: random.Random) -> int:
    return LOWEST + int(rng.random() * (HIGHEST - LOWEST + 1))


def _choose(rng: random.Random, options: Sequence[str]) -> str:
    return options[int(rng.random() * len(options))]
