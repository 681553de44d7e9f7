"""Evaluation on toy tasks: the accuracy of answers and of whole episodes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from famjax.config.schema import ToyConfig
from famjax.core.errors import UserError
from famjax.core.types import Batch
from famjax.core.units import counted
from famjax.data.lanes import empty_row, stack_rows
from famjax.data.one_pass import EndOfDocuments, one_pass
from famjax.data.sources import Key, Piece, Source
from famjax.eval.fetch_late import fetch_late
from famjax.eval.memory_usage import memory_report
from famjax.eval.progress import TokenProgress
from famjax.eval.streaming import CHUNK, Streamer, check_capacity
from famjax.eval.text import token_positions
from famjax.experiment.ranges import HIGHEST
from famjax.tasks.task import Request
from famjax.tasks.toy import ToySource, baselines, eval_steps
from famjax.tokenizers.words import BEGIN
from famjax.train.run import Run


def evaluate(run: Run, request: Request) -> dict[str, Any]:
    """Return the results of `evaluate_toy`."""
    examples = request.examples or 1000
    # before a training begins, the episodes that its evaluations will read
    checked = (run.config.eval.examples or 1000) if request.is_trial else examples
    return evaluate_toy(
        run, request.task, request.lengths, examples, request.batch, request.quiet, checked
    )


def evaluate_toy(
    run: Run,
    task: str,
    lengths: Sequence[int] | None = None,
    examples: int = 1000,
    batch: int = 8,
    quiet: bool = False,
    checked: int | None = None,
) -> dict[str, Any]:
    """Evaluate a run on the test episodes of a toy task.

    Episodes are read in batches. If the run was trained on concatenated episodes
    (`data.toy.concatenate`), they are concatenated here, too, and the memory is carried over.

    Args:
      run: a run with the task's vocabulary.
      task: name of the task.
      lengths: numbers of steps of the test episodes; None is the config's.
      examples: number of episodes of each length.
      batch: number of episodes per batch.
      quiet: whether to hide the progress.
      checked: number of episodes, of which one must have an answer; None is `examples`.

    Returns:
      task, and rows, one for each length: length, examples, answers (their number), accuracy
      (of answers), episode_accuracy (all answers correct, of the episodes that have any), those of
      `baselines`, seconds, tokens_per_second, peak_bytes.

    Raises:
      UserError: another vocabulary, no episode has an answer, or an episode exceeds full
        attention's KV cache.
    """
    if min(examples, batch) < 1:
        raise UserError(f"{task}: examples={examples}, batch={batch}: must be at least 1")
    toy = run.config.data.toy
    if lengths and max(lengths) > HIGHEST["data.toy.steps"]:
        raise UserError(
            f"{task}: episodes of {max(lengths):,} steps are generated in memory; take at most "
            f"{HIGHEST['data.toy.steps']:,}"
        )
    rows = []
    for length in lengths or [eval_steps(task, toy)]:
        test = replace(toy, steps=length, episodes=examples)
        source = ToySource(task, test, run.tokenizer, run.config.seed, "holdout")
        _check_answers(run, task, replace(test, episodes=checked or examples))
        correct, tokens, seconds = _evaluate(
            run, source, min(batch, examples), toy.concatenate, quiet
        )
        # short programs may print nothing
        asked = correct[correct[:, 1] > 0]
        rows.append(
            {
                "length": length,
                "examples": len(correct),
                "answers": int(asked[:, 1].sum()),
                "accuracy": float(asked[:, 0].sum() / max(asked[:, 1].sum(), 1)),
                "episode_accuracy": float((asked[:, 0] == asked[:, 1]).sum() / max(len(asked), 1)),
                **baselines(task, toy, length, run.config.seed),
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
                "peak_bytes": memory_report()["peak_bytes"],
            }
        )
    return {"task": task, "rows": rows}


def _check_answers(run: Run, task: str, test: ToyConfig) -> None:
    """Raise a `UserError` if no test episode has an answer."""
    source = ToySource(task, test, run.tokenizer, run.config.seed, "holdout")
    if not any(episode.weights.any() for episode in source.episodes()):
        episodes, steps = counted(test.episodes, "test episode"), counted(test.steps, "step")
        raise UserError(
            f"{task}: {episodes} of {steps} without an answer; take longer ones, or more of them"
        )


class _EpisodePass(Source):
    """A source that yields each test episode once.

    If episodes are concatenated, each lane has one document with its share of them. If not, each
    episode goes to the first free lane.
    """

    def __init__(self, source: ToySource, concatenate: bool):
        self._source, self._concatenate, self._given = source, concatenate, 0

    def key(self, lane: int, lanes: int, k: int, before: Key | None = None) -> Key:
        if self._concatenate and k == 0:
            return self._source.key(lane, lanes, 0)
        if self._concatenate or self._given == len(self._source):
            raise EndOfDocuments
        self._given += 1
        return self._source.key(0, 1, self._given - 1)

    def open(self, key: Key, piece: int = 0) -> Iterator[Piece]:
        return self._source.open(key, piece)


def _evaluate(
    run: Run, source: ToySource, lanes: int, concatenate: bool, quiet: bool
) -> tuple[np.ndarray, int, float]:
    """Read all episodes of a source.

    Returns:
      [episodes 2], for each episode the number of correct answers, and of all answers; the number
      of tokens read; the seconds it took.
    """
    block = run.config.model.block_len
    stream = Streamer(run.model, lanes, max(CHUNK // block, 1) * block)
    counts = np.zeros((lanes, len(source) + 1, 2), np.int64)
    started = np.zeros(lanes, np.int64)
    tokens = 0
    with TokenProgress(source.name, None, quiet) as progress:
        with progress.compiling():  # now, so that timings exclude compilation
            stream.new_stream().batch_losses(stack_rows([empty_row(stream.chunk)] * lanes))
        begin = time.perf_counter()
        results = _results(run, _EpisodePass(source, concatenate), stream, block)
        for read, correct in fetch_late(results):
            started = _count_answers(counts, started, read, correct)
            tokens += int(read["valid"].sum())
            progress.advance(int(read["valid"].sum()))
    seconds = time.perf_counter() - begin
    episodes = [lane[1 : n + 1] for lane, n in zip(counts, started, strict=True)]
    return np.concatenate(episodes), tokens, seconds


def _results(
    run: Run, source: _EpisodePass, stream: Streamer, block: int
) -> Iterator[tuple[Batch[np.ndarray], Any]]:
    """Yield each batch, and whether its predictions are correct [b t], on the device."""
    lane_positions = np.zeros(stream.batch, np.int64)
    for batch in one_pass(source, stream.batch, stream.chunk, block):
        positions, lane_positions = token_positions(batch, lane_positions)
        check_capacity(run.model.stack.capacity, int(positions[batch["valid"]].max()) + 1)
        yield batch, stream.batch_losses(batch)[1]


def _count_answers(
    counts: np.ndarray, started: np.ndarray, read: Batch[np.ndarray], correct: np.ndarray
) -> np.ndarray:
    """Add the answers of a batch to `counts`; return the new `started`.

    Args:
      counts: [b episodes 2], correct and all answers of each lane's episodes; modified in place.
      started: [b], how many episodes each lane has started.
      read: the batch.
      correct: [b t], whether predictions are correct.
    """
    number = started[:, None] + np.cumsum((read["tokens"] == BEGIN) & read["valid"], axis=1)
    lane, position = np.nonzero(read["weights"] > 0)
    episode = number[lane, position]
    both = np.stack([correct[lane, position], np.ones(len(lane), bool)], axis=-1)
    np.add.at(counts, (lane, episode), both)
    return number[:, -1]
