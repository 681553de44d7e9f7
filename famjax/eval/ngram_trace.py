"""What an n-gram memory recalls along a document, and what that is worth.

A token's context of k tokens is found if the document had it before; what followed it then is right
if it is the next token now, too. Where several contexts are found, the longest one is usually
right most often (`famjax.layers.ngram_memory`).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from famjax.core.errors import UserError
from famjax.core.types import Array, Params, State
from famjax.eval.memory_trace import TracedDocument, block_losses, mean_loss, scan_document
from famjax.ops.ngrams import ABSENT, NgramState, context_lengths, recall
from famjax.stacks.residual import ResidualStack
from famjax.train.run import Run


class NgramTrace(NamedTuple):
    """Measures along a document of n blocks with w tokens, for o context lengths.

    Attributes:
      contexts: [o], the lengths of contexts.
      found: [n w o] bool, whether each token's contexts were found.
      correct: [n w o] bool, whether what followed the context is the next token.
      loss: [n], nats per token, as in `famjax.eval.memory_trace`.
      without: [n], by how much it is higher if the table is emptied before the block.
      losses: [n w], the loss of each token's next token.
      gains: [n w], by how much that is higher with an emptied table.
    """

    contexts: np.ndarray
    found: np.ndarray
    correct: np.ndarray
    loss: np.ndarray
    without: np.ndarray
    losses: np.ndarray
    gains: np.ndarray


def has_ngrams(run: Run) -> bool:
    stack = run.model.stack
    return isinstance(stack, ResidualStack) and stack.ngram_memory is not None


def trace_ngrams(run: Run, document: TracedDocument, quiet: bool = False) -> NgramTrace:
    """Read a document and measure the n-gram memory in its whole blocks.

    Raises:
      UserError: the model has no n-gram memory; or the document is shorter than two blocks and one
        token, or longer than full attention's cache.
    """
    if not has_ngrams(run):
        raise UserError("model.ngram_memory=0: the model has no n-gram memory to measure")
    out = scan_document(run, document, _trace_blocks, "n-grams", quiet)
    recalled, targets, loss, without, losses, gains = out
    contexts = np.array(context_lengths(recalled.shape[-1]))
    is_found, is_correct = recalled != ABSENT, recalled == targets[..., None]
    return NgramTrace(contexts, is_found, is_correct, loss, without, losses, gains)


@functools.partial(jax.jit, static_argnums=0)
def _trace_blocks(
    graph: Any, params: Params, state: State, tokens: Array, targets: Array, answer: Array
) -> tuple[State, tuple[Array, ...]]:
    """Read blocks [n w] one by one; return what was recalled, the targets, and the losses."""
    model = nnx.merge(graph, params)
    empty = model.init_state(1)

    def body(state: State, block: tuple[Array, ...]) -> tuple[State, tuple[Array, ...]]:
        tokens, targets, answer = block
        table = next(part for part in _parts(state) if isinstance(part, NgramState))
        first = jax.tree.map(lambda a: a[0], table)
        recalled = recall(first, tokens[None], None, None)[0][0]
        losses, after = block_losses(model, tokens[None], targets[None], state)
        emptied = jax.tree.map(_empty_table, state, empty, is_leaf=_is_table)
        gains = block_losses(model, tokens[None], targets[None], emptied)[0] - losses
        loss, without = (mean_loss(each, answer) for each in (losses, gains))
        return after, (recalled, targets, loss, without, losses, gains)

    return jax.lax.scan(body, state, (tokens, targets, answer))


def _empty_table(state: Any, empty: Any) -> Any:
    """Return an n-gram state with the table of another one; any other state as it is."""
    # the latest tokens stay: contexts that began before the block are still written
    return empty._replace(recent=state.recent) if _is_table(state) else state


def _is_table(node: Any) -> bool:
    return isinstance(node, NgramState)


def _parts(state: State) -> list[Any]:
    return jax.tree.leaves(state, is_leaf=_is_table)


def by_longest(trace: NgramTrace) -> list[dict[str, float]]:
    """Return a row for tokens without a context that was found, and for each longest one.

    Returns:
      rows with context (its length, 0 for none), share of the tokens, right (the share of them
      whose next token was recalled by it), loss and without (means over these tokens, nats); no
      rows for contexts that are the longest one found of no token.
    """
    o = len(trace.contexts)
    found, correct = (a.reshape(-1, o) for a in (trace.found, trace.correct))
    # index of the longest context that was found, o where there is none
    longest = np.where(found.any(1), o - 1 - found[:, ::-1].argmax(1), o)
    losses, gains = trace.losses.reshape(-1), trace.gains.reshape(-1)
    rows = []
    for index, context in ((o, 0), *enumerate(trace.contexts.tolist())):
        chosen = longest == index
        if chosen.any():
            share_right = correct[chosen, index].mean() if context else 0.0
            rows.append(
                {
                    "context": context,
                    "share": float(chosen.mean()),
                    "right": float(share_right),
                    "loss": float(losses[chosen].mean()),
                    "without": float(gains[chosen].mean()),
                }
            )
    return rows
