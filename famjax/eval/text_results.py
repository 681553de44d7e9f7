"""Types of the results of evaluations on text."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class TextScores(TypedDict):
    """Scores of predictions of text.

    Attributes:
      loss: nats per token.
      accuracy: share of the tokens that are predicted correctly.
      perplexity: e to the loss.
      bits_per_byte: bits per byte of the text.
    """

    loss: float
    accuracy: float
    perplexity: float
    bits_per_byte: float


class AblatedTextScores(TextScores):
    """Scores with an ablation.

    Attributes:
      gain: by how many bits per byte the run is better, and the ends of the 95% interval over
        documents, which are None if there is only one document.
    """

    gain: tuple[float, float | None, float | None]


# "from" is no name of an attribute
_Positions = TypedDict("_Positions", {"from": int, "to": int})


class PositionRow(_Positions):
    """Scores of predictions at a range of positions.

    Attributes:
      from, to: first and last position of the predicted token in its document or window.
      tokens: number of predicted tokens.
      loss: nats per token.
      accuracy: share of the tokens that are predicted correctly.
      loss_without_memory: the loss with a reset at each block.
    """

    tokens: int
    loss: float
    accuracy: float
    loss_without_memory: float


class DocumentRow(TypedDict):
    """The loss of a document.

    Attributes:
      file: path of its file.
      line: number of its line in the file, from 0.
      tokens: number of predicted tokens.
      bytes: size of the predicted tokens.
      nats: loss, summed over the tokens.
      nats_without_memory: the same with a reset at each block.
      ablated: the same with each ablation, if there are any.
    """

    file: str
    line: int
    tokens: int
    bytes: int
    nats: float
    nats_without_memory: float
    ablated: NotRequired[dict[str, float]]


class MemoryScores(TextScores):
    without_memory: TextScores
    memory_gain: TextScores
    by_position: list[PositionRow]


class WordScores(TypedDict):
    words: int
    word_perplexity: float


class TextResult(MemoryScores, WordScores):
    """The results of `evaluate_text`; the loss and the other three `TextScores` are with memory.

    Attributes:
      files: the request's files, or "holdout"; only in the results of `evaluate`.
      window: tokens per window; None for whole documents.
      score: number of predictions that are scored per window; None for whole documents.
      documents: number of documents read.
      documents_left: number of documents not read.
      tokens: number of predicted tokens.
      bytes: size of the predicted tokens.
      seconds: time that all readings took.
      tokens_per_second: tokens read in a second; every reading counts: with memory, without, and
        with each ablation.
      state_bytes: size of the state of one document.
      words: number of words.
      word_perplexity: e to the nats per word.
      without_memory: the scores with a reset at each block.
      memory_gain: how much memory improves each score.
      by_position: scores by position.
      ablations: scores with each ablation but `reset`, by name.
      by_document: losses by document, ordered by file and line; `evaluate` leaves them out if they
        are many.
      unigram, uniform: scores of context-free baselines (`famjax.eval.guessing`).
    """

    files: NotRequired[str]
    window: int | None
    score: int | None
    documents: int
    documents_left: int
    tokens: int
    bytes: int
    seconds: float
    tokens_per_second: float
    state_bytes: int
    ablations: dict[str, AblatedTextScores]
    by_document: NotRequired[list[DocumentRow]]
    unigram: TextScores
    uniform: TextScores
