"""Beam search over Python lists: no state, no arrays, and no end before the most tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Tokens = tuple[int, ...]
LogProbs = Callable[[Tokens], np.ndarray]


def repeats(tokens: Tokens, size: int) -> bool:
    """Whether the last n-gram of `tokens` came before in them."""
    if not size or len(tokens) < size:
        return False
    grams = [tokens[i : i + size] for i in range(len(tokens) - size + 1)]
    return grams[-1] in grams[:-1]


def search(
    log_probs: LogProbs,
    beams: int,
    max_tokens: int,
    alpha: float,
    stops: Sequence[int],
    ngram: int = 0,
    prompt: Tokens = (),
) -> list[tuple[Tokens, float]]:
    """The best `beams` hypotheses and their scores, best first.

    log_probs: from the written tokens to log p [v] of the next one.
    """
    live: list[tuple[Tokens, float]] = [((), 0.0)]
    finished: list[tuple[Tokens, float]] = []
    for length in range(1, max_tokens + 1):
        continued = []
        for written, total in live:
            for token, own in enumerate(log_probs(written)):
                if not repeats((*prompt, *written, token), ngram):
                    continued.append(((*written, token), total + float(own)))
        continued.sort(key=lambda found: -found[1])
        live = []
        for rank, (written, total) in enumerate(continued[: (1 + len(stops)) * beams]):
            if written[-1] not in stops and length < max_tokens:
                live.append((written, total))
            elif rank < beams:
                finished.append((written, total / length**alpha))
        live = live[:beams]
        finished = sorted(finished, key=lambda found: -found[1])[:beams]
    return finished


def exhaustive(
    log_probs: LogProbs, max_tokens: int, alpha: float, stops: Sequence[int]
) -> list[tuple[Tokens, float]]:
    """All hypotheses that there are and their scores, best first."""
    found = []

    def extend(written: Tokens, total: float) -> None:
        for token, own in enumerate(log_probs(written)):
            after, both = (*written, token), total + float(own)
            if token in stops or len(after) == max_tokens:
                found.append((after, both / len(after) ** alpha))
            else:
                extend(after, both)

    extend((), 0.0)
    return sorted(found, key=lambda each: -each[1])


def greedy(log_probs: LogProbs, max_tokens: int, stops: Sequence[int]) -> Tokens:
    """The likeliest token at a time, up to a stop token."""
    written: Tokens = ()
    while len(written) < max_tokens and not (written and written[-1] in stops):
        written = (*written, int(log_probs(written).argmax()))
    return written
