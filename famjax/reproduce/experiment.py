"""The description of experiments: models of a table or figure, their measure, the paper's claims.

A new experiment is a file in `famjax.reproduce.experiments`.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.experiment.load import load_config
from famjax.train.run import Run

Size = Literal["here", "paper"]
SIZES: tuple[Size, ...] = ("here", "paper")


class Score(NamedTuple):
    """A number by which a run is judged.

    Attributes:
      name: name in tables and results.
      higher_is_better: whether a higher score is better; if not, a lower one is.
      unit: "%" for shares, "" for other scores.
      digits: for scores other than shares, digits after the decimal point.
    """

    name: str
    higher_is_better: bool = True
    unit: Literal["%", ""] = "%"
    digits: int = 3

    def format(self, value: float) -> str:
        return f"{100 * value:.1f}%" if self.unit else f"{value:.{self.digits}f}"


# numbers of the papers that are no shares and not measured here under this name
_NO_SHARES = ("perplexity", "bits per character", "tokenized BLEU", "days", "GPU hours")


# scores for the seconds of training: of a variant alone, and with those of the base it continues
OWN_SECONDS, ALL_SECONDS = "seconds", "seconds in all"
SECONDS = tuple(
    Score(name, higher_is_better=False, unit="", digits=0) for name in (OWN_SECONDS, ALL_SECONDS)
)


class Measured(NamedTuple):
    """The result of a measurement.

    Attributes:
      scores: the run's scores, by name.
      baselines: the same scores for trivial baselines, by name of the baseline.
    """

    scores: Mapping[str, float]
    baselines: Mapping[str, Mapping[str, float]]


class Measure(abc.ABC):
    """The data of an experiment, and how its runs are scored."""

    @property
    @abc.abstractmethod
    def scores(self) -> tuple[Score, ...]:
        """The scores that are measured, the most important one first."""

    @property
    def points(self) -> Mapping[str, float]:
        """The x of each score by name, if a variant's scores are the points of a figure's line.

        Empty if the variants are the points.
        """
        return {}

    def prepare(self, folder: Path) -> tuple[str, ...]:
        """Make the data, unless it is there; return the overrides with which configs use it.

        Args:
          folder: folder of the data, which experiments share.
        """
        return ()

    @property
    def test_files(self) -> str:
        """What test files the user has to give, for errors; "" if the measure takes none."""
        return ""

    def on(self, files: str) -> Measure:
        """Return the measure with the user's test files; itself if it takes none."""
        return self

    def check(self, config: Config) -> None:
        """Raise a `UserError` if a run with this config could not be measured."""
        return

    @abc.abstractmethod
    def measure(self, run: Run, folder: Path, quiet: bool) -> Measured:
        """Evaluate a run; `folder` is the one given to `prepare`."""


@dataclass(frozen=True)
class Variant:
    """A model of an experiment: a row of a table, or a point of a figure.

    Attributes:
      name: name of the variant, as in the paper.
      overrides: overrides of the experiment's config.
      paper: the paper's numbers, by score; shares are from 0 to 1.
      x: x of the variant in the figure.
      line: line of the figure that the variant is on.
      continues: name of the variant whose training it continues; "" is the experiment's base, if
        there is one. None trains it from scratch. Costs at the paper's size are of the base alone.
      at_paper: overrides that replace `overrides` at the paper's size; None is the same ones.
      here_only: whether the variant is not in the paper, and thus is not trained at its size.
    """

    name: str
    overrides: tuple[str, ...] = ()
    paper: Mapping[str, float] = field(default_factory=dict)
    x: float | None = None
    line: str = ""
    continues: str | None = ""
    at_paper: tuple[str, ...] | None = None
    here_only: bool = False


@dataclass(frozen=True)
class Ordering:
    """A claim: that one model is better than another, or as good.

    Attributes:
      better, worse: names of the two variants.
      score: name of the score that decides; "" is the first one of the measure.
      margin: 0 claims that the first variant is better. Otherwise the claim is that both are
        equally good: differences below the margin do not count.
      may_be_better: with a margin, weaken the claim to: the first variant is not worse.
      wider_than: names of two other variants; the claim is then that `better` is better than
        `worse` by more than the first of these is better than the second. () compares with no
        others.
      ours: whether the comparison is famjax's, not the paper's.
    """

    better: str
    worse: str
    score: str = ""
    margin: float = 0.0
    may_be_better: bool = False
    wider_than: tuple[str, ...] = ()
    ours: bool = False


@dataclass(frozen=True)
class PaperSize:
    """How an experiment is run at the paper's size.

    Attributes:
      config: name of the config.
      measure: data and scores.
      variants: the models, if a figure has other points than here; None is the same ones, without
        those that are here only.
      orderings: the claims, with scores of `measure`; None is the same ones, without those of
        variants that are not in the paper.
      base_config: name of the base's config; "" trains all variants from scratch.
      base: overrides for the base.
      drawn: names of the scores in the figure; () is the same ones as here.
      note: differences from the paper, apart from those of the config.
    """

    config: str
    measure: Measure
    variants: tuple[Variant, ...] | None = None
    orderings: tuple[Ordering, ...] | None = None
    base_config: str = ""
    base: tuple[str, ...] = ()
    drawn: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Experiment:
    """A table or figure of a paper.

    Attributes:
      id: name in `famjax reproduce ID`.
      title: short description of the comparison.
      source: the paper, and its table or figure.
      config: name of the config, in `configs/`.
      variants: the models that are compared.
      measure: data and scores.
      orderings: the paper's claims, and comparisons of ours.
      overrides: overrides of the config, for all variants.
      base: overrides for a training that all variants of a seed continue, used in place of the
        variants' own; None trains variants from scratch.
      base_config: name of the base's config; "" is `config`.
      at_paper: how it is run at the paper's size; None is not at all.
      averaged: number of last checkpoints whose average is measured, or all if a run keeps fewer; 0
        measures the last checkpoint.
      timed: whether the seconds of training are scores, too: a variant's own, and those including
        the base that it continues.
      unequal: the reason if its variants are not trained on the same number of tokens; "" if they
        are.
      unequal_parameters: how their numbers of parameters differ, if by more than 2%.
      axis: label of the figure's x axis, for the x of the variants or of the measure's points; ""
        draws a row for each variant.
      drawn: names of the scores in the figure, side by side; () is the first one.
      note: differences from the paper.
      follow_up: what was tried after a claim did not hold, and the result.
      minutes: rough time that the longest variant takes on one core, with one seed.
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
    at_paper: PaperSize | None = None
    averaged: int = 0
    timed: bool = False
    unequal: str = ""
    unequal_parameters: str = ""
    axis: str = ""
    drawn: tuple[str, ...] = ()
    note: str = ""
    follow_up: str = ""
    minutes: float = 2.0

    @property
    def scores(self) -> tuple[Score, ...]:
        """The measure's scores, the most important one first, then the seconds if `timed`."""
        return (*self.measure.scores, *(SECONDS if self.timed else ()))

    def at(self, size: Size, test: str = "") -> Experiment:
        """Return the experiment with its variants, measure and claims at a size.

        Args:
          size: size of the trainings.
          test: the user's test files, for a measure that takes some.

        Raises:
          UserError: the experiment does not have that size.
        """
        if size == "here":
            return self
        there = self._at_paper
        variants = self.variants_at(size)
        names = {variant.name for variant in variants}
        claims = self.orderings if there.orderings is None else there.orderings
        measure = there.measure.on(test)
        drawn = there.drawn or self.drawn
        if test:  # with files for some of its sets, a measure has no other scores
            scores = {"", *(score.name for score in (*measure.scores, *SECONDS))}
            claims = tuple(claim for claim in claims if claim.score in scores)
            drawn = tuple(name for name in drawn if name in scores)
        return replace(
            self,
            variants=variants,
            measure=measure,
            orderings=tuple(o for o in claims if {o.better, o.worse, *o.wider_than} <= names),
            drawn=drawn,
            # both are about the size here
            note=f"At the paper's size: config `{there.config}`. {there.note}".strip(),
            unequal_parameters="",
            follow_up="",
        )

    def variants_at(self, size: Size) -> tuple[Variant, ...]:
        """Return the variants that are trained at a size."""
        if size == "here":
            return self.variants
        if self._at_paper.variants is not None:
            return self._at_paper.variants
        return tuple(variant for variant in self.variants if not variant.here_only)

    def variant(self, name: str) -> Variant:
        return next(variant for variant in self.variants if variant.name == name)

    def score(self, name: str) -> Score:
        return next((score for score in self.scores if score.name == name), self.scores[0])

    def paper_unit(self, name: str) -> str:
        """Return the unit of a number of the paper: that of the score with its name, if any."""
        units = {score.name: score.unit for score in self.scores}
        return units.get(name, "" if name in _NO_SHARES else "%")

    def make_config(
        self, variant: Variant, seed: int, size: Size, given: tuple[str, ...] = ()
    ) -> Config:
        """Return the training config of a variant.

        Args:
          variant: a variant of this experiment.
          seed: seed of the training.
          size: size of the training: that of this repository ("here") or the paper's.
          given: overrides for the data, and the user's.
        """
        # a variant from scratch has the shape of the base's model, so it takes the base's config
        name = self.base_config_name(size) if variant.continues is None else self._config_name(size)
        if size == "paper":
            own = variant.overrides if variant.at_paper is None else variant.at_paper
            return load_config(name, [f"seed={seed}", *own, *given])
        own = (self.base or ()) if variant.continues is None else ()
        overrides = [f"seed={seed}", *self.overrides, *own, *variant.overrides, *given]
        return load_config(name, overrides)

    def make_base_config(
        self, seed: int, size: Size = "here", given: tuple[str, ...] = ()
    ) -> Config:
        """Return the config of the training that all variants of a seed continue."""
        assert self.base is not None
        own = (*self.overrides, *self.base) if size == "here" else self._at_paper.base
        return load_config(self.base_config_name(size), [f"seed={seed}", *own, *given])

    def has_base(self, size: Size) -> bool:
        return self.base is not None and (size == "here" or bool(self._at_paper.base_config))

    def base_config_name(self, size: Size) -> str:
        name = self.base_config if size == "here" else self._at_paper.base_config
        return name or self._config_name(size)

    def _config_name(self, size: Size) -> str:
        return self.config if size == "here" else self._at_paper.config

    @property
    def _at_paper(self) -> PaperSize:
        if self.at_paper is None:
            raise UserError(f"{self.id}: has no config at the paper's size; leave out --size")
        return self.at_paper
