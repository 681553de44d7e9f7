"""Measure of summaries of test files: their ROUGE, and the speed of decoding."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from famjax.config.schema import Config
from famjax.data.docstrings import FUNCTIONS, SUMMARIES, write_docstrings
from famjax.data.pairs import Pairs
from famjax.eval import translate
from famjax.eval.answer_scores import check_metrics, score_answer
from famjax.reproduce import pair_files
from famjax.reproduce.experiment import Measure, Measured, Score
from famjax.tasks.task import Request
from famjax.train.run import Run

# the names that papers use, and the metrics: their ROUGE-L is that of sentences
_ROUGE = {"ROUGE-L": "rouge_lsum", "ROUGE-1": "rouge_1", "ROUGE-2": "rouge_2"}
_SPEED, _GREEDY_SPEED = "tokens/s", "greedy tokens/s"


@dataclass(frozen=True)
class PairSummaryMeasure(Measure):
    """ROUGE of a test set by beam search, and tokens of the outputs per second, greedily as well.

    The pairs are functions of Python's standard library and the beginnings of their docstrings. If
    a run is trained on other files, its test files are beside them, with "test" in place of "train"
    in the name of each file.

    Attributes:
      words: maximum number of words of a function, the rest is cut; 0 makes no pairs, and models
        are trained on other files.
      summary_words: maximum number of words of a summary.
      vocabulary: number of tokens of the joint SentencePiece model.
      beam, no_repeat_ngram: see `famjax.eval.beam`.
      length_penalty: see `famjax.eval.beam`; None is that with the best ROUGE-Lsum on the
        development files, which are beside the test files (`famjax.reproduce.pair_files`).
    """

    words: int
    summary_words: int = 60
    vocabulary: int = 4000
    beam: int = 5
    length_penalty: float | None = None
    no_repeat_ngram: int = 3

    @property
    def scores(self) -> tuple[Score, ...]:
        speeds = (Score(name, unit="", digits=0) for name in (_SPEED, _GREEDY_SPEED))
        return (*map(Score, _ROUGE), *speeds, *pair_files.penalty_scores(self.length_penalty))

    def prepare(self, folder: Path) -> tuple[str, ...]:
        check_metrics(tuple(_ROUGE.values()))
        if not self.words:
            return ()
        python = "python{}.{}".format(*sys.version_info[:2])
        pairs = folder / f"functions-{python}-{self.words}-{self.summary_words}"
        write_docstrings(pairs, self.words, self.summary_words)
        source, target = (pairs / f"train.{name}" for name in (FUNCTIONS, SUMMARIES))
        return pair_files.prepare_pairs(source, target, self.vocabulary)

    def check(self, config: Config) -> None:
        pair_files.check_test_files(config)
        if self.length_penalty is None:
            pair_files.check_development_files(config)

    def measure(self, run: Run, folder: Path, quiet: bool) -> Measured:
        files = pair_files.find_test_files(run.config.data)
        request = Request(
            "summarize",
            "=".join(files),
            batch=32,
            quiet=quiet,
            no_repeat_ngram=self.no_repeat_ngram,
        )
        search = request._replace(beam=self.beam)
        search, penalty = pair_files.with_length_penalty(run, search, self.length_penalty)
        found: Mapping[str, Any] = translate.evaluate(run, search)
        greedy: Mapping[str, Any] = translate.evaluate(run, request)
        scores = {name: found[metric] for name, metric in _ROUGE.items()}
        scores |= {_SPEED: found["tokens_per_second"]}
        scores |= {_GREEDY_SPEED: greedy["tokens_per_second"], **penalty}
        return Measured(scores, {"the first words": _first_words(Pairs(*files))})


def _first_words(pairs: Pairs) -> dict[str, float]:
    """Return the scores of the sources' first words, as many as a summary has on average."""
    sources, targets = zip(*(pairs[i] for i in range(len(pairs))), strict=True)
    count = round(sum(len(target.split()) for target in targets) / len(targets))
    outputs = [" ".join(source.split()[:count]) for source in sources]

    def score(metric: str) -> float:
        both = zip(outputs, targets, strict=True)
        return sum(score_answer(metric, output, [target]) for output, target in both) / len(targets)

    return {name: score(metric) for name, metric in _ROUGE.items()}
