"""Measures at the papers' sizes, on test files that the user gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from famjax.config.schema import Config
from famjax.core.errors import UserError
from famjax.data.find_files import list_files
from famjax.eval.text import evaluate_text
from famjax.reproduce.experiment import Measure, Measured, Score
from famjax.train.run import Run

# by what a text is scored: the score, and its key in the results of `evaluate_text`
Scored = tuple[Score, str]
BITS = Score("bits per byte", higher_is_better=False, unit="", digits=4), "bits_per_byte"
# of texts with one byte for each character
CHARACTER_BITS = BITS[0]._replace(name="bits per character"), "bits_per_byte"
PERPLEXITY = Score("perplexity", higher_is_better=False, unit="", digits=2), "perplexity"


@dataclass(frozen=True)
class TextMeasure(Measure):
    """Scores of texts that the user gives.

    Attributes:
      texts: what the paper scores, with an example of its files, for errors.
      scored: the scores, the most important one first.
      window: tokens per window, which starts with an empty memory, and whose last half is scored;
        None reads documents whole.
      files: the user's files, in the form of `data.files`.
    """

    texts: str
    scored: tuple[Scored, ...]
    window: int | None = None
    files: str = ""

    @property
    def scores(self) -> tuple[Score, ...]:
        return tuple(score for score, _ in self.scored)

    @property
    def test_files(self) -> str:
        return self.texts

    def on(self, files: str) -> Measure:
        return replace(self, files=files)

    def check(self, config: Config) -> None:
        """Raise a `UserError` if there are no texts to train on or to score."""
        check_texts(self.files, self.texts, config)

    def measure(self, run: Run, folder: Path, quiet: bool) -> Measured:
        score = self.window and self.window // 2
        found = evaluate_text(
            run, self.files, batch=16, quiet=quiet, window=self.window, score=score
        )
        return Measured(
            self._scores(found),
            {
                "uniform": self._scores(found["uniform"]),
                "frequencies": self._scores(found["unigram"]),
            },
        )

    def _scores(self, found: Mapping[str, Any]) -> dict[str, float]:
        return {score.name: found[key] for score, key in self.scored}


def check_texts(files: str, wanted: str, config: Config) -> None:
    """Raise a `UserError` if there are no texts to test on or to train on.

    Args:
      files: the user's test files; "" if none were given.
      wanted: what the paper's test files are, for the error.
      config: the config of a training.
    """
    check_given(files, wanted)
    list_files(files, "--test")
    check_training_texts(config)


def check_given(files: object, wanted: str) -> None:
    """Raise a `UserError` if the user gave no test files."""
    if not files:
        raise UserError(f"give the files to test on with --test FILES; {wanted}")


def check_training_texts(config: Config) -> None:
    """Raise a `UserError` if there are no texts to train on."""
    if not (config.data.seqio or config.data.tfds):
        list_files(config.data.files, "data.files")


PG19 = TextMeasure(
    "the paper's are the test books of PG-19, such as 'pg19/test/*.txt'",
    ((Score("PG-19 accuracy"), "accuracy"), BITS),
)
PENN_TREEBANK = TextMeasure(
    "the paper's are the test characters of Penn Treebank, such as ptb.char.test.txt",
    (CHARACTER_BITS,),
)
ENWIK8 = TextMeasure(
    "the paper's are the last 5 million bytes of enwik8, such as enwik8.test", (BITS,)
)
# v1's Table 5, which has the numbers of Figure 5, is of the validation characters
PENN_TREEBANK_VALIDATION = replace(
    PENN_TREEBANK,
    texts="the paper's are the validation characters of Penn Treebank, such as ptb.char.valid.txt",
)
_WIKITEXT = "the paper's are the test words of WikiText-103, such as wiki.test.tokens"
WIKITEXT_VALIDATION = (
    "the paper's are the validation words of WikiText-103, such as wiki.valid.tokens"
)
WIKITEXT = TextMeasure(_WIKITEXT, (PERPLEXITY,))
WIKITEXT_DEV = TextMeasure(WIKITEXT_VALIDATION, (PERPLEXITY,))
# the last half of each window is scored (T2R 3.2.1)
WIKITEXT_WINDOWS = TextMeasure(_WIKITEXT, (PERPLEXITY,), window=512)
WIKITEXT_DEV_WINDOWS = replace(WIKITEXT_WINDOWS, texts=WIKITEXT_VALIDATION)
