"""The toy tasks as sources of documents, and what guessing scores in them.

An episode is named by (seed, split, number) and made when it is read. Training has a fixed number
of them; the test's come from another split and are others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol

import grain
import numpy as np

from famjax.core.config import ToyConfig
from famjax.core.errors import UserError
from famjax.data.sources import Key, Piece, Split
from famjax.data.tokenizers import Tokenizer
from famjax.data.words import BEGIN, WordTokenizer
from famjax.tasks.programs import Algorithmic
from famjax.tasks.sequences import Copy, Counting, Reverse
from famjax.tasks.walks import BlockedWalk, RandomWalk

# episodes made at once, and episodes that guesses are measured on
_TOGETHER = 32
_STEPS_TOGETHER = 100_000
_MEASURED = 1000


class Toy(Protocol):
    """A toy task.

    Attributes:
      words: of the vocabulary, behind the special ones.
      answers: ids that may be an answer.
      outputs: answers are said at a token and not read (`Piece.targets`); otherwise they are the
        tokens that follow.
      steps: what stands for 0 in `ToyConfig.steps` and `ToyConfig.test_steps`.
    """

    words: tuple[str, ...]
    answers: range
    outputs: bool
    steps: tuple[int, int]

    def __init__(self, config: ToyConfig): ...

    def episodes(self, rngs: Sequence[np.random.Generator], steps: int) -> list[Piece]:
        """Return an episode for each generator; it begins with `BEGIN`."""

    def last(self, piece: Piece) -> np.ndarray | None:
        """Return what an episode's answers would be if nothing had changed since they were given
        last, [answers]; None where that means nothing."""


TASKS: dict[str, type[Toy]] = {
    "random_walk": RandomWalk,
    "blocked_walk": BlockedWalk,
    "copy": Copy,
    "reverse": Reverse,
    "counting": Counting,
    "algorithmic": Algorithmic,
}


def task_tokenizer(task: str, config: ToyConfig) -> WordTokenizer:
    """Return the tokenizer of a task's own words."""
    return WordTokenizer("task", TASKS[task](config).words)


def eval_steps(task: str, config: ToyConfig) -> int:
    """Return the steps of a task's test episodes, if nothing else is asked for."""
    trained, tested = TASKS[task].steps
    unlike = tested if tested != trained else config.steps or trained
    return config.test_steps or unlike


class ToySource:
    """Endless documents of a toy task's episodes, shuffled anew in each epoch.

    Lane i takes the positions i, i + lanes, and so on of the permutation. With fewer episodes than
    lanes each lane takes all of them, in its own order.

    Args:
      task: name.
      config: of the task; `steps` is the length, whatever the split.
      tokenizer: must have the task's words.
      seed: of the episodes and their order.
      split: "train", or "holdout" for the test's.
    """

    def __init__(
        self, task: str, config: ToyConfig, tokenizer: Tokenizer, seed: int, split: Split = "train"
    ):
        self.task = TASKS[task](config)
        self.name, self._config, self._seed, self._split = task, config, seed, split
        self._steps = config.steps or self.task.steps[0]
        # of today's training episodes
        self._longest = config.start_steps if split == "train" and config.start_steps else None
        if (
            not isinstance(tokenizer, WordTokenizer)
            or tokenizer.words != task_tokenizer(task, config).words
        ):
            raise UserError(
                f"{task}: tokenizer {tokenizer.name} has other words than the task; "
                "take a run with data.tokenizer=task and the same data.task and data.toy"
            )

    def __len__(self) -> int:
        return self._config.episodes

    def report(self) -> str:
        """Return a line for the user."""
        together = "one behind the other" if self._config.concatenate else "a document each"
        steps = f"{self._steps:,} steps"
        if self._longest is not None:
            steps = f"{self._longest:,} steps, growing to {self._steps:,}"
        return f"{self.name}: {len(self):,} episodes of {steps}, {together}"

    def key(self, lane: int, lanes: int, k: int, before: Key | None = None) -> Key:
        """Return [epoch, seed of the order, first position, distance, number of episodes, steps].

        Steps are there with a curriculum alone.
        """
        own, first, distance = (0, lane, lanes) if len(self) >= lanes else (1 + lane, 0, 1)
        count = len(range(first, len(self), distance))
        if self._config.concatenate:
            return [k, own, first, distance, count]
        epoch, number = divmod(k, count)
        steps = [] if self._longest is None else [self._longest]
        return [epoch, own, first + number * distance, distance, 1, *steps]

    def epoch_size(self, lane: int, lanes: int) -> int:
        """Return how many documents of a lane are one epoch."""
        if self._config.concatenate:
            return 1
        return len(range(lane, len(self), lanes)) if len(self) >= lanes else len(self)

    def open(self, key: Key, piece: int = 0) -> Iterator[Piece]:
        epoch, own, first, distance, count, *steps = key
        (of,) = steps or [self._steps]
        seed = int(np.random.SeedSequence((self._seed, epoch, own)).generate_state(1)[0])
        positions = range(first, first + count * distance, distance)
        # long ones are made one at a time
        at_once = max(min(_TOGETHER, _STEPS_TOGETHER // of), 1)
        for done in range(piece, count, at_once):
            together = positions[done : done + at_once]
            rngs = [self._rng(self._shuffled(position, seed)) for position in together]
            yield from self.task.episodes(rngs, of)
        if piece <= count:
            yield _end(self.task.outputs)

    def _shuffled(self, position: int, seed: int) -> int:
        """Return the number of the episode at a position of a permutation."""
        last = len(self) - 1
        return grain.experimental.index_shuffle(position, max_index=last, seed=seed, rounds=4)

    def _rng(self, number: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, int(self._split == "holdout"), number])

    def episodes(self) -> Iterator[Piece]:
        """Yield all episodes once, in the order of their numbers."""
        for done in range(0, len(self), _TOGETHER):
            numbers = range(done, min(done + _TOGETHER, len(self)))
            yield from self.task.episodes([self._rng(number) for number in numbers], self._steps)

    def get_state(self) -> dict[str, Any]:
        return {} if self._longest is None else {"longest": self._longest}

    def set_state(self, state: dict[str, Any]) -> None:
        if self._longest is not None:
            self._longest = state["longest"]

    def advance(self, state: dict[str, Any], accuracy: float) -> dict[str, Any]:
        """Return the state after a logging interval in which answers had this accuracy."""
        if self._longest is None or accuracy < self._config.threshold:
            return state
        return {"longest": min(2 * state["longest"], self._steps)}


def _end(outputs: bool) -> Piece:
    """Return the token behind a document, at which nothing is predicted."""
    token = np.array([BEGIN], np.int32)
    return Piece(token, np.zeros(1, np.float32), targets=token if outputs else None)


# ---------------------------------------------------------------------------------------------
# Guessing


def baselines(task: str, config: ToyConfig, test_steps: int, seed: int) -> dict[str, Any]:
    """Return the accuracy of answers that take no thought, on at most 1,000 test episodes.

    Args:
      task: name.
      config: of training.
      test_steps: of a test episode.
      seed: of the run.

    Returns:
      chance: of guessing among all answers; commonest: the word that is the commonest answer in
      training; commonest_accuracy: of always saying it; last_accuracy: of saying each time what was
      right when the same was asked for last, None where that means nothing.
    """
    few = replace(config, episodes=min(config.episodes, _MEASURED))
    words = task_tokenizer(task, config)
    train = ToySource(task, few, words, seed)
    count = np.zeros(words.vocab_size, int)
    for episode in train.episodes():
        count += np.bincount(answers(episode), minlength=len(count))
    best = int(count.argmax())
    test = ToySource(
        task, replace(config, steps=test_steps, episodes=_MEASURED), words, seed, "holdout"
    )
    found = list(islice(test.episodes(), _MEASURED))
    right = np.concatenate([answers(episode) for episode in found])
    last = [test.task.last(episode) for episode in found]
    given = [guess for guess in last if guess is not None]
    return {
        "chance": 1 / len(test.task.answers),
        "commonest": words.words[best],
        "commonest_accuracy": float((right == best).mean()),
        "last_accuracy": float((np.concatenate(given) == right).mean()) if given else None,
    }


def answers(episode: Piece) -> np.ndarray:
    """Return an episode's answers [n]."""
    said = episode.tokens if episode.targets is None else episode.targets
    return said[episode.weights > 0]
