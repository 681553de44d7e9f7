"""Measure of TransformerFAM's long-context tasks (3.3, Table 10), on sets that the user gives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from famjax.config.schema import Config
from famjax.core.errors import UserError, did_you_mean
from famjax.data.find_files import list_files
from famjax.eval.answer_scores import check_metrics, first_sentence, score_answer
from famjax.eval.text import evaluate_text
from famjax.reproduce.experiment import Measure, Measured, Score
from famjax.reproduce.paper_measures import check_given, check_training_texts
from famjax.tasks import TASKS
from famjax.tasks.questions.question_set import QuestionSet
from famjax.tasks.questions.records import TFDS
from famjax.tasks.questions.summaries import XLSUM
from famjax.tasks.task import Request
from famjax.train.run import Run

_TEXT, _BATCH = "text", 16


class LongContextSet(NamedTuple):
    """A test set of the paper.

    Attributes:
      score: name of its score.
      task: task of `famjax eval` that reads it.
      example: an example of its files, for errors.
    """

    score: str
    task: str
    example: str


# as they are named in `--test`
SETS: Mapping[str, LongContextSet] = {
    "pg19": LongContextSet("PG-19 accuracy", _TEXT, "pg19/test/*.txt"),
    "isabelle": LongContextSet("Isabelle accuracy", _TEXT, "isabelle/test/*.thy"),
    "narrativeqa": LongContextSet("NarrativeQA", "narrativeqa", "narrativeqa.jsonl"),
    "qasper": LongContextSet("Qasper", "qasper", "qasper.jsonl"),
    "quality": LongContextSet("QuALITY", "quality", "quality.jsonl"),
    "xlsum": LongContextSet("XLSum", XLSUM.name, "xlsum/english_test.jsonl"),
}


@dataclass(frozen=True)
class LongContextMeasure(Measure):
    """Accuracy of the next token on texts, and the answers' scores on questions and articles.

    The paper reads the first 256,000 tokens of a document; here it is read whole.

    Attributes:
      sets: names of the table's sets, the most important one first.
      files: the user's files for some of these sets; all are scored if it is empty.
    """

    sets: tuple[str, ...]
    files: tuple[tuple[str, str], ...] = ()

    @property
    def scores(self) -> tuple[Score, ...]:
        given = dict(self.files)
        return tuple(Score(SETS[name].score) for name in self.sets if name in (given or self.sets))

    @property
    def test_files(self) -> str:
        named = ", ".join(f"{name}:{SETS[name].example}" for name in self.sets)
        return f"the paper's are {named}; one of them is enough"

    def on(self, files: str) -> Measure:
        """Return the measure with the user's files.

        Args:
          files: "NAME:FILES,NAME:FILES", with files in the form of `data.files`; files without a
            name are those of the first set.
        """
        found: dict[str, str] = {}
        name = self.sets[0]
        for part in filter(None, files.split(",")):
            prefix, colon, rest = part.partition(":")
            is_name = re.fullmatch(r"\w+", prefix) and f"{prefix}:" != TFDS
            if colon and is_name and prefix not in SETS and not Path(part).exists():
                near = did_you_mean(prefix, self.sets) or ";"
                raise UserError(f"--test {prefix}: no such set{near} {self.test_files}")
            if colon and prefix in SETS:
                if prefix not in self.sets:
                    raise UserError(f"--test {prefix}: is not in this table; {self.test_files}")
                name, part = prefix, rest
            found[name] = f"{found[name]},{part}" if name in found else part
        return replace(self, files=tuple(found.items()))

    def check(self, config: Config) -> None:
        """Raise a `UserError` if there are no texts to train on, or sets that cannot be read."""
        check_given(self.files, self.test_files)
        for name, files in self.files:
            task = TASKS[SETS[name].task]
            if not (isinstance(task, QuestionSet) and files.startswith(TFDS)):
                list_files(files, "--test")
            if isinstance(task, QuestionSet):
                task.load(files, skip_broken=False)
                check_metrics(task.metrics)
        check_training_texts(config)

    def measure(self, run: Run, folder: Path, quiet: bool) -> Measured:
        scores: dict[str, float] = {}
        baselines: dict[str, dict[str, float]] = {}
        for name, files in self.files:
            of_set = SETS[name]
            if of_set.task == _TEXT:
                found = evaluate_text(run, files, batch=_BATCH, quiet=quiet)
                scores[of_set.score] = found["accuracy"]
                guesses = {"uniform": found["uniform"], "frequencies": found["unigram"]}
                trivial = {guess: each["accuracy"] for guess, each in guesses.items()}
            else:
                scores[of_set.score] = self._answer(run, of_set.task, files, quiet)["score"]
                trivial = {"the first sentence": _lead(files)} if name == "xlsum" else {}
            for guess, value in trivial.items():
                baselines.setdefault(guess, {})[of_set.score] = value
        return Measured(scores, baselines)

    def _answer(self, run: Run, task: str, files: str, quiet: bool) -> dict[str, Any]:
        return TASKS[task].evaluate(run, Request(task, files, batch=_BATCH, quiet=quiet))


def _lead(files: str) -> float:
    """Return the mean score of the articles' first sentences as summaries."""
    documents, _ = XLSUM.load(files, skip_broken=False)
    scores = [
        score_answer(XLSUM.metrics[0], first_sentence(document.text), asked.references)
        for document in documents
        for asked in document.questions
    ]
    return sum(scores) / len(scores)
