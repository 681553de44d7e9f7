"""Programs that are executed in reading (Feedback Transformer v3 7.4, Table 7).

A program is `steps` statements; the answer at the ";" of a print is the value printed, which the
model never reads. Statements are drawn as the paper says and as its Table 7 looks: each kind is
equally likely, and what cannot be is drawn anew.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from famjax.core.config import ToyConfig
from famjax.data.sources import Piece
from famjax.data.words import BEGIN, SPECIALS

VARIABLES = ("x", "y", "z", "p", "r")
LOWEST, HIGHEST = 1, 10
_VALUES = tuple(str(value) for value in range(LOWEST, HIGHEST + 1))
_SIGNS = ("=", "++", "--", "if", "print", "<", ">", ":", ";")
_KINDS = ("=", "++", "--", "print", "if")
_NESTED = _KINDS[:3]

Values = dict[str, int]


class Algorithmic:
    """Programs of up to 5 variables. Attributes: see `famjax.tasks.toy.Toy`."""

    outputs = True
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
            words = draw(rng, values, self._variables, _KINDS)
            tokens += [self._ids[word] for word in words]
            if words[0] == "print":
                targets[len(tokens) - 1] = self._ids[str(values[words[1]])]
        # where nothing is asked for, the target is a token of weight 0
        answers, weights = np.zeros(len(tokens), np.int32), np.zeros(len(tokens), np.float32)
        answers[list(targets)], weights[list(targets)] = list(targets.values()), 1
        return Piece(np.array(tokens, np.int32), weights, targets=answers)

    def last(self, piece: Piece) -> np.ndarray | None:
        """Print what the same variable had when it was printed last."""
        assert piece.targets is not None
        printed: dict[int, int] = {}
        said = []
        for at in np.flatnonzero(piece.weights):
            name = int(piece.tokens[at - 1])
            said.append(printed.get(name, -1))
            printed[name] = int(piece.targets[at])
        return np.array(said)


def draw(
    rng: random.Random, values: Values, variables: Sequence[str], kinds: Sequence[str]
) -> list[str]:
    """Return a statement of one of `kinds`, and execute it on `values`."""
    while True:
        words = _try(rng, values, variables, _one(rng, kinds))
        if words:
            return words


def _try(
    rng: random.Random, values: Values, variables: Sequence[str], kind: str
) -> list[str] | None:
    """Return a statement of a kind and execute it; None if it cannot be."""
    among = [name for name in variables if (name in values) == (kind != "=")]
    if not among:
        return None
    name = _one(rng, among)
    if kind == "=":
        values[name] = _value(rng)
        return [name, "=", str(values[name]), ";"]
    if kind == "print":
        return ["print", name, ";"]
    if kind == "if":
        return _conditional(rng, values, variables, name)
    changed = values[name] + (1 if kind == "++" else -1)
    if not LOWEST <= changed <= HIGHEST:
        return None
    values[name] = changed
    return [name, kind, ";"]


def _conditional(
    rng: random.Random, values: Values, variables: Sequence[str], name: str
) -> list[str] | None:
    """Return "if NAME < > VALUE or OTHER : STATEMENT", and execute it.

    What is nested must be possible whether or not it is executed.
    """
    if rng.random() < 0.5:
        others = [other for other in values if other != name]
        if not others:
            return None
        right = _one(rng, others)
        bound = values[right]
    else:
        bound = _value(rng)
        right = str(bound)
    sign = _one(rng, "<>")
    true = values[name] < bound if sign == "<" else values[name] > bound
    nested = draw(rng, values if true else dict(values), variables, _NESTED)
    return ["if", name, sign, right, ":", *nested]


def _value(rng: random.Random) -> int:
    return LOWEST + int(rng.random() * (HIGHEST - LOWEST + 1))


def _one(rng: random.Random, among: Sequence[str]) -> str:
    return among[int(rng.random() * len(among))]
