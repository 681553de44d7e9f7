"""Sums over the tokens of each document, of batches in which lanes read documents in turn."""

from __future__ import annotations

import numpy as np


class DocumentSums:
    """Sums of values of tokens by document, in the order in which documents start.

    Attributes:
      sums: of each document, [values].
    """

    def __init__(self, lanes: int) -> None:
        self.sums: list[np.ndarray] = []
        # the document that each lane reads
        self._current = [-1] * lanes

    def add(self, reset: np.ndarray, values: np.ndarray) -> None:
        """Add one batch of `famjax.data.one_pass`.

        Args:
          reset: [b t] bool, a document starts with the token.
          values: [values b t].
        """
        # lanes take documents in turn: the first lane all that start in this batch, and so on
        for lane, starting in enumerate(reset):
            before, *started = np.split(values[:, lane], np.flatnonzero(starting), axis=1)
            if self._current[lane] >= 0:
                self.sums[self._current[lane]] += before.sum(1)
            self.sums += [part.sum(1) for part in started]
            if started:
                self._current[lane] = len(self.sums) - 1
