"""Log-likelihoods of continuations after contexts of any length, computed by streaming."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from famjax.core.types import Batch
from famjax.data.one_pass import EndOfDocuments, fewest_rows, one_pass
from famjax.data.sources import Key, Piece, Source
from famjax.eval.document_sums import DocumentSums
from famjax.eval.memory import update_tokens
from famjax.eval.progress import TokenProgress
from famjax.eval.streaming import CHUNK, Streamer, check_capacity
from famjax.train.run import Run


class Continuation(NamedTuple):
    """Tokens to score, and the context before them.

    Attributes:
      context: [n] int32, at least one token, such as bos.
      tokens: [n] int32, the tokens to score.
    """

    context: np.ndarray
    tokens: np.ndarray


class Score(NamedTuple):
    """The score of a continuation.

    Attributes:
      log_likelihood: sum of log p(token) in nats.
      is_greedy: whether each of its tokens was the likeliest one.
    """

    log_likelihood: float
    is_greedy: bool


def log_likelihoods(
    run: Run, continuations: Sequence[Continuation], batch: int = 8, quiet: bool = False
) -> list[Score]:
    """Return the scores of continuations. Each is read once, from the beginning of its context.

    Raises:
      UserError: a context and its continuation exceed full attention's KV cache.
    """
    # what has no tokens has a likelihood of 1
    scores = [Score(0.0, True) for _ in continuations]
    numbers = [i for i, each in enumerate(continuations) if len(each.tokens)]
    if not numbers:
        return scores
    sizes = [len(continuations[i].context) + len(continuations[i].tokens) for i in numbers]
    check_capacity(run.model.stack.capacity, max(sizes))
    # lanes end at about the same time if the long ones begin first
    order = sorted(range(len(numbers)), key=lambda i: -sizes[i])
    block = update_tokens(run.config)
    longest = -(-min(max(sizes), CHUNK) // block) * block
    lanes = fewest_rows([sizes[i] for i in order], min(batch, len(order)))
    streamer = Streamer(run.model, lanes, longest)
    source = _Continuations([continuations[numbers[i]] for i in order])
    sums = DocumentSums(streamer.batch)
    with TokenProgress("log-likelihoods", sum(sizes), quiet) as progress:
        for rows, (nll, correct) in _losses(streamer, source, block):
            predicted = rows["weights"] > 0
            sums.add(rows["reset"], np.stack([-nll * predicted, ~correct & predicted]))
            progress.advance(int(rows["valid"].sum()))
    for i, (total, wrong) in zip(order, sums.sums, strict=True):
        scores[numbers[i]] = Score(float(total), wrong == 0)
    return scores


def _losses(
    streamer: Streamer, source: Source, block: int
) -> Iterator[tuple[Batch[np.ndarray], tuple[np.ndarray, np.ndarray]]]:
    """Yield each batch with its losses.

    Results are fetched one batch late, so that the host prepares the next one meanwhile.
    """
    waiting: deque[Any] = deque()
    for rows in one_pass(source, streamer.batch, streamer.chunk, block):
        waiting.append((rows, streamer.lane_losses(rows)))
        if len(waiting) > 1:
            yield jax.device_get(waiting.popleft())
    yield from (jax.device_get(pair) for pair in waiting)


class _Continuations(Source):
    """A source of documents that consist of a context and its continuation.

    Each goes to the first free lane.
    """

    def __init__(self, continuations: Sequence[Continuation]):
        self._continuations, self._next = continuations, 0

    def key(self, lane: int, lanes: int, k: int, before: Key | None = None) -> Key:
        if self._next == len(self._continuations):
            raise EndOfDocuments
        self._next += 1
        return [self._next - 1]

    def open(self, key: Key, piece: int = 0) -> Iterator[Piece]:
        context, tokens = self._continuations[key[0]]
        weights = np.zeros(len(context) + len(tokens), np.float32)
        weights[len(context) :] = 1
        yield Piece(np.concatenate([context, tokens]).astype(np.int32), weights)
