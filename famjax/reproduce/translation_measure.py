"""Measure of translations of test files: their BLEU, and the speed of decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from famjax.config.schema import Config
from famjax.data.pairs import Pairs
from famjax.eval import translate, translation_scores
from famjax.reproduce import pair_files
from famjax.reproduce.experiment import Measure, Measured, Score
from famjax.tasks.task import Request
from famjax.train.run import Run

_BLEU, _TOKENIZED, _SPEED = "BLEU", "tokenized BLEU", "tokens/s"
_GREEDY_BLEU, _GREEDY_SPEED = "greedy BLEU", "greedy tokens/s"


@dataclass(frozen=True)
class TranslationMeasure(Measure):
    """BLEU of a test set and tokens of the outputs per second, by beam search and greedily.

    The pairs are in a folder of the data folder: `train.de`, `train.en`, `test.de` and `test.en`
    (for German-English), or all with .gz, a sentence on each line. If a run is trained on other
    files, its test files are beside them, with "test" in place of "train" in the name of each file.

    Attributes:
      folder: name of the folder with the pairs; "" is none, and models are trained on other files.
      languages: ends of the names of the sources' and the targets' files in this folder.
      vocabulary: number of tokens of the joint SentencePiece model.
      beam: see `famjax.eval.beam`.
      length_penalty: see `famjax.eval.beam`; None is that with the best sacrebleu on the
        development files, which are beside the test files (`famjax.reproduce.pair_files`).
      tokenized: whether the files are already tokenized, for example by Moses.
      compounds: whether tokenized BLEU splits compounds, as papers on WMT14 English-German do.
    """

    folder: str
    languages: tuple[str, str] = ("de", "en")
    vocabulary: int = 4000
    beam: int = 5
    length_penalty: float | None = None
    tokenized: bool = False
    compounds: bool = True

    @property
    def scores(self) -> tuple[Score, ...]:
        """The tokenized BLEU of the papers, sacrebleu's, the speeds, and a tuned penalty."""
        bleus, speeds = (_TOKENIZED, _BLEU, _GREEDY_BLEU), (_SPEED, _GREEDY_SPEED)
        return (
            *(Score(name, unit="", digits=1) for name in bleus),
            *(Score(name, unit="", digits=0) for name in speeds),
            *pair_files.penalty_scores(self.length_penalty),
        )

    def prepare(self, folder: Path) -> tuple[str, ...]:
        translation_scores.check_library()
        if not self.folder:
            return ()
        pairs = folder / self.folder
        source, target = (
            pair_files.find_file(pairs / f"train.{language}", pairs / f"train.{language}.gz")
            for language in self.languages
        )
        for path in (source, target):
            pair_files.find_file(Path(pair_files.name_test_files(str(path))))
        return pair_files.prepare_pairs(source, target, self.vocabulary)

    def check(self, config: Config) -> None:
        pair_files.check_test_files(config)
        if self.length_penalty is None:
            pair_files.check_development_files(config)

    def measure(self, run: Run, folder: Path, quiet: bool) -> Measured:
        source, target = pair_files.find_test_files(run.config.data)
        request = Request(
            "translate",
            f"{source}={target}",
            batch=32,
            quiet=quiet,
            tokenized=self.tokenized,
        )
        search = request._replace(beam=self.beam)
        search, penalty = pair_files.with_length_penalty(run, search, self.length_penalty)
        found: Mapping[str, Any] = translate.evaluate(run, search)
        greedy: Mapping[str, Any] = translate.evaluate(run, request)
        scores = {
            _BLEU: found["bleu"],
            _TOKENIZED: found[self._paper_bleu],
            _SPEED: found["tokens_per_second"],
            _GREEDY_BLEU: greedy["bleu"],
            _GREEDY_SPEED: greedy["tokens_per_second"],
            **penalty,
        }
        return Measured(scores, {"the source": self._copied(Pairs(source, target))})

    def _copied(self, pairs: Pairs) -> dict[str, float]:
        """Return the scores of the sources, taken as translations of themselves."""
        sources, targets = zip(*(pairs[i] for i in range(len(pairs))), strict=True)
        found: Mapping[str, Any] = translate.bleu_scores(sources, targets, self.tokenized)
        return {_BLEU: found["bleu"], _TOKENIZED: found[self._paper_bleu]}

    @property
    def _paper_bleu(self) -> str:
        return "bleu_compounds" if self.compounds else "bleu_tokenized"
