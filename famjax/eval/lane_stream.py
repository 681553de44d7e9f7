"""Streams whose lanes are at different positions, so that no lane waits for the longest document.

A lane reads the whole blocks of a document, then begins the next one. The rest of the document,
less than a block, is read together with the questions about it, by lanes that continue from the
document's state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from famjax.core.types import Array, Batch, Context, State
from famjax.data.one_pass import last_end
from famjax.eval.ablations import UNABLATED, ablated_leaves, restore_lanes
from famjax.eval.streaming import CHUNK, Streamer, rechunk
from famjax.models.language_model import LanguageModel

# largest share of padding in the computed tokens, if any plan achieves it
MAX_PADDING = 0.1


class LaneState(NamedTuple):
    """The state of one lane.

    Attributes:
      memory: the model's state with a batch of 1.
      tokens: number of tokens of the lane's document that it has read.
    """

    memory: State
    tokens: int


class LaneStream(Streamer):
    """A stream of b lanes, each at its own position.

    Args:
      model, batch, chunk: as in `Streamer`.
      ablation: one of `famjax.eval.ablations.ABLATIONS`, or `UNABLATED`.
      update: number of tokens between the resets of the ablation "reset", a multiple of the model's
        block; None is one block.

    Attributes:
      positions: [b], number of tokens that each lane has read of its document.
      chunk: tokens per call.

    Raises:
      UserError: a size does not fit the model, or the model does not have the part that the
        ablation takes away.
    """

    def __init__(
        self,
        model: LanguageModel,
        batch: int,
        chunk: int | None = None,
        ablation: str = UNABLATED,
        update: int | None = None,
    ):
        self._ablated_leaves: tuple[bool, ...] | None = None
        if ablation in ("memory", "segments"):
            self._ablated_leaves = ablated_leaves(model, ablation)
        reset = (update or model.block_len) if ablation == "reset" else None
        super().__init__(model, batch, chunk, reset)
        # for each array of the state, the axis of the lanes
        self._axes = model.stack.row_axes(self._memory)

    def warm_up(self) -> None:
        """Compile `skim_lanes` and `lane`, so that later timings exclude compilation."""
        scratch = self.new_stream()
        everywhere = np.ones(scratch.batch, bool)
        rows = np.zeros((scratch.batch, scratch.chunk), np.int32)
        scratch.skim_lanes(rows, everywhere * scratch.chunk, everywhere)
        scratch.lane(0)

    def _start(self, batch: int) -> None:
        super()._start(batch)
        self.positions = np.zeros(batch, np.int64)
        # a copy that no call donates
        self._initial = (
            None if self._ablated_leaves is None else jax.tree.map(jnp.copy, self._memory)
        )

    def read_lanes(self, tokens: np.ndarray, sizes: np.ndarray, starts: np.ndarray) -> None:
        """Read tokens in the lanes; asynchronous.

        Every lane that reads must be at the beginning of a block, or start a document. Afterwards
        `logits` are those after the last token that each lane has read here or in earlier calls.

        Args:
          tokens: [b n*block], padded at the end.
          sizes: [b], how many tokens each lane reads.
          starts: [b] bool, whether a document begins with the lane's first token.
        """
        logits = self._logits
        for piece, count, begin in self._pieces(tokens, sizes, starts):
            ctx = self._begin(piece, count, begin)
            self._call(piece, None, ctx, np.maximum(count - 1, 0))
            self.positions = self.positions + count
            reading = jnp.asarray(count > 0)[:, None]
            logits = self.logits if logits is None else jnp.where(reading, self.logits, logits)
        self._logits = logits

    def read_texts(self, texts: Sequence[np.ndarray]) -> None:
        """Read a text [n] in each of the first lanes, from where the lane is; asynchronous."""
        for rows, _, sizes in self.rounds(texts):
            self.read_lanes(rows, sizes, np.zeros(self.batch, bool))

    def rounds(self, texts: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, int, np.ndarray]]:
        """Split the texts [n] of the first lanes into calls.

        Yields:
          tokens [b t] of a call; how many tokens of each text were read before it; sizes [b], how
          many of its tokens are valid. A call is a chunk long; the last one may be half of that, a
          quarter and so on, in whole blocks.
        """
        longest = max(map(len, texts))
        at = 0
        while at < longest:
            width = self.chunk
            while (half := width // self.block // 2 * self.block) and at + half >= longest:
                width = half
            rows = np.zeros((self.batch, width), np.int32)
            sizes = np.zeros(self.batch, np.int64)
            for lane, text in enumerate(texts):
                piece = text[at : at + width]
                rows[lane, : len(piece)], sizes[lane] = piece, len(piece)
            yield rows, at, sizes
            at += width

    def _longest(self) -> int:
        return int(self.positions.max())

    def skim_lanes(self, tokens: np.ndarray, sizes: np.ndarray, starts: np.ndarray) -> None:
        """Like `read_lanes`, without computing logits; asynchronous."""
        for piece, count, begin in self._pieces(tokens, sizes, starts):
            ctx = self._begin(piece, count, begin)
            self._wait()
            ready, self._memory = self._functions.skim(
                self._params, self._memory, jnp.asarray(piece, jnp.int32), ctx
            )
            self._in_flight.append(ready)
            self.positions = self.positions + count

    def lane_losses(
        self, tokens: np.ndarray, targets: np.ndarray, sizes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read tokens like `read_lanes`; return nll and correct of targets, [b n*block] each."""
        nll, correct, at = [], [], 0
        for piece, count, begin in self._pieces(tokens, sizes, np.zeros(self.batch, bool)):
            ctx, width = self._begin(piece, count, begin), piece.shape[1]
            scores = self._call(piece, targets[:, at : at + width], ctx, width - 1)
            self.positions = self.positions + count
            nll.append(scores[0])
            correct.append(scores[1])
            at += width
        nll, correct = jax.device_get((nll, correct))
        return np.concatenate(nll, 1), np.concatenate(correct, 1)

    def batch_losses(self, batch: Batch[np.ndarray]) -> tuple[Array, ...]:
        """Like `Streamer.batch_losses`, but block by block if the ablation restores state there."""
        if self._ablated_leaves is None:
            return super().batch_losses(batch)
        parts = []
        for at in range(0, self.chunk, self.block):
            # also in lanes without tokens here: they have finished their document
            self._restore_ablated(np.ones(self.batch, bool))
            columns = slice(at, at + self.block)
            reset, valid = (jnp.asarray(batch[mask][:, columns]) for mask in ("reset", "valid"))
            tokens, targets = batch["tokens"][:, columns], batch["targets"][:, columns]
            parts.append(self._call(tokens, targets, Context(reset, valid), self.block - 1))
        return tuple(jnp.concatenate(each, 1) for each in zip(*parts, strict=True))

    def _pieces(
        self, tokens: np.ndarray, sizes: np.ndarray, starts: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield tokens, sizes and starts of each call.

        This is one call, or one for each block if the ablation restores state between blocks.
        """
        width = tokens.shape[1] if self._ablated_leaves is None else self.block
        for at in range(0, tokens.shape[1], width):
            count = np.clip(sizes - at, 0, width)
            yield tokens[:, at : at + width], count, starts if at == 0 else np.zeros_like(starts)

    def _begin(self, tokens: np.ndarray, sizes: np.ndarray, starts: np.ndarray) -> Context:
        """Prepare a call of whole blocks: apply the ablation, and return the masks."""
        if (self.positions[(sizes > 0) & ~starts] % self.block).any():
            raise ValueError("a lane is not at the beginning of a block")
        self.positions = np.where(starts, 0, self.positions)
        self._restore_ablated(sizes > 0)
        index = np.arange(tokens.shape[1])
        valid = index < sizes[:, None]
        reset = self._lane_resets(index) & valid
        reset[:, 0] |= starts
        return Context(jnp.asarray(reset), jnp.asarray(valid))

    def step_lanes(self, tokens: np.ndarray) -> None:
        """Read one token per lane [b 1]; asynchronous."""
        self._restore_ablated(self.positions % self.block == 0)
        reset = jnp.asarray(self._lane_resets(np.zeros(1, int)))
        self._step(tokens, Context(reset))
        self.positions = self.positions + 1

    def _restore_ablated(self, lanes: np.ndarray) -> None:
        """Restore the ablated part of the state of `lanes` [b], which are at a block's start."""
        if self._ablated_leaves is None or not lanes.any():
            return
        leaves, tree = jax.tree.flatten(self._memory)
        initial = jax.tree.leaves(self._initial)
        restored = _restore(leaves, initial, jnp.asarray(lanes), self._axes, self._ablated_leaves)
        self._memory = jax.tree.unflatten(tree, restored)

    def _lane_resets(self, index: np.ndarray) -> np.ndarray:
        """Return the reset mask [b t] of tokens at `index` [t] after the lanes' positions."""
        positions = self.positions[:, None] + index
        return (
            np.zeros(positions.shape, bool)
            if self._reset_every is None
            else positions % self._reset_every == 0
        )

    def lane(self, number: int) -> LaneState:
        """Return a copy of a lane's state."""
        leaves, tree = jax.tree.flatten(self._memory)
        taken = _take_lane(leaves, np.int32(number), self._axes)
        return LaneState(jax.tree.unflatten(tree, taken), int(self.positions[number]))

    def set_lanes(self, states: Sequence[LaneState]) -> None:
        """Set the state of each lane to a copy of the given one, and continue from there."""
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


_restore = jax.jit(restore_lanes, static_argnums=(3, 4))


class LanePlan(NamedTuple):
    """How many lanes read documents, and in which chunks.

    Attributes:
      lanes: number of lanes.
      chunk: tokens that each lane reads in a call.
      padding: share of padding in the computed tokens.
    """

    lanes: int
    chunk: int
    padding: float


def plan_lanes(sizes: Sequence[int], batch: int, block: int, longest: int = CHUNK) -> LanePlan:
    """Return the plan with the most tokens per call among those with little padding.

    Little is `MAX_PADDING`, or the least padding of any plan if that is more.

    Args:
      sizes: number of tokens of each document; only whole blocks of them are read.
      batch: maximum number of lanes.
      block: block length of the model; chunks are multiples of it.
      longest: approximate maximum number of tokens of a chunk.
    """
    plans = []
    read = sum(size // block * block for size in sizes)
    chunk = max(longest // block, 1) * block
    while chunk:
        calls = sorted((-(-(size // block * block) // chunk) for size in sizes), reverse=True)
        for lanes in range(min(batch, len(sizes)), 0, -1):
            computed = last_end(calls, lanes) * lanes * chunk
            plans.append(LanePlan(lanes, chunk, 1 - read / computed if computed else 0.0))
        chunk = chunk // block // 2 * block
    max_padding = max(min(plan.padding for plan in plans), MAX_PADDING)
    return max(
        (plan for plan in plans if plan.padding <= max_padding),
        key=lambda plan: (plan.lanes * plan.chunk, plan.lanes),
    )


class ReadDocument(NamedTuple):
    """A document that was read up to its last whole block.

    Attributes:
      number: number of the document.
      state: state of a lane after the whole blocks.
      left: [n], the tokens after the whole blocks, fewer than a block.
    """

    number: int
    state: LaneState
    left: np.ndarray

    @property
    def tokens(self) -> int:
        """Number of tokens of the document."""
        return self.state.tokens + len(self.left)


def read_documents(
    stream: LaneStream,
    numbers: Iterable[int],
    open_document: Callable[[int], Iterable[np.ndarray]],
    advance: Callable[[int], None] = lambda tokens: None,
) -> Iterator[ReadDocument]:
    """Read the whole blocks of documents, and yield each document as soon as it is read.

    Args:
      stream: a stream in its initial state.
      numbers: numbers of the documents. Each document goes to the first free lane, so long ones
        should come first.
      open_document: called with a number; returns the document's tokens, from bos on, in pieces
        [n].
      advance: called after each call of the model with the number of tokens that it read.
    """
    empty, waiting = stream.lane(0), iter(numbers)
    lanes: list[_Lane | None] = [None] * stream.batch
    while True:
        starts = np.zeros(stream.batch, bool)
        for i in range(stream.batch):
            while (lane := lanes[i]) is None or lane.is_read:
                if lane is not None:
                    # a document of less than one block: nothing was read
                    state = stream.lane(i) if lane.has_begun else empty
                    yield ReadDocument(lane.number, state, lane.left)
                number = next(waiting, None)
                lanes[i] = lane = None if number is None else _Lane(number, stream, open_document)
                if lane is None:
                    break
                starts[i] = True
        reading = [lane for lane in lanes if lane is not None]
        if not reading:
            return
        rows = np.zeros((stream.batch, stream.chunk), np.int32)
        sizes = np.zeros(stream.batch, np.int64)
        for i, lane in enumerate(lanes):
            if lane is not None:
                piece = lane.take()
                rows[i, : len(piece)], sizes[i] = piece, len(piece)
        stream.skim_lanes(rows, sizes, starts)
        advance(int(sizes.sum()))


class _Lane:
    """The document that a lane reads, and what is left of it.

    Attributes:
      number: number of the document.
      has_begun: whether anything was read.
      left: [n], the tokens after the whole blocks, once all whole blocks are read.
    """

    def __init__(
        self,
        number: int,
        stream: LaneStream,
        open_document: Callable[[int], Iterable[np.ndarray]],
    ):
        self.number, self.has_begun = number, False
        self._block = stream.block
        self._pieces = rechunk(open_document(number), stream.chunk)
        self._next()

    def _next(self) -> None:
        piece = next(self._pieces, np.zeros(0, np.int32))
        whole = len(piece) // self._block * self._block
        self._piece, self.left = piece[:whole], piece[whole:]

    @property
    def is_read(self) -> bool:
        """Whether no whole block is left."""
        return len(self._piece) == 0

    def take(self) -> np.ndarray:
        """Return the tokens of the next call, [n]."""
        piece, left = self._piece, self.left
        self.has_begun = True
        # only a document's last piece has tokens after its whole blocks
        if len(left):
            self._piece = piece[:0]
        else:
            self._next()
        return piece
