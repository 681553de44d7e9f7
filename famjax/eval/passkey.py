"""Passkey retrieval from documents of any length (TransformerFAM 3.2, D.1)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from famjax.core.errors import UserError
from famjax.eval.memory import memory_report
from famjax.eval.progress import TokenProgress
from famjax.eval.streaming import Streamer, check_capacity, rechunk
from famjax.tasks.passkey import LENGTHS, Passkey, evaluated_task
from famjax.tasks.task import Request
from famjax.train.run import Run

# the fourth number of a document's seed; training uses 0 and 1
_EVALUATION, _SHIFT = 2, 3


def evaluate(run: Run, request: Request) -> list[dict[str, Any]]:
    """Return the rows of `evaluate_passkey`."""
    lengths, examples = request.lengths or LENGTHS, request.examples or 20
    return evaluate_passkey(run, lengths, examples, request.batch)


def evaluate_passkey(
    run: Run,
    lengths: Sequence[int],
    examples: int | Callable[[int], int] = 20,
    batch: int = 8,
    quiet: bool = False,
    whole: bool = True,
    anywhere: bool = False,
) -> list[dict[str, Any]]:
    """Return how often a run retrieves the passkey, by the length of the document.

    Args:
      run: of any task; keys and digits are as many as in its `data.passkey`.
      lengths: tokens of a document.
      examples: documents of each length, or a function of the length.
      batch: documents streamed together.
      quiet: no progress.
      whole: read every document from its first token. Otherwise a stack with a finite receptive
        field reads only the tokens that the answer can depend on, with bitwise the same answer.
      anywhere: the documents of a batch are shorter by a random part of a block, so that questions
        are anywhere in their block, and cross the end of one.

    Returns:
      A row for each length: length, examples, key_accuracy (all tokens of the answer correct),
      token_accuracy, key_chance and token_chance (of guessing digits), read (tokens of each
      document that were read), seconds, tokens_per_second (of those), peak_bytes (of the process so
      far).

    Raises:
      UserError: a length is too short for the task, or exceeds full attention's KV cache.
    """
    task = evaluated_task(run.tokenizer, run.config.data.passkey)
    counts = [examples(length) if callable(examples) else examples for length in lengths]
    _check_passkey(run, task, lengths, [*counts, batch])
    streamer = Streamer(run.model, min(batch, max(counts, default=1)))
    receptive_field = None if whole else run.model.stack.receptive_field
    requests = list(zip(lengths, counts, strict=True))
    rows = []

    def span_of(length: int, first: int = 0) -> tuple[int, int]:
        """Return the length of a batch of documents, and the first token to read."""
        if anywhere:
            shift = np.random.default_rng([0, length, first, _SHIFT]).integers(run.model.block_len)
            length = max(length - int(shift), task.shortest)
        return length, _first_token(task, length, receptive_field, streamer.chunk)

    total = sum((length - span_of(length)[1]) * count for length, count in requests)
    with TokenProgress("passkey", total, quiet) as progress:
        for length, count in requests:
            streamer = streamer.new_stream(min(batch, count))
            with progress.compiling():
                streamer.warm_up()
            begin = time.perf_counter()
            spans = functools.partial(span_of, length)
            correct = _retrieve(streamer, task, spans, count, progress)
            start = spans()[1]
            rows.append(_passkey_row(task, length, start, correct, time.perf_counter() - begin))
    return rows


def _first_token(task: Passkey, length: int, receptive_field: int | None, chunk: int) -> int:
    """Return the first token to read for an answer with this receptive field before its block."""
    if receptive_field is None:
        return 0
    # the answer's block starts after this, since a chunk is at least a block
    block = length - task.question_len - chunk
    return max(block - receptive_field, 0) // chunk * chunk


def _check_passkey(run: Run, task: Passkey, lengths: Sequence[int], sizes: Sequence[int]) -> None:
    """Check all lengths and sizes before reading anything."""
    for length in lengths:
        check_capacity(run.model.stack.capacity, length - 1)
        if length < task.shortest:
            raise UserError(
                f"passkey: {length} tokens are too few for needle and question, which take "
                f"{task.shortest} with tokenizer {task.tokenizer.name}; give longer lengths"
            )
    if min(sizes) < 1:
        raise UserError(f"passkey: {min(sizes)} examples or rows of a batch; take at least 1")


def _retrieve(
    streamer: Streamer,
    task: Passkey,
    span_of: Callable[[int], tuple[int, int]],
    count: int,
    progress: TokenProgress,
) -> np.ndarray:
    """Return which tokens of the answers were predicted correctly, [examples tokens] bool.

    `span_of` returns the length of a batch of documents, and the first token to read, by the number
    of the first document.
    """
    rows = []
    for first in range(0, count, streamer.batch):
        # the last batch is padded with documents that do not count, to keep the compiled shape
        numbers = range(first, first + streamer.batch)
        kept = min(streamer.batch, count - first)
        stream = streamer.new_stream()
        rows.append(_answers(stream, task, span_of(first), numbers, kept, progress)[:kept])
    return np.concatenate(rows)


def _answers(
    stream: Streamer,
    task: Passkey,
    span: tuple[int, int],
    numbers: Sequence[int],
    kept: int,
    progress: TokenProgress,
) -> np.ndarray:
    """Stream a batch of documents; return which tokens of the answers are correct, [b tokens]."""
    documents = [_tokens_and_answers(task, span, number, stream.chunk) for number in numbers]
    correct: list[np.ndarray] = [np.zeros((len(numbers), 0), bool)]
    # tokens and answer flags, [b 2 n]; the target of the last token is in the next piece
    pieces = (np.stack(together) for together in zip(*documents, strict=True))
    piece: np.ndarray | None = next(pieces)
    while piece is not None:
        after = next(pieces, None)
        line = piece if after is None else np.concatenate([piece, after[..., :1]], -1)
        tokens, targets, wanted = line[:, 0, :-1], line[:, 0, 1:], line[:, 1, 1:] == 1
        if wanted.any():
            hits = stream.losses(tokens, targets)[1]
            correct.append(hits[wanted].reshape(len(numbers), -1))
        else:
            stream.read(tokens)
        progress.advance(kept * piece.shape[-1])
        piece = after
    return np.concatenate(correct, 1)


def _tokens_and_answers(
    task: Passkey, span: tuple[int, int], number: int, size: int
) -> Iterator[np.ndarray]:
    """Yield a document in pieces [2 size]: tokens, and a flag that is 1 for the answer's."""
    length, start = span
    rng = np.random.default_rng([0, length, number, _EVALUATION])
    pieces = (
        np.stack([piece.tokens, (piece.weights == 1).astype(np.int32)])
        for piece in task.document(rng, length)
    )
    return islice(rechunk(pieces, size), start // size, None)


def _passkey_row(
    task: Passkey, length: int, start: int, correct: np.ndarray, seconds: float
) -> dict[str, Any]:
    return {
        "length": length,
        "examples": len(correct),
        "key_accuracy": float(correct.all(-1).mean()),
        "token_accuracy": float(correct.mean()),
        "key_chance": 10.0**-task.digits,
        "token_chance": 0.1,
        "read": length - start,
        "seconds": seconds,
        "tokens_per_second": (length - start) * len(correct) / seconds,
        "peak_bytes": memory_report()["peak_bytes"],
    }
