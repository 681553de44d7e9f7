"""Answers, and log-likelihoods of continuations, where each lane starts from its own state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from famjax.core.types import Array
from famjax.eval.lane_stream import LaneState, LaneStream
from famjax.tokenizers.tokenizer import Tokenizer


class ContinuationScore(NamedTuple):
    """The score of a continuation.

    Attributes:
      log_likelihood: sum of log p(token) in nats.
      is_greedy: whether each of its tokens was the likeliest one.
    """

    log_likelihood: float
    is_greedy: bool


def answer_prompts(
    stream: LaneStream,
    tokenizer: Tokenizer,
    states: Sequence[LaneState],
    prompts: Sequence[np.ndarray],
    max_tokens: Sequence[int],
    is_done: Callable[[int, str], bool],
    on_token: Callable[[], None] = lambda: None,
    stop_ids: Sequence[frozenset[int]] | None = None,
) -> list[tuple[str, bool]]:
    """Read a prompt [n] in each lane, and continue it greedily.

    Args:
      stream: a stream with at least as many lanes as there are prompts.
      states: the state of each prompt's document, at the beginning of a block.
      prompts: tokens of the prompts, [n] each.
      max_tokens: maximum number of tokens of each answer.
      is_done: called with a lane and its text so far; returns whether the answer is complete.
      on_token: called after each token that is added to the answers.
      stop_ids: ids that end each answer; None takes the tokenizer's for all.

    Returns:
      for each lane the text, and whether it was cut at its maximum number of tokens.
    """
    lanes = len(states)
    stream.set_lanes(_padded(states, stream.batch))
    stream.read_texts(prompts)
    likeliest = np.asarray(_likeliest(stream.logits, tokenizer.output_size))
    stop_ids = stop_ids or [tokenizer.stop_ids] * lanes
    written: list[list[int]] = [[] for _ in prompts]
    ended: dict[int, tuple[str, bool]] = {}
    while True:
        for lane in range(lanes):
            if lane in ended:
                continue
            token = int(likeliest[lane])
            is_stop = token in stop_ids[lane]
            if not is_stop:
                written[lane].append(token)
            text = tokenizer.decode(written[lane])
            done = is_stop or is_done(lane, text)
            if done or len(written[lane]) == max_tokens[lane]:
                ended[lane] = text, not done
        if len(ended) == lanes:
            return [ended[lane] for lane in range(lanes)]
        stream.step_lanes(likeliest[:, None])
        likeliest = np.asarray(_likeliest(stream.logits, tokenizer.output_size))
        on_token()


def score_continuations(
    stream: LaneStream,
    states: Sequence[LaneState],
    prompts: Sequence[np.ndarray],
    continuations: Sequence[np.ndarray],
) -> list[ContinuationScore]:
    """Return the score of a continuation after a prompt, one pair in each lane.

    Args:
      stream: a stream with at least as many lanes as there are prompts.
      states: the state of each prompt's document, at the beginning of a block.
      prompts: tokens of the prompts, [n] each.
      continuations: tokens of the continuations, [n] each.
    """
    lanes = len(states)
    stream.set_lanes(_padded(states, stream.batch))
    texts = [np.concatenate(pair) for pair in zip(prompts, continuations, strict=True)]
    sums, wrong = np.zeros(stream.batch), np.zeros(stream.batch, int)
    for rows, at, sizes in stream.rounds([text[:-1] for text in texts]):
        targets, counted = np.zeros_like(rows), np.zeros(rows.shape, bool)
        for lane, text in enumerate(texts):
            size = sizes[lane]
            targets[lane, :size] = text[at + 1 : at + 1 + size]
            counted[lane, :size] = np.arange(at + 1, at + 1 + size) >= len(prompts[lane])
        nll, correct = stream.lane_losses(rows, targets, sizes)
        sums -= (nll * counted).sum(1)
        wrong += (~correct.astype(bool) & counted).sum(1)
    return [ContinuationScore(float(sums[lane]), wrong[lane] == 0) for lane in range(lanes)]


@functools.partial(jax.jit, static_argnums=1)
def _likeliest(logits: Array, size: int) -> Array:
    """Return the likeliest of the first `size` tokens, from logits [b v]: [b].

    On the device, since all logits of a step may be megabytes.
    """
    return logits[:, :size].argmax(-1)


def _padded(states: Sequence[LaneState], lanes: int) -> list[LaneState]:
    """Return one state per lane; lanes that are not needed get a copy of the first."""
    return [*states, *[states[0]] * (lanes - len(states))]
