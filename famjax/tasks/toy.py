"""The toy tasks as sources of documents, and their trivial baselines.

An episode is determined by (seed, split, number), and generated when it is read. Training has a
fixed number of episodes; test episodes are those of another split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from famjax.config.schema import Config, DataConfig, ToyConfig
from famjax.core.errors import UserError
from famjax.data.shuffle import permuted_index
from famjax.data.sources import Key, Piece, Source, Split
from famjax.mixers import is_bounded
from famjax.tasks.programs import Algorithmic
from famjax.tasks.sequences import Copy, Counting, Reverse
from famjax.tasks.task import Task
from famjax.tasks.walks import BlockedWalk, RandomWalk
from famjax.tokenizers.load import load_tokenizer
from famjax.tokenizers.tokenizer import Tokenizer
from famjax.tokenizers.words import BEGIN, WordTokenizer

# maximum numbers of episodes and of steps that one call generates; number of episodes on which
# baselines are computed
_EPISODES_PER_CALL = 32
_STEPS_PER_CALL = 100_000
_BASELINE_EPISODES = 1000


class ToyTask(Protocol):
    """A toy task.

    Attributes:
      keys: config keys that have an effect only with this task.
      words: words of the vocabulary, which follow the special tokens.
      answers: token ids that can be an answer.
      answers_are_targets: whether answers are only targets (`Piece.targets`), which the model never
        reads; if not, they are the next tokens.
      steps: values of `ToyConfig.steps` and `ToyConfig.test_steps` where these are 0.
    """

    keys: tuple[str, ...]
    words: tuple[str, ...]
    answers: range
    answers_are_targets: bool
    steps: tuple[int, int]

    def __init__(self, config: ToyConfig): ...

    def episodes(self, rngs: Sequence[np.random.Generator], steps: int) -> list[Piece]:
        """Return an episode for each generator; it begins with `BEGIN`."""

    def last_answers(self, piece: Piece) -> np.ndarray | None:
        """Return guesses that repeat the last answer to the same question, [answers].

        None if this is not possible in the task.
        """


TOYS: dict[str, type[ToyTask]] = {
    "random_walk": RandomWalk,
    "blocked_walk": BlockedWalk,
    "copy": Copy,
    "reverse": Reverse,
    "counting": Counting,
    "algorithmic": Algorithmic,
}


def task_tokenizer(task: str, config: ToyConfig) -> WordTokenizer:
    """Return the tokenizer of a task's words."""
    return WordTokenizer("task", TOYS[task](config).words)


def resolve_toy(task: str, config: ToyConfig) -> ToyConfig:
    """Return the config with defaults for the steps that are 0; idempotent."""
    train, test = TOYS[task].steps
    steps = config.steps or train
    default = test if test != train else steps
    return replace(config, steps=steps, test_steps=config.test_steps or default)


def eval_steps(task: str, config: ToyConfig) -> int:
    """Return the default number of steps of a task's test episodes."""
    return resolve_toy(task, config).test_steps


class ToySource(Source):
    """An infinite source of a toy task's episodes, reshuffled in each epoch.

    Lane i reads the episodes at positions i, i + lanes, and so on of the epoch's permutation. With
    fewer episodes than lanes, each lane reads all of them, in its own order.

    Args:
      task: name of the task.
      config: config of the task; `steps` is the length in either split.
      tokenizer: tokenizer, which must have the task's words.
      seed: seed of the episodes and of their order.
      split: "train", or "holdout" for test episodes.
    """

    def __init__(
        self, task: str, config: ToyConfig, tokenizer: Tokenizer, seed: int, split: Split = "train"
    ):
        self.task = TOYS[task](config)
        self.name, self._config, self._seed, self._split = task, config, seed, split
        self._steps = resolve_toy(task, config).steps
        # current number of steps of training episodes in the curriculum; None without a curriculum
        self._longest = config.start_steps if split == "train" and config.start_steps else None
        if (
            not isinstance(tokenizer, WordTokenizer)
            or tokenizer.words != task_tokenizer(task, config).words
        ):
            raise UserError(
                f"{task}: tokenizer {tokenizer.name} has other words than the task; "
                "take a run with data.tokenizer=task and the same data.task and data.toy"
            )

    def document_count(self) -> int:
        return len(self)

    def __len__(self) -> int:
        return self._config.episodes

    def report(self) -> str:
        """Return a line for the user."""
        documents = "concatenated" if self._config.concatenate else "one per document"
        steps = f"{self._steps:,} steps"
        if self._longest is not None:
            steps = f"{self._longest:,} steps, growing to {self._steps:,}"
        return f"{self.name}: {len(self):,} episodes of {steps}, {documents}"

    def key(self, lane: int, lanes: int, k: int, before: Key | None = None) -> Key:
        """Return [epoch, seed of the order, first position, stride, number of episodes, steps].

        The number of steps is there only with a curriculum.
        """
        order, first, distance = (0, lane, lanes) if len(self) >= lanes else (1 + lane, 0, 1)
        count = len(range(first, len(self), distance))
        if self._config.concatenate:
            return [k, order, first, distance, count]
        epoch, number = divmod(k, count)
        steps = [] if self._longest is None else [self._longest]
        return [epoch, order, first + number * distance, distance, 1, *steps]

    def epoch_size(self, lane: int, lanes: int) -> int:
        """Return the number of documents of a lane in one epoch."""
        if self._config.concatenate:
            return 1
        return len(range(lane, len(self), lanes)) if len(self) >= lanes else len(self)

    def open(self, key: Key, piece: int = 0) -> Iterator[Piece]:
        epoch, order, first, distance, count, *steps = key
        (episode_steps,) = steps or [self._steps]
        seed = int(np.random.SeedSequence((self._seed, epoch, order)).generate_state(1)[0])
        positions = range(first, first + count * distance, distance)
        # long episodes are generated one at a time
        size = max(min(_EPISODES_PER_CALL, _STEPS_PER_CALL // episode_steps), 1)
        for done in range(piece, count, size):
            chunk = positions[done : done + size]
            numbers = [permuted_index(position, len(self), seed) for position in chunk]
            rngs = [self._rng(number) for number in numbers]
            yield from self.task.episodes(rngs, episode_steps)
        if piece <= count:
            yield _end_piece(self.task.answers_are_targets)

    def _rng(self, number: int) -> np.random.Generator:
        return np.random.default_rng([self._seed, int(self._split == "holdout"), number])

    def episodes(self) -> Iterator[Piece]:
        """Yield all episodes once, in the order of their numbers."""
        for done in range(0, len(self), _EPISODES_PER_CALL):
            numbers = range(done, min(done + _EPISODES_PER_CALL, len(self)))
            yield from self.task.episodes([self._rng(number) for number in numbers], self._steps)

    def get_state(self) -> dict[str, Any]:
        return {} if self._longest is None else {"longest": self._longest}

    def set_state(self, state: dict[str, Any]) -> None:
        if self._longest is not None:
            self._longest = state["longest"]

    def advance(self, state: dict[str, Any], accuracy: float) -> dict[str, Any]:
        """Return the new state after a logging interval with this accuracy of answers."""
        if self._longest is None or accuracy < self._config.threshold:
            return state
        return {"longest": min(2 * state["longest"], self._steps)}


def _end_piece(has_targets: bool) -> Piece:
    """Return the last token of a document, at which nothing is predicted."""
    token = np.array([BEGIN], np.int32)
    return Piece(token, np.zeros(1, np.float32), targets=token if has_targets else None)


def baselines(task: str, config: ToyConfig, test_steps: int, seed: int) -> dict[str, Any]:
    """Return the accuracy of trivial guesses, on at most 1,000 test episodes.

    Args:
      task: name of the task.
      config: config of training.
      test_steps: number of steps of a test episode.
      seed: seed of the run.

    Returns:
      chance, the accuracy of uniform guesses among all answers; commonest, the word that is the
      most common answer in training; commonest_accuracy, the accuracy of always answering this
      word; last_accuracy, the accuracy of repeating the last answer to the same question, None if
      this is not possible in the task; and chance_episodes, commonest_episodes and last_episodes,
      the share of episodes in which all of these guesses are right, of those with an answer.
    """
    few = replace(config, episodes=min(config.episodes, _BASELINE_EPISODES))
    words = task_tokenizer(task, config)
    train = ToySource(task, few, words, seed)
    count = np.zeros(words.vocab_size, int)
    for episode in train.episodes():
        count += np.bincount(episode_answers(episode), minlength=len(count))
    best = int(count.argmax())
    test = ToySource(
        task, replace(config, steps=test_steps, episodes=_BASELINE_EPISODES), words, seed, "holdout"
    )
    # short programs may print nothing
    episodes = [episode for episode in test.episodes() if episode.weights.any()]
    answers = [episode_answers(episode) for episode in episodes]
    chance = 1 / len(test.task.answers)
    commonest = [correct == best for correct in answers]
    last = [test.task.last_answers(episode) for episode in episodes]
    repeated = [
        guess == correct for guess, correct in zip(last, answers, strict=True) if guess is not None
    ]
    return {
        "chance": chance,
        "chance_episodes": float(np.mean([chance ** len(correct) for correct in answers])),
        "commonest": words.words[best],
        "commonest_accuracy": float(np.concatenate(commonest).mean()),
        "commonest_episodes": float(np.mean([right.all() for right in commonest])),
        "last_accuracy": float(np.concatenate(repeated).mean()) if repeated else None,
        "last_episodes": float(np.mean([r.all() for r in repeated])) if repeated else None,
    }


def episode_answers(episode: Piece) -> np.ndarray:
    """Return an episode's answers [n]."""
    targets = episode.tokens if episode.targets is None else episode.targets
    return targets[episode.weights > 0]


class ToyTaskSpec(Task):
    """One of the toy tasks."""

    has_own_words = True
    group = "toy"
    eval_lengths = ()  # data.toy.test_steps
    evaluation = "famjax.eval.toy:evaluate"
    headline = "accuracy"

    def __init__(self, toy: type[ToyTask]):
        self.toy = toy
        self.keys = ("data.toy.*", *toy.keys)

    def check(self, config: Config) -> Iterator[str]:
        d, m = config.data, config.model
        if d.toy.size > 64:
            yield f"data.toy.size={d.toy.size}: every cell is a word; take at most 64"
        if d.toy.variables > 5:
            yield f"data.toy.variables={d.toy.variables}: there are 5 names; take at most 5"
        steps = resolve_toy(d.task, d.toy).steps
        if d.toy.start_steps > steps:
            yield (
                f"data.toy.start_steps={d.toy.start_steps} is more than data.toy.steps={steps}, to "
                f"which episodes grow; take less, or data.toy.steps={d.toy.start_steps}"
            )
        if d.toy.start_steps and d.toy.concatenate:
            yield (
                f"data.toy.start_steps={d.toy.start_steps}: concatenated episodes cannot grow; set "
                "data.toy.concatenate=false, or 0"
            )
        if d.tokenizer == "bytes":
            own = "set data.tokenizer=task"
            yield f"data.tokenizer=bytes: data.task={d.task} has its own words; {own}"
        if d.repeat_len:
            yield f"data.repeat_len={d.repeat_len} repeats text, data.task={d.task} is none; set 0"
        if is_bounded(m) and d.toy.concatenate and d.layout == "lanes":
            yield (
                "data.toy.concatenate=true: the model holds "
                f"model.capacity={m.capacity} tokens and cannot continue through all episodes; "
                "set data.toy.concatenate=false"
            )

    def make_tokenizer(self, data: DataConfig) -> Tokenizer:
        if data.tokenizer != "task":
            return load_tokenizer(data.tokenizer)
        return task_tokenizer(data.task, data.toy)

    def resolve(self, data: DataConfig) -> DataConfig:
        return replace(data, toy=resolve_toy(data.task, data.toy))

    def make_source(
        self, config: Config, tokenizer: Tokenizer, split: Split, checked: Path | None
    ) -> ToySource:
        return ToySource(config.data.task, config.data.toy, tokenizer, config.seed, split)

    def eval_options(self, config: Config, source: Any, capacity: int | None) -> str | None:
        if capacity is None:
            return ""
        # test episodes may be too long for the cache, so the training length is used; concatenated
        # episodes cannot be evaluated, since all episodes of a lane are one document
        toy = config.data.toy
        steps = resolve_toy(config.data.task, toy).steps
        return None if toy.concatenate else f" --lengths {steps}"
