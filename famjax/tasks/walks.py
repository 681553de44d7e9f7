"""Walks on small grids: where is the agent after each action? (Feedback Transformer v3 7.1, v1 B.1)

An episode is the reset symbol and `steps` actions. The target at each of these tokens is the
agent's cell after it, a symbol that the model never reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from famjax.config.schema import ToyConfig
from famjax.data.sources import Piece
from famjax.tokenizers.words import BEGIN, SPECIALS

# east, south, west, north: (row, column)
_MOVES = np.array([(0, 1), (1, 0), (0, -1), (-1, 0)])


class Walk:
    """Walks through a table of states.

    Args:
      actions: words of the actions.
      cells: words of the cells.
      table: [states actions], the state after each action in each state.
      cell_of_state: [states], the cell of each state.
      start: the initial state of an episode.

    Attributes:
      words: words of the vocabulary, which follow the special tokens.
      answers, answers_are_targets, steps: see `famjax.tasks.toy.ToyTask`.
    """

    keys: tuple[str, ...] = ()
    answers_are_targets = True
    steps = (100, 100)

    def __init__(
        self,
        actions: Sequence[str],
        cells: Sequence[str],
        table: np.ndarray,
        cell_of_state: np.ndarray,
        start: int,
    ):
        self.words = (*actions, *cells)
        first = len(SPECIALS) + len(actions)
        self.answers = range(first, first + len(cells))
        self._table, self._cell, self._start = table, first + cell_of_state, start

    def episodes(self, rngs: Sequence[np.random.Generator], steps: int) -> list[Piece]:
        """Return an episode for each generator, computed as one batch."""
        actions = np.stack([rng.integers(0, self._table.shape[1], steps) for rng in rngs])
        states = np.full((len(rngs), steps + 1), self._start)
        for t in range(steps):
            states[:, t + 1] = self._table[states[:, t], actions[:, t]]
        tokens = np.pad(actions + len(SPECIALS), ((0, 0), (1, 0)), constant_values=BEGIN)
        return [
            Piece(line, np.ones(steps + 1, np.float32), targets=targets)
            for line, targets in zip(
                tokens.astype(np.int32), self._cell[states].astype(np.int32), strict=True
            )
        ]

    def last_answers(self, piece: Piece) -> np.ndarray | None:
        """Guess that the agent does not move: return the cell before each action."""
        assert piece.targets is not None
        return np.append(piece.targets[:1], piece.targets[:-1])


class RandomWalk(Walk):
    """Moves forward and turns left or right on a square grid.

    An episode starts in the north-west corner, facing east. Moves off the grid are ignored.
    """

    keys: tuple[str, ...] = ("data.toy.size",)

    def __init__(self, config: ToyConfig):
        size = config.size
        at = np.stack(np.divmod(np.arange(size**2), size), -1)[:, None]  # [cells 1 2]
        ahead = np.clip(at + _MOVES, 0, size - 1) @ (size, 1)  # [cells 4]
        cell, facing = np.divmod(np.arange(4 * size**2), 4)
        table = np.stack(
            [
                4 * ahead[cell, facing] + facing,
                4 * cell + (facing - 1) % 4,
                4 * cell + (facing + 1) % 4,
            ],
            axis=-1,
        )
        cells = [f"{row},{column}" for row in range(size) for column in range(size)]
        super().__init__(("forward", "left", "right"), cells, table, cell, start=0)


class BlockedWalk(Walk):
    """Four moves on a torus of 3 x 3 cells A to I, from E; moves into a block are ignored.

    The paper's figure of the blocks is lost. The paper says "Brown cells represent blocks where
    agent cannot move (except for the initial step)", so E is a block, and cannot be entered again.
    A as the other block is our choice.
    """

    blocks = "AE"

    def __init__(self, config: ToyConfig):
        del config
        names = "ABCDEFGHI"
        at = np.stack(np.divmod(np.arange(9), 3), -1)[:, None]
        table = ((at + _MOVES) % 3) @ (3, 1)
        blocked = np.isin(table, [names.index(name) for name in self.blocks])
        table = np.where(blocked, np.arange(9)[:, None], table)
        actions = ("east", "south", "west", "north")
        super().__init__(actions, names, table, np.arange(9), start=names.index("E"))
