"""Lanes at different places of different documents: nothing waits for the longest document.

A lane reads whole chunks of a document, then begins the next one. What is left of a document,
less than a chunk, is read with the questions about it, by lanes that continue from its state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from famjax.core.types import Array, Context, State
from famjax.eval.streaming import CHUNK, Streamer
from famjax.models.language_model import LanguageModel
from famjax.parallel.sharding import is_axes

# of the tokens that are computed, at most so many are padding if any plan manages it
MOST_PADDING = 0.1


class LaneState(NamedTuple):
    """The state of one lane.

    Attributes:
      memory: the model's state, of a batch of 1.
      tokens: of its document, read so far.
    """

    memory: State
    tokens: int


class LaneStream(Streamer):
    """A stream of b lanes, each at its own position.

    Args:
      model, batch, chunk: as in `Streamer`.
      reset_every: as in `Streamer`, counted from the beginning of each lane's document.

    Attributes:
      positions: [b], tokens that each lane has read of its document.
    """

    def __init__(
        self, model: LanguageModel, batch: int, chunk: int, reset_every: int | None = None
    ):
        super().__init__(model, batch, chunk, reset_every)
        self.positions = np.zeros(batch, np.int64)
        # the axis of each array of the state that is the lanes'
        axes = jax.tree.leaves(model.state_axes(), is_leaf=is_axes)
        self._axes = tuple(names.index("batch") for names in axes)

    def read_lanes(self, tokens: np.ndarray, sizes: np.ndarray, starts: np.ndarray) -> None:
        """Read the first `sizes` [b] of tokens [b n*block]; asynchronous.

        Every lane that reads something is at the beginning of a block. `logits` are those after
        the last token of each lane, and undefined where it reads none.

        Args:
          starts: [b] bool, a document begins.
        """
        ctx = self._begin(tokens, sizes, starts)
        self._call(tokens, None, ctx, np.maximum(sizes - 1, 0))
        self.positions += sizes

    def skim_lanes(self, tokens: np.ndarray, reading: np.ndarray, starts: np.ndarray) -> None:
        """Read a chunk [b chunk] in the lanes that are `reading` [b], without logits; asynchronous.

        Args:
          starts: [b] bool, a document begins.
        """
        sizes = np.where(reading, self.chunk, 0)
        ctx = self._begin(tokens, sizes, starts)
        self._wait()
        ready, self._memory = self._functions.skim(
            self._params, self._memory, jnp.asarray(tokens, jnp.int32), ctx
        )
        self._in_flight.append(ready)
        self.positions += sizes

    def losses_lanes(
        self, tokens: np.ndarray, targets: np.ndarray, sizes: np.ndarray
    ) -> tuple[Array, Array]:
        """As `read_lanes`, and return nll and correct of the targets, [b n*block] each."""
        ctx = self._begin(tokens, sizes, np.zeros(self.batch, bool))
        nll, correct = self._call(tokens, targets, ctx, tokens.shape[1] - 1)
        self.positions += sizes
        return nll, correct

    def _begin(self, tokens: np.ndarray, sizes: np.ndarray, starts: np.ndarray) -> Context:
        """Return the masks of a call of whole blocks."""
        if (self.positions[(sizes > 0) & ~starts] % self.block).any():
            raise ValueError("a lane is not at the beginning of a block")
        self.positions[starts] = 0
        index = np.arange(tokens.shape[1])
        valid = index < sizes[:, None]
        reset = self._lane_resets(index) & valid
        reset[:, 0] |= starts
        return Context(jnp.asarray(reset), jnp.asarray(valid))

    def step_lanes(self, tokens: np.ndarray) -> None:
        """Read one token per lane [b 1]; asynchronous."""
        reset = jnp.asarray(self._lane_resets(np.zeros(1, int)))
        self._step(tokens, None, Context(reset))
        self.positions += 1

    def _lane_resets(self, index: np.ndarray) -> np.ndarray:
        """Return the reset mask [b t] of tokens at `index` [t] after the lanes' positions."""
        at = self.positions[:, None] + index
        return (
            np.zeros(at.shape, bool) if self._reset_every is None else at % self._reset_every == 0
        )

    def lane(self, number: int) -> LaneState:
        """Return a copy of a lane's state."""
        leaves, tree = jax.tree.flatten(self._memory)
        taken = _take_lane(leaves, np.int32(number), self._axes)
        return LaneState(jax.tree.unflatten(tree, taken), int(self.positions[number]))

    def set_lanes(self, states: Sequence[LaneState]) -> None:
        """Continue from a state in each lane, which are copied."""
        trees = [state.memory for state in states]
        leaves = _join_lanes([jax.tree.leaves(tree) for tree in trees], self._axes)
        old, tree = jax.tree.flatten(self._memory)
        placed = [
            jax.device_put(new, before.sharding if before.committed else None)
            for new, before in zip(leaves, old, strict=True)
        ]
        self._memory = jax.tree.unflatten(tree, placed)
        self.positions = np.array([state.tokens for state in states], np.int64)
        self._logits = None


@functools.partial(jax.jit, static_argnums=2)
def _take_lane(leaves: list[Array], number: Array, axes: tuple[int, ...]) -> list[Array]:
    return [
        jax.lax.dynamic_slice_in_dim(leaf, number, 1, axis)
        for leaf, axis in zip(leaves, axes, strict=True)
    ]


@functools.partial(jax.jit, static_argnums=1)
def _join_lanes(lanes: list[list[Array]], axes: tuple[int, ...]) -> list[Array]:
    return [jnp.concatenate(parts, axis) for *parts, axis in zip(*lanes, axes, strict=True)]


class LanePlan(NamedTuple):
    """How documents are read.

    Attributes:
      lanes: number of lanes.
      chunk: tokens that each lane reads in a call.
      padding: share of the computed tokens that are none of a document's.
    """

    lanes: int
    chunk: int
    padding: float


def plan_lanes(sizes: Sequence[int], batch: int, block: int) -> LanePlan:
    """Return the largest plan with little padding, else that with the least.

    Args:
      sizes: tokens of the documents.
      batch: most lanes.
      block: of the model; chunks are multiples of it.
    """
    plans = []
    chunk = max(CHUNK // block, 1) * block
    while chunk:
        for lanes in range(min(batch, len(sizes)), 0, -1):
            calls = _count_calls([size // chunk for size in sizes], lanes)
            read = sum(size // chunk for size in sizes) * chunk
            computed = calls * lanes * chunk
            plans.append(LanePlan(lanes, chunk, 1 - read / computed if computed else 0.0))
        chunk = chunk // block // 2 * block
    # what is no whole chunk is read more slowly
    least = max(min(plan.padding for plan in plans), MOST_PADDING)
    return max(
        (plan for plan in plans if plan.padding <= least),
        key=lambda plan: (_whole(sizes, plan.chunk) >= 0.5, plan.lanes * plan.chunk),
    )


def _whole(sizes: Sequence[int], chunk: int) -> float:
    """Return the share of the tokens that are in whole chunks."""
    return sum(size // chunk * chunk for size in sizes) / max(sum(sizes), 1)


def _count_calls(chunks: Sequence[int], lanes: int) -> int:
    """Return the calls if each document goes to the first free lane, long ones first."""
    loads = [0] * lanes
    for count in sorted(chunks, reverse=True):
        loads[loads.index(min(loads))] += count
    return max(loads)


def read_documents(
    stream: LaneStream,
    sizes: Sequence[int],
    encode: Callable[[int], np.ndarray],
    advance: Callable[[int], None] = lambda tokens: None,
) -> Iterator[tuple[int, LaneState, np.ndarray]]:
    """Read the whole chunks of documents, and yield each with its state and the tokens left.

    Args:
      stream: in its initial state.
      sizes: tokens of the documents, with bos.
      encode: returns the tokens [n] of a document.
      advance: counts tokens that were read.
    """
    chunk, lanes = stream.chunk, stream.batch
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    empty = stream.lane(0)
    waiting = [i for i in order if sizes[i] >= chunk]
    current: dict[int, tuple[int, np.ndarray]] = {}
    while waiting or current:
        free = [lane for lane in range(lanes) if lane not in current][: len(waiting)]
        for lane in free:
            number = waiting.pop(0)
            current[lane] = (number, encode(number))
        starts = np.isin(np.arange(lanes), free)
        at = np.where(starts, 0, stream.positions)
        rows = np.zeros((lanes, chunk), np.int32)
        for lane, (_, tokens) in current.items():
            rows[lane] = tokens[at[lane] : at[lane] + chunk]
        stream.skim_lanes(rows, np.isin(np.arange(lanes), list(current)), starts)
        advance(len(current) * chunk)
        for lane, (number, tokens) in list(current.items()):
            left = tokens[stream.positions[lane] :]
            if len(left) < chunk:
                yield number, stream.lane(lane), left
                del current[lane]
    for number in order:
        if sizes[number] < chunk:
            yield number, empty, encode(number)
