"""A set of documents with questions as a task: `famjax eval RUN --tasks qasper:FILES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from famjax.tasks.questions.records import AskedDocument, read_documents
from famjax.tasks.task import EvaluationTask


@dataclass(frozen=True)
class QuestionSet(EvaluationTask):
    """A set of documents with questions.

    A new one is an instance in a file of its own, and a line in `famjax.tasks.TASKS`.

    Attributes:
      name: name of the task.
      source: origin of its records and metrics.
      parse: returns the document of a JSON record, see `famjax.tasks.questions.records`.
      metrics: names of metrics of `famjax.eval.answer_scores`; a run is judged by the first one.
      answer_tokens: maximum number of tokens of an answer.
      stop: string before which an answer ends; "" is none.
    """

    name: str
    source: str
    parse: Callable[[dict[str, Any]], AskedDocument]
    metrics: tuple[str, ...]
    answer_tokens: int
    stop: str = "\n"

    group = "questions"
    options = ("examples", "questions", "ablate", "window", "skip_broken")
    files = "FILES.jsonl"
    needs_files = True
    evaluation = "famjax.eval.questions:evaluate"
    documents_check = "famjax.eval.questions:check_documents"
    headline = "score"
    instead = (
        'to train on such questions write them as {"inputs": ..., "targets": ...} lines, for '
        "data.files"
    )

    def load(self, files: str, skip_broken: bool) -> tuple[list[AskedDocument], list[str]]:
        """Return the documents in files, and the reasons for lines that were left out."""
        return read_documents(files, self.parse, skip_broken)

    def scores(self, results: Any) -> dict[str, float]:
        return {"": results["score"]}
