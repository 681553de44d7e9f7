"""The results of `famjax.eval.questions`."""

from __future__ import annotations

from typing import TypedDict

from famjax.eval.examples import AblationScore
from famjax.eval.subsets import SubsetRow

# "from" is no name of an attribute
_Lengths = TypedDict("_Lengths", {"from": int, "to": int})


class OctaveRow(_Lengths):
    """The score on documents of an octave of lengths.

    Attributes:
      from, to: lowest and highest number of tokens that are read of a document.
      documents: number of documents.
      questions: number of questions.
      score: mean score.
    """

    documents: int
    questions: int
    score: float


class QuestionScores(TypedDict):
    """The scores in a `QuestionsResult`."""

    documents: int
    questions: int
    metric: str
    score: float
    interval: list[float]
    scores: dict[str, float]
    subsets: list[SubsetRow]
    cut: int
    ablations: dict[str, AblationScore]


class QuestionsResult(QuestionScores):
    """The results on documents with questions.

    Attributes:
      task: name of the task.
      source: origin of the task.
      files: the files.
      examples: name of the examples file.
      settings: a hash that identifies the examples.
      window: maximum number of tokens of a document, question and answer; None is any.
      skipped: reasons for lines that were left out.
      cut_documents: number of documents that were cut to the window.
      documents: number of documents.
      questions: number of questions.
      metric: the first metric.
      score: its mean; in a collection, the mean over its data sets.
      interval: ends of its 95% interval, a bootstrap over documents.
      scores: the mean of each metric.
      subsets: scores on a collection's data sets, see `famjax.eval.subsets`.
      cut: number of answers that reached their maximum number of tokens.
      ablations: for each ablation by name, its score, and the gain over it.
      rows: scores by octave of document lengths.
      longest: tokens of the longest document.
      updates: blocks of the longest document that was read.
      lanes: number of documents that are read together.
      chunk: tokens of a document in a call.
      padding: share of padding in the computed tokens.
      tokens_per_second: of reading.
      answer_seconds: time per question.
      state_bytes: size of the state of one document.
      peak_bytes: see `memory_report`.
    """

    task: str
    source: str
    files: str
    examples: str
    settings: str
    window: int | None
    skipped: list[str]
    cut_documents: int
    rows: list[OctaveRow]
    longest: int
    updates: int
    lanes: int
    chunk: int
    padding: float
    tokens_per_second: float
    answer_seconds: float
    state_bytes: int
    peak_bytes: int
