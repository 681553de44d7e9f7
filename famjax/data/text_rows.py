"""Rows of text in a batch, in addition to the rows of a task.

A pretrained model that is finetuned on a task alone loses its language, since nothing in the loss
preserves it. Each row of a batch has one kind of document, so that the share of text tokens does
not depend on the documents' lengths, and no memory is passed from one kind to the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from famjax.data.sources import Key, Piece, Source


class TextRows(Source):
    """Documents of `task` in the first rows of a batch, and of `text` in the last `rows`.

    Args:
      task: source of the first lanes, with or without a curriculum.
      text: source of the other lanes.
      rows: number of rows of text.
      weight: loss weight of a token of text. It is less than 1, since tokens of weight 1 are
        answers, whose accuracy advances the curriculum.
    """

    def __init__(self, task: Source, text: Source, rows: int, weight: float):
        self._sources, self._rows, self._weight = (task, text), rows, weight

    def key(self, lane: int, lanes: int, k: int, before: Key | None = None) -> Key:
        """Return [0 for the task or 1 for text, key in that source]."""
        first = lanes - self._rows
        previous = before[1] if before else None
        if lane < first:
            return [0, self._sources[0].key(lane, first, k, previous)]
        return [1, self._sources[1].key(lane - first, self._rows, k, previous)]

    def open(self, key: Key, piece: int = 0) -> Iterator[Piece]:
        which, inner = key
        pieces = self._sources[which].open(inner, piece)
        if which == 0:
            return pieces
        return (p._replace(weights=p.weights * self._weight) for p in pieces)

    def get_state(self) -> dict[str, Any]:
        """Return the state of the task's source, and under "text" the state of the text source."""
        return {**self._sources[0].get_state(), "text": self._sources[1].get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        task = {name: value for name, value in state.items() if name != "text"}
        self._sources[0].set_state(task)
        self._sources[1].set_state(state["text"])

    def advance(self, state: dict[str, Any], accuracy: float) -> dict[str, Any]:
        task = {name: value for name, value in state.items() if name != "text"}
        return {**self._sources[0].advance(task, accuracy), "text": state["text"]}

    def report(self) -> str:
        lines = (source.report() for source in self._sources)
        return "; ".join(line for line in lines if line)

    def of_task(self) -> Source:
        return self._sources[0]

    def save_checked(self) -> None:
        for source in self._sources:
            source.save_checked()
