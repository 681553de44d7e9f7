"""Measures of the entropy of attention weights, and of their distance from a teacher's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from famjax.config.schema import Config
from famjax.eval.attention import analyze
from famjax.reproduce.experiment import Measure, Measured, Score
from famjax.reproduce.measures import CodeTexts
from famjax.reproduce.paper_measures import WIKITEXT_VALIDATION, check_texts
from famjax.train.run import Run, open_run

_DISTANCE, _ENTROPY = "distance", "entropy"


@dataclass(frozen=True)
class AttentionMeasure(CodeTexts):
    """Attention of the last token in windows of held-out modules (T2R 4, A.2).

    The teacher of a run is the run that it continues. If a variant continues none, the distance
    cannot be measured, and `has_teacher` must be False for all variants.

    Attributes:
      length: tokens per window.
      examples: number of windows.
      has_teacher: whether the distance from the teacher is the first score.
    """

    vocabulary: int = 0
    length: int = 256
    examples: int = 32
    has_teacher: bool = True

    @property
    def scores(self) -> tuple[Score, ...]:
        return _scores(self.has_teacher)

    def measure(self, run: Run, folder: Path, quiet: bool) -> Measured:
        files = self.held_out(folder, whole=False)
        return _measure(run, files, self.length, self.examples, self.has_teacher, quiet)


@dataclass(frozen=True)
class TextAttentionMeasure(Measure):
    """Attention of the last token in windows of the texts that the user gives (T2R 4, A.2).

    Attributes:
      length: tokens per window.
      examples: maximum number of windows; WikiText-103's validation texts have fewer.
      has_teacher: see `AttentionMeasure`.
      files: the user's files, in the form of `data.files`.
    """

    length: int = 512
    examples: int = 512
    has_teacher: bool = True
    files: str = ""

    @property
    def scores(self) -> tuple[Score, ...]:
        return _scores(self.has_teacher)

    @property
    def test_files(self) -> str:
        return WIKITEXT_VALIDATION

    def on(self, files: str) -> Measure:
        return replace(self, files=files)

    def check(self, config: Config) -> None:
        """Raise a `UserError` if there are no texts to train on or to read."""
        check_texts(self.files, self.test_files, config)

    def measure(self, run: Run, folder: Path, quiet: bool) -> Measured:
        return _measure(run, self.files, self.length, self.examples, self.has_teacher, quiet)


def _scores(has_teacher: bool) -> tuple[Score, ...]:
    distance = Score(_DISTANCE, higher_is_better=False, unit="", digits=4)
    entropy = Score(_ENTROPY, higher_is_better=False, unit="", digits=3)
    return (distance, entropy) if has_teacher else (entropy,)


def _measure(
    run: Run, files: str, length: int, examples: int, has_teacher: bool, quiet: bool
) -> Measured:
    teacher = open_run(Path(run.config.init)) if has_teacher else None
    found = analyze(run, teacher, files, length, examples, quiet)
    names = [score.name for score in _scores(has_teacher)]
    return Measured(_last(found, names), {"equal weights": _last(found["uniform"], names)})


def _last(found: Mapping[str, Any], names: list[str]) -> dict[str, float]:
    return {name: found[name]["last"] for name in names}
