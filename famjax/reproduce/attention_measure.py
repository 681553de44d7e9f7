"""Measure of the entropy of attention weights, and of their distance from a teacher's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from famjax.eval.attention import analyze
from famjax.reproduce.experiment import Measured, Score
from famjax.reproduce.measures import CodeTexts
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
        distance = Score(_DISTANCE, higher_is_better=False, unit="", digits=4)
        entropy = Score(_ENTROPY, higher_is_better=False, unit="", digits=3)
        return (distance, entropy) if self.has_teacher else (entropy,)

    def measure(self, run: Run, folder: Path, quiet: bool) -> Measured:
        teacher = open_run(Path(run.config.init)) if self.has_teacher else None
        files = self.held_out(folder, whole=False)
        found = analyze(run, teacher, files, self.length, self.examples, quiet)
        return Measured(self._last(found), {"equal weights": self._last(found["uniform"])})

    def _last(self, found: Mapping[str, Any]) -> dict[str, float]:
        return {score.name: found[score.name]["last"] for score in self.scores}
