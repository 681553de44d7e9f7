"""Beam search in one compiled program, over any function of a token and a carried state.

Each row has n beams: n unfinished hypotheses are extended at once, and the n likeliest of all their
continuations stay unfinished. A hypothesis is finished when it ends with a stop token or reaches
the maximum number of tokens. Its score is

    log p(tokens) / length ** alpha

with a length penalty as in Wu et al. 2016 (7, Equation 14), without its constants. The details are
those of Hugging Face's transformers, whose `generate(num_beams=n, early_stopping="never")` finds
the same hypotheses:

- The length counts the written tokens, including the stop token.
- With e stop tokens, the (1 + e) n likeliest continuations are considered, so that at least n of
  them do not end. One that ends becomes a finished hypothesis only if it is among the first n. With
  n = 1 the search is greedy decoding.
- log p is the model's. A forbidden token gets -inf; the probabilities of the others are not
  normalized again.
- An n-gram may occur once in the prompt and the written tokens taken together.

A row is done when no unfinished hypothesis can beat the worst of the wanted finished ones. As log p
never grows, the score of an unfinished hypothesis is bounded by its current log p over the penalty
of the longest length, or of the shortest if alpha < 0. The fewer hypotheses are wanted, the earlier
a search ends.

Which hypotheses are extended depends on log p alone, so one search finds the best hypotheses for
several penalties.

The model runs on b * n rows, with the n beams of a row next to each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from famjax.core.types import Array, State

# (tokens [rows 1], state) -> (logits [rows 1 v], state)
Step = Callable[[Array, State], tuple[Array, State]]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("length_penalty",),
    meta_fields=("beams", "max_tokens", "vocab_size", "no_repeat_ngram", "best", "output_size"),
)
@dataclass(frozen=True)
class BeamSettings:
    """Settings of a search. All but the length penalty are compile-time constants.

    Attributes:
      beams: n, the number of unfinished hypotheses per row.
      max_tokens: t, the maximum number of tokens of a hypothesis.
      vocab_size: size of the vocabulary. Logits beyond it, of a padded embedding table, are masked.
      length_penalty: alpha. Above 0 it favors long hypotheses, as log p is negative. An array [a]
        of several penalties finds the best hypotheses for each.
      no_repeat_ngram: size of the n-grams that must not occur twice; 0 allows repetitions.
      best: k, the number of best hypotheses that are wanted; None is n.
      output_size: tokens from this one on are forbidden; None forbids none. Unlike those beyond
        `vocab_size` they have a probability.
    """

    beams: int
    max_tokens: int
    vocab_size: int
    length_penalty: Any = 1.0
    no_repeat_ngram: int = 0
    best: int | None = None
    output_size: int | None = None


class Hypotheses(NamedTuple):
    """The k best hypotheses of each row, best first.

    With several length penalties, each array has an axis of penalties before b.

    Attributes:
      tokens: [b k t] int32, the tokens of a hypothesis, including its stop token if it has one,
        then 0.
      lengths: [b k] int32, the number of tokens.
      scores: [b k], log p / length ** alpha. Where a row has fewer than k hypotheses, the score is
        -inf and the length 0.
    """

    tokens: Array
    lengths: Array
    scores: Array


class _Search(NamedTuple):
    """The loop's carry, apart from the model's state.

    Attributes:
      length: [], number of tokens of every unfinished hypothesis.
      tokens: [b n p+t], the prompt followed by the unfinished hypotheses, in the order of the
        states.
      log_probs: [b n], log p of the unfinished hypotheses, without the prompt's; -inf where a row
        has fewer than n.
      parents: [b n], the beams whose states the hypotheses continue from. A beam that is continued
        keeps its index, so that few states are copied.
      finished: the best finished hypotheses so far, with tokens [b k p+t].
    """

    length: Array
    tokens: Array
    log_probs: Array
    parents: Array
    finished: Hypotheses


def beam_search(
    step: Step,
    logits: Array,
    state: State,
    axes: tuple[int, ...],
    settings: BeamSettings,
    stops: Array,
    prompt: Array | None = None,
) -> Hypotheses:
    """Return the best continuations of each row.

    Args:
      step: the model's step on b * n rows. Arrays that it closes over must have these rows, too
        (see `repeat_rows`).
      logits: [b v], logits of the first token.
      state: the model's state with b rows, which may be at different positions.
      axes: for each array of the state, the axis of the rows (`Stack.row_axes`).
      settings: settings of the search.
      stops: [e] int32, tokens that end a hypothesis.
      prompt: [b p] int32, the tokens before the first one, whose n-grams count for
        `no_repeat_ngram`; -1 is padding. None counts no prompt.
    """
    b, n = len(logits), settings.beams
    first_rows = n * jnp.arange(b)[:, None]

    def extend(carry: tuple[_Search, State]) -> tuple[_Search, State]:
        search, state = carry
        state = copy_rows(state, axes, (first_rows + search.parents).reshape(-1))
        logits, state = step(_last_tokens(settings, search).reshape(b * n, 1), state)
        return _choose(settings, stops, search, logits.reshape(b, n, -1)), state

    search = _start(settings, logits, prompt)
    # each row has one hypothesis so far, in its first beam; the others have log p = -inf
    search = _choose(settings, stops, search, jnp.repeat(logits[:, None], n, 1))
    carry = search, repeat_rows(state, axes, n)
    carry = jax.lax.while_loop(lambda carry: _may_improve(settings, carry[0]), extend, carry)
    return _without_prompt(settings, carry[0].finished)


def repeat_rows(state: State, axes: tuple[int, ...], count: int) -> State:
    """Return a state in which each row is repeated `count` times, the copies next to each other."""
    return _map_rows(lambda a, axis: jnp.repeat(a, count, axis), state, axes)


def copy_rows(state: State, axes: tuple[int, ...], sources: Array) -> State:
    """Return a state whose row i is row sources[i] of the given state.

    Args:
      sources: [rows]. A row that occurs in it must stay in place: sources[r] = r.
    """
    # on a CPU, gathering 5 rows of a KV cache took as long as copying 5 to 10 of them in place
    return jax.lax.platform_dependent(
        state,
        sources,
        cpu=functools.partial(_copy_in_place, axes=axes),
        default=functools.partial(_gather, axes=axes),
    )


def _copy_in_place(state: State, sources: Array, axes: tuple[int, ...]) -> State:
    moved = sources != jnp.arange(len(sources))
    targets = jnp.argsort(~moved)

    def copy(i: Array, state: State) -> State:
        def copy_row(a: Array, axis: int) -> Array:
            row = jax.lax.dynamic_slice_in_dim(a, sources[targets[i]], 1, axis)
            return jax.lax.dynamic_update_slice_in_dim(a, row, targets[i], axis)

        return _map_rows(copy_row, state, axes)

    return jax.lax.fori_loop(0, moved.sum(), copy, state)


def _gather(state: State, sources: Array, axes: tuple[int, ...]) -> State:
    return _map_rows(lambda a, axis: jnp.take(a, sources, axis, mode="clip"), state, axes)


def _map_rows(f: Callable[[Array, int], Array], state: State, axes: tuple[int, ...]) -> State:
    leaves, tree = jax.tree.flatten(state)
    return jax.tree.unflatten(tree, [f(a, axis) for a, axis in zip(leaves, axes, strict=True)])


def _start(settings: BeamSettings, logits: Array, prompt: Array | None) -> _Search:
    """Return the search before the first token: one empty hypothesis per row, none finished."""
    b, n, t = len(logits), settings.beams, settings.max_tokens
    before = jnp.zeros((b, 0), jnp.int32) if prompt is None else prompt
    tokens = jnp.repeat(jnp.pad(before, ((0, 0), (0, t)))[:, None], n, 1)
    none = jnp.full((b, n), -jnp.inf, logits.dtype)
    shape = (*jnp.shape(settings.length_penalty), b, settings.best or n)
    finished = Hypotheses(
        jnp.zeros((*shape, tokens.shape[2]), jnp.int32),
        jnp.zeros(shape, jnp.int32),
        jnp.full(shape, -jnp.inf, logits.dtype),
    )
    zero = jnp.zeros((b, n), jnp.int32)
    return _Search(jnp.int32(0), tokens, none.at[:, 0].set(0), zero, finished)


def _choose(settings: BeamSettings, stops: Array, search: _Search, logits: Array) -> _Search:
    """Return the search after one more token, given its logits [b n v].

    c is the axis of the continuations that are considered, the likeliest first.
    """
    n, length = settings.beams, search.length + 1
    log_probs = search.log_probs[..., None] + _token_log_probs(settings, search, logits)
    b, _, v = log_probs.shape
    # a single beam ends with its first stop token, as greedy decoding does
    count = min((1 + max(len(stops), 1)) * n, n * v) if n > 1 else 1
    log_probs, index = jax.lax.top_k(log_probs.reshape(b, n * v), count)  # [b c]
    parents, token = index // v, (index % v).astype(jnp.int32)
    tokens = _take_beams(search.tokens, parents).at[:, :, _end(settings, search)].set(token)
    ends = jnp.isin(token, stops) | (length == settings.max_tokens)
    counted = ends & (jnp.arange(count) < n)
    ended = Hypotheses(
        tokens, jnp.broadcast_to(length, token.shape), jnp.where(counted, log_probs, -jnp.inf)
    )
    finished = _by_penalty(
        settings, lambda alpha, best: _keep_best(alpha, best, ended), search.finished
    )
    log_probs, chosen = jax.lax.top_k(jnp.where(ends, -jnp.inf, log_probs), n)
    order = _assign_beams(jnp.take_along_axis(parents, chosen, 1))
    chosen = jnp.take_along_axis(chosen, order, 1)
    log_probs, parents = (
        jnp.take_along_axis(a, index, 1) for a, index in ((log_probs, order), (parents, chosen))
    )
    return _Search(length, _take_beams(tokens, chosen), log_probs, parents, finished)


def _assign_beams(parents: Array) -> Array:
    """Return which continuation each beam index gets: the first one that continues that beam.

    Indices of beams without a continuation go to the remaining continuations.

    Args:
      parents: [b n], the beam that each continuation continues.
    """
    beams = jnp.arange(parents.shape[1])
    continues = parents[:, None] == beams[:, None]  # [b place continuation]
    first, is_free = continues.argmax(2), ~continues.any(2)
    is_unassigned = jnp.take_along_axis(first, parents, 1) != beams
    unassigned = jnp.argsort(~is_unassigned, 1)
    return jnp.where(is_free, jnp.take_along_axis(unassigned, is_free.cumsum(1) - 1, 1), first)


def _token_log_probs(settings: BeamSettings, search: _Search, logits: Array) -> Array:
    """Return log p of the next tokens [b n v], with -inf for forbidden tokens."""
    token = jnp.arange(logits.shape[-1])
    log_probs = jax.nn.log_softmax(jnp.where(token < settings.vocab_size, logits, -jnp.inf))
    if settings.output_size is not None:
        log_probs = jnp.where(token < settings.output_size, log_probs, -jnp.inf)
    if not settings.no_repeat_ngram:
        return log_probs
    size = settings.no_repeat_ngram
    return _forbid_repeats(log_probs, search.tokens, _end(settings, search), size)


def _forbid_repeats(log_probs: Array, tokens: Array, end: Array, size: int) -> Array:
    """Return log p [b n v], with -inf for tokens that would complete an n-gram a second time.

    Args:
      tokens: [b n s], of which the first `end` count; -1 is padding.
      size: n of the n-grams.
    """
    windows = tokens.shape[-1] - size + 1
    if windows < 1:
        return log_probs
    last = jax.lax.dynamic_slice_in_dim(tokens, end - size + 1, size - 1, 2)
    same = jnp.arange(windows) + size - 1 < end
    for i in range(size - 1):
        same = same & (tokens[..., i : i + windows] == last[..., i : i + 1])
    completing = tokens[..., size - 1 :]
    # out of bounds, which is dropped
    completing = jnp.where(same & (completing >= 0), completing, log_probs.shape[-1])
    b, n, _ = tokens.shape
    rows, beams = jnp.arange(b)[:, None, None], jnp.arange(n)[:, None]
    return log_probs.at[rows, beams, completing].set(-jnp.inf, mode="drop")


def _by_penalty(settings: BeamSettings, f: Callable[..., Any], finished: Hypotheses) -> Any:
    """Return f(alpha, finished); of several penalties the results of each, on a new first axis."""
    alpha = jnp.asarray(settings.length_penalty, jnp.result_type(float))
    return jax.vmap(f)(alpha, finished) if alpha.ndim else f(alpha, finished)


def _keep_best(alpha: Array, old: Hypotheses, ended: Hypotheses) -> Hypotheses:
    """Return the best of two sets of hypotheses, as many as in `old`. Ties go to the old ones.

    Args:
      ended: hypotheses with log p in place of scores.
    """
    new = ended._replace(scores=ended.scores / _penalty(alpha, ended.lengths[0, 0]))
    both = Hypotheses(*(jnp.concatenate(pair, 1) for pair in zip(old, new, strict=True)))
    scores, chosen = jax.lax.top_k(both.scores, old.scores.shape[1])
    lengths = jnp.take_along_axis(both.lengths, chosen, 1)
    return Hypotheses(_take_beams(both.tokens, chosen), lengths, scores)


def _may_improve(settings: BeamSettings, search: _Search) -> Array:
    """Return whether an unfinished hypothesis of any row may still be one of its best."""

    def may_improve(alpha: Array, finished: Hypotheses) -> Array:
        length = jnp.where(alpha > 0, settings.max_tokens, search.length + 1)
        highest = search.log_probs.max(1) / _penalty(alpha, length)
        return (highest > finished.scores[:, -1]).any()

    return _by_penalty(settings, may_improve, search.finished).any()


def _penalty(alpha: Array, length: Array) -> Array:
    """Return length ** alpha, []."""
    return jnp.asarray(length, alpha.dtype) ** alpha


def _last_tokens(settings: BeamSettings, search: _Search) -> Array:
    """Return the last token of each unfinished hypothesis, [b n]."""
    last = _end(settings, search) - 1
    return jax.lax.dynamic_index_in_dim(search.tokens, last, 2, keepdims=False)


def _end(settings: BeamSettings, search: _Search) -> Array:
    """Return the index in `search.tokens` after the last token of the hypotheses."""
    return search.tokens.shape[2] - settings.max_tokens + search.length


def _take_beams(tokens: Array, beams: Array) -> Array:
    """Return the tokens [b n s] of the given beams [b c]: [b c s]."""
    return jnp.take_along_axis(tokens, beams[..., None], 1)


def _without_prompt(settings: BeamSettings, found: Hypotheses) -> Hypotheses:
    """Return hypotheses without the prompt, and empty ones where the score is -inf."""
    lengths = jnp.where(jnp.isfinite(found.scores), found.lengths, 0)
    tokens = found.tokens[..., found.tokens.shape[-1] - settings.max_tokens :]
    written = jnp.arange(settings.max_tokens) < lengths[..., None]
    return Hypotheses(jnp.where(written, tokens, 0), lengths, found.scores)
