"""Sums over the tokens of each document, from batches whose lanes read documents in turn."""

from __future__ import annotations

import numpy as np


class DocumentSums:
    """Sums of token values for each document, in the order in which the documents start.

    Attributes:
      sums: for each document its sums, [values].
    """

    def __init__(self, lanes: int) -> None:
        self.sums: list[np.ndarray] = []
        # for each lane the index of the document that it reads; -1 is none
        self._current = [-1] * lanes

    def add(self, reset: np.ndarray, values: np.ndarray) -> None:
        """Add one batch of `famjax.data.one_pass`.

        Args:
          reset: [b t] bool, whether a document starts with the token.
          values: [values b t], the values of each token.
        """
        # `one_pass` numbers documents lane by lane: first all that start in the first lane of a
        # batch, then those of the second, and so on
        for lane, starting in enumerate(reset):
            before, *started = np.split(values[:, lane], np.flatnonzero(starting), axis=1)
            if self._current[lane] >= 0:
                self.sums[self._current[lane]] += before.sum(1)
            self.sums += [part.sum(1) for part in started]
            if started:
                self._current[lane] = len(self.sums) - 1
