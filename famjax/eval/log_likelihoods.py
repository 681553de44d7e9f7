"""Log-likelihoods of continuations after contexts of any length, computed by streaming."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from famjax.core.types import Batch
from famjax.data.one_pass import EndOfDocuments, min_rows, one_pass
from famjax.data.sources import Key, Piece, Source
from famjax.eval.document_sums import DocumentSums
from famjax.eval.fetch_late import fetch_late
from famjax.eval.lane_answers import ContinuationScore, score_continuations
from famjax.eval.lane_stream import LaneStream, plan_lanes, read_documents
from famjax.eval.memory_usage import update_tokens
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


def log_likelihoods(
    run: Run, continuations: Sequence[Continuation], batch: int = 8, quiet: bool = False
) -> list[ContinuationScore]:
    """Return the scores of continuations.

    Each is read from the beginning of its context. A long context that several continuations have
    in common is read once.

    Raises:
      UserError: a context and its continuation exceed full attention's KV cache.
    """
    # what has no tokens has a likelihood of 1
    scores = [ContinuationScore(0.0, True) for _ in continuations]
    numbers = [i for i, each in enumerate(continuations) if len(each.tokens)]
    if not numbers:
        return scores
    sizes = [_size(continuations[i]) for i in numbers]
    check_capacity(run.model.stack.capacity, max(sizes))
    groups = _shared_contexts(continuations, numbers, run.model.block_len)
    shared = {i for group in groups for i in group}
    alone = [i for i in numbers if i not in shared]
    tokens = sum(_size(continuations[i]) for i in alone)
    tokens += sum(_shared_cost(continuations, group, 1)[1] for group in groups)
    with TokenProgress("log-likelihoods", tokens, quiet) as progress:
        by_index = _score_shared(run, continuations, groups, batch, progress) if groups else {}
        if alone:
            selected = [continuations[i] for i in alone]
            by_index |= dict(zip(alone, _score_alone(run, selected, batch, progress), strict=True))
    for i, score in by_index.items():
        scores[i] = score
    return scores


def _size(continuation: Continuation) -> int:
    return len(continuation.context) + len(continuation.tokens)


def _score_alone(
    run: Run, continuations: Sequence[Continuation], batch: int, progress: TokenProgress
) -> list[ContinuationScore]:
    """Return the scores of continuations, each read with its context."""
    sizes = [_size(each) for each in continuations]
    # lanes end at about the same time if the long ones begin first
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    block = update_tokens(run.config)
    longest = -(-min(max(sizes), CHUNK) // block) * block
    lanes = min_rows([sizes[i] for i in order], min(batch, len(order)))
    streamer = Streamer(run.model, lanes, longest)
    source = _Continuations([continuations[i] for i in order])
    sums = DocumentSums(streamer.batch)
    batches = one_pass(source, streamer.batch, streamer.chunk, block)
    losses: Iterator[tuple[Batch[np.ndarray], Any]] = (
        (rows, streamer.batch_losses(rows)) for rows in batches
    )
    for rows, (nll, correct) in fetch_late(losses):
        predicted = rows["weights"] > 0
        sums.add(rows["reset"], np.stack([-nll * predicted, ~correct & predicted]))
        progress.advance(int(rows["valid"].sum()))
    found = zip(order, sums.sums, strict=True)
    scores = {i: ContinuationScore(float(total), wrong == 0) for i, (total, wrong) in found}
    return [scores[i] for i in range(len(order))]


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


def _shared_contexts(
    continuations: Sequence[Continuation], numbers: Sequence[int], block: int
) -> list[list[int]]:
    """Return groups of continuations with the same context, if reading it once is worth it.

    It takes two more compiled programs, so it has to save a third of the tokens.
    """
    groups: dict[bytes, list[int]] = {}
    for i in numbers:
        context = np.asarray(continuations[i].context, np.int32)
        groups.setdefault(context.tobytes(), []).append(i)
    shared = [group for group in groups.values() if len(group) > 1]
    costs = [_shared_cost(continuations, group, block) for group in shared]
    alone, together = (sum(each) for each in zip(*costs, strict=True)) if costs else (0, 0)
    return shared if together < 2 / 3 * alone else []


def _shared_cost(
    continuations: Sequence[Continuation], group: Sequence[int], block: int
) -> tuple[int, int]:
    """Return the tokens that are computed if a context is read for each continuation, and once.

    What follows the context's whole blocks is read for each continuation, in whole blocks. The
    last token of a context is always part of it, since it predicts the first of a continuation.
    """
    size = len(continuations[group[0]].context)
    whole = (size - 1) // block * block
    after = [_size(continuations[i]) - whole for i in group]
    return whole * len(group) + sum(after), whole + sum(-(-n // block) * block for n in after)


def _score_shared(
    run: Run,
    continuations: Sequence[Continuation],
    groups: Sequence[Sequence[int]],
    batch: int,
    progress: TokenProgress,
) -> dict[int, ContinuationScore]:
    """Return the scores of continuations by number; each group's context is read once."""
    contexts = [np.asarray(continuations[group[0]].context, np.int32) for group in groups]
    longest = run.model.stack.call_len or CHUNK
    sizes = [len(context) - 1 for context in contexts]
    plan = plan_lanes(sizes, batch, run.model.block_len, longest)
    stream = LaneStream(run.model, plan.lanes, plan.chunk)
    answering = stream.new_stream(batch)
    with progress.compiling():
        stream.warm_up()
    order = sorted(range(len(groups)), key=lambda n: -len(contexts[n]))
    documents = read_documents(stream, order, lambda n: [contexts[n][:-1]], progress.advance)
    waiting = (
        (document.state, np.append(document.left, contexts[document.number][-1:]), i)
        for document in documents
        for i in groups[document.number]
    )
    scores: dict[int, ContinuationScore] = {}
    while together := list(islice(waiting, batch)):
        states, prompts, numbers = zip(*together, strict=True)
        tokens = [continuations[i].tokens for i in numbers]
        log_likelihoods = score_continuations(answering, states, prompts, tokens)
        scores |= dict(zip(numbers, log_likelihoods, strict=True))
        progress.advance(sum(map(len, (*prompts, *tokens))))
    return scores
