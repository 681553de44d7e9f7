"""What an experiment is: the models of a table or a figure, how they are measured, what it claims.

A new experiment is a file in this package with an `Experiment`, and a line in
`famjax.reproduce.EXPERIMENTS`.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from famjax.config.schema import Config
from famjax.experiment.load import load_config
from famjax.train.run import Run

Size = Literal["here", "paper"]
SIZES: tuple[Size, ...] = ("here", "paper")


class Score(NamedTuple):
    """A number by which a run is judged.

    Attributes:
      name: in tables and results.
      higher_is_better: else lower.
      unit: "%" of a share, "" of others.
      digits: after the point, of others.
    """

    name: str
    higher_is_better: bool = True
    unit: Literal["%", ""] = "%"
    digits: int = 3

    def format(self, value: float) -> str:
        return f"{100 * value:.1f}%" if self.unit else f"{value:.{self.digits}f}"


# of training: of a variant alone, and with what it continues
OWN_SECONDS, ALL_SECONDS = "seconds", "seconds in all"
SECONDS = tuple(
    Score(name, higher_is_better=False, unit="", digits=0) for name in (OWN_SECONDS, ALL_SECONDS)
)


class Measured(NamedTuple):
    """What was measured of a run.

    Attributes:
      scores: by name.
      baselines: of what predicts without a model, by its name, the same scores.
    """

    scores: Mapping[str, float]
    baselines: Mapping[str, Mapping[str, float]]


class Measure(abc.ABC):
    """The data of an experiment, and how its runs are scored."""

    @property
    @abc.abstractmethod
    def scores(self) -> tuple[Score, ...]:
        """What is measured, the most important first."""

    @property
    def points(self) -> Mapping[str, float]:
        """Scores that are a line in the figure, and the x of each; none where variants are."""
        return {}

    def prepare(self, folder: Path) -> tuple[str, ...]:
        """Make the data, once, in a folder that experiments share; return overrides with it."""
        return ()

    def check(self, config: Config) -> None:
        """Raise a `UserError` for what a run of this config could not be measured with."""
        return

    @abc.abstractmethod
    def measure(self, run: Run, folder: Path, quiet: bool) -> Measured:
        """Evaluate a run; `folder` is that of `prepare`."""


@dataclass(frozen=True)
class Variant:
    """A model of an experiment: a row of a table, or a point of a figure.

    Attributes:
      name: as the paper has it.
      overrides: of the experiment's config.
      paper: the paper's figures, by score; shares are from 0 to 1.
      x: its place in the figure.
      line: of the figure, that it is on.
      continues: the experiment's base; else it is trained from scratch.
      at_paper: overrides in place of `overrides` at the paper's size; None is the same.
      here_only: is not in the paper, and has no training at its size.
    """

    name: str
    overrides: tuple[str, ...] = ()
    paper: Mapping[str, float] = field(default_factory=dict)
    x: float | None = None
    line: str = ""
    continues: bool = True
    at_paper: tuple[str, ...] | None = None
    here_only: bool = False


@dataclass(frozen=True)
class Ordering:
    """What the paper claims: one model is better than another, or as good.

    Attributes:
      better, worse: names of variants.
      score: by which; "" is the first one of the measure.
      margin: differences below it are none, and the claim is that there is none; 0 claims one.
      may_be_better: with a margin, the claim is that the first one is not worse.
      wider_than: two other variants, of which the first is better, too, but by less; () claims
        nothing of others.
    """

    better: str
    worse: str
    score: str = ""
    margin: float = 0.0
    may_be_better: bool = False
    wider_than: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper.

    Attributes:
      id: `famjax reproduce ID`.
      title: what it compares.
      source: paper, and table or figure.
      config: name of the config, in `configs/`.
      variants: the models.
      measure: data and scores.
      orderings: what the paper claims.
      overrides: of the config, for all variants.
      base: overrides of a training that all variants of a seed continue, in place of theirs; None
        is from scratch.
      base_config: name of the base's config; "" is `config`.
      paper_config: name of the config at the paper's size; "" is none.
      paper_base_config: name of the base's; "" trains all variants from scratch.
      base_at_paper: overrides of the base at the paper's size.
      averaged: what is measured is the mean of so many of the last checkpoints, or of all that a
        run keeps; 0 measures the last one.
      timed: seconds of training are scores, too: a variant's own, and with those of what it
        continues.
      unequal: why its variants are not trained on equally many tokens; "" is that they are.
      axis: label of x, which is the variants', or the points' of the measure; "" draws bars.
      note: what differs from the paper.
      second_look: what was tried where a claim does not hold, and what came of it.
      minutes: that a variant with one seed takes on one core, roughly.
    """

    id: str
    title: str
    source: str
    config: str
    variants: tuple[Variant, ...]
    measure: Measure
    orderings: tuple[Ordering, ...] = ()
    overrides: tuple[str, ...] = ()
    base: tuple[str, ...] | None = None
    base_config: str = ""
    paper_config: str = ""
    paper_base_config: str = ""
    base_at_paper: tuple[str, ...] = ()
    averaged: int = 0
    timed: bool = False
    unequal: str = ""
    axis: str = ""
    note: str = ""
    second_look: str = ""
    minutes: float = 2.0

    @property
    def scores(self) -> tuple[Score, ...]:
        """What is measured, the most important first, and the seconds if they count."""
        return (*self.measure.scores, *(SECONDS if self.timed else ()))

    def variants_at(self, size: Size) -> tuple[Variant, ...]:
        """Return the variants that are trained at a size."""
        return tuple(v for v in self.variants if size == "here" or not v.here_only)

    def variant(self, name: str) -> Variant:
        return next(variant for variant in self.variants if variant.name == name)

    def score(self, name: str) -> Score:
        return next((score for score in self.scores if score.name == name), self.scores[0])

    def make_config(
        self, variant: Variant, seed: int, size: Size, given: tuple[str, ...] = ()
    ) -> Config:
        """Return the training config of a variant.

        Args:
          variant: of this experiment.
          seed: of the training.
          size: whose.
          given: overrides of the data, and the user's.
        """
        # from scratch the model's shape is the base's
        name = self._config_name(size) if variant.continues else self.base_config_name(size)
        if size == "paper":
            own = variant.overrides if variant.at_paper is None else variant.at_paper
            return load_config(name, [f"seed={seed}", *own, *given])
        own = () if variant.continues or self.base is None else self.base
        overrides = [f"seed={seed}", *self.overrides, *own, *variant.overrides, *given]
        return load_config(name, overrides)

    def make_base_config(
        self, seed: int, size: Size = "here", given: tuple[str, ...] = ()
    ) -> Config:
        """Return the config of the training that all variants of a seed continue."""
        assert self.base is not None
        own = (*self.overrides, *self.base) if size == "here" else self.base_at_paper
        return load_config(self.base_config_name(size), [f"seed={seed}", *own, *given])

    def has_base(self, size: Size) -> bool:
        return self.base is not None and (size == "here" or bool(self.paper_base_config))

    def base_config_name(self, size: Size) -> str:
        name = self.base_config if size == "here" else self.paper_base_config
        return name or self._config_name(size)

    def _config_name(self, size: Size) -> str:
        return self.config if size == "here" else self.paper_config
