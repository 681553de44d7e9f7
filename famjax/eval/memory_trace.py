"""Measures of a memory along a document: how large it is, how it changes, and what it is worth.

They are measured in each layer for the memory F after block tau. F has f parts: FAM's parts are its
tokens [d], those of a delta-rule memory are its key heads [k e].

    rms         sqrt(mean F^2); with the paper's sum as the update it grows with the document
    rotation    angle in degrees between a part of F_tau and the same part of F_{tau-1}, mean over
                parts
    similarity  cosine between two parts of F, mean over pairs
    rank        exp(entropy of s / sum(s)), s the singular values of F [f d], from 1 to min(f, d);
                for a delta-rule memory that of a head [k e], mean over heads
    mass        share of the block's attention weights on F_{tau-1}; for a delta-rule memory the
                share of norms, |read from F| / (|read from F| + |attention|)
    gates       how far each memory token moves (`famjax.layers.memory_gate`), or for a delta-rule
                memory the rates of a block's tokens for each head, mean over tokens
                (`famjax.layers.delta_memory`)
    reads       weights of the memory tokens' queries on the block's tokens, mean over layers,
                heads and memory tokens, these weighted by their gates

Losses are means over a block's tokens; of a block with the answer to a question, over the tokens of
the answer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.core.errors import UserError
from famjax.core.types import Array, Context, Params, State
from famjax.eval.attention import text_spans
from famjax.eval.progress import TokenProgress
from famjax.eval.streaming import check_capacity
from famjax.mixers.mixer import BlockWeights
from famjax.models.language_model import LanguageModel
from famjax.stacks import memory_measures
from famjax.stacks.residual import ResidualStack
from famjax.tasks.passkey import evaluated_task
from famjax.train.run import Run

# number of blocks in one compiled call
_BLOCKS = 32
# number of blocks before the last one to which gradients are followed
GRADIENT_BLOCKS = 32


class TracedDocument(NamedTuple):
    """A document to measure a memory along.

    Attributes:
      tokens: [t] int32.
      answer: [t] bool, whether a token belongs to the answer to the document's question.
    """

    tokens: np.ndarray
    answer: np.ndarray


class MemoryTrace(NamedTuple):
    """Measures of a memory, as float32 arrays over blocks (n), layers with a memory (l), parts (f).

    Attributes:
      loss: [n], nats per token, see the module.
      rms, rotation, similarity, rank, mass: [n l], see the module.
      gates: [n l f]; [n 0 f] if the memory's update has no gates.
      without_each: [n f], by how much the loss exceeds `loss` if one part is set back to its
        initial value in all layers before the block.
      without: [n], the same if all parts are set back.
      rates: [n w], the mean rate of each token of a block; [n 0] for FAM, which has one gate for
        the whole block.
      reads: [n w], see the module; [n 0] for a memory that has no queries of its own.
      gains: [n w], by how much the loss of each token's next token rises if all parts are set
        back.
    """

    loss: np.ndarray
    rms: np.ndarray
    rotation: np.ndarray
    similarity: np.ndarray
    rank: np.ndarray
    mass: np.ndarray
    gates: np.ndarray
    without_each: np.ndarray
    without: np.ndarray
    rates: np.ndarray
    reads: np.ndarray
    gains: np.ndarray


def open_document(
    run: Run, files: str | None, length: int, passkey: bool = False
) -> TracedDocument:
    """Return the first document that has `length` tokens.

    Args:
      files: texts, in the form of `data.files`; None takes a document of the run's own task.
      length: number of tokens. A passkey document gets as many more as it takes to end, with its
        answer, at the end of a block.
      passkey: take a passkey document whatever the run's task is; `files` must be None then.

    Raises:
      UserError: no document has that length.
    """
    if length < 1:
        raise UserError(f"--length {length}: must be at least 1")
    if passkey or (files is None and run.config.data.task == "passkey"):
        task = evaluated_task(run.tokenizer, run.config.data.passkey)
        w = run.model.block_len
        # the last token has no next token
        length = -(-(length - 1) // w) * w + 1
        pieces = list(task.document(np.random.default_rng([0, length, 0, 2]), length))
        weights = np.concatenate([piece.weights for piece in pieces])
        return TracedDocument(np.concatenate([piece.tokens for piece in pieces]), weights == 1)
    return as_document(text_spans(run, files, length, 1)[0])


def as_document(tokens: np.ndarray) -> TracedDocument:
    """Return tokens [t] as a document without a question."""
    return TracedDocument(tokens, np.zeros(len(tokens), bool))


def trace_memory(run: Run, document: TracedDocument, quiet: bool = False) -> MemoryTrace:
    """Read a document and return the measures of the memory after each of its whole blocks.

    Raises:
      UserError: the model has no memory, or memories of different shapes; or the document is
        shorter than two blocks and one token, or longer than full attention's cache.
    """
    check_has_memory(run)
    return MemoryTrace(*scan_document(run, document, _trace_blocks, "memory", quiet))


def scan_document(
    run: Run, document: TracedDocument, scan: Callable[..., Any], label: str, quiet: bool
) -> list[np.ndarray]:
    """Read a document's whole blocks, many in one call; return the outputs of all [n ...].

    Args:
      scan: compiled function of graph, params, state, and tokens, targets and answer [n w], which
        returns the state after the blocks and a tuple of arrays [n ...].
      label: name in the progress line.
    """
    blocks = _whole_blocks(run, document)
    n, w = blocks[0].shape
    graph, params = nnx.split(run.model)
    state, parts = run.model.init_state(1), []
    with TokenProgress(label, n * w, quiet) as progress:
        for first in range(0, n, _BLOCKS):
            part = [a[first : first + _BLOCKS] for a in blocks]
            count = len(part[0])
            part = [np.pad(a, ((0, _BLOCKS - count), (0, 0))) for a in part]
            if first:
                state, out = scan(graph, params, state, *part)
            else:
                with progress.compiling():
                    state, out = scan(graph, params, state, *part)
            parts.append([np.asarray(a)[:count] for a in out])
            progress.advance(count * w)
    return [np.concatenate(field) for field in zip(*parts, strict=True)]


def layers_with_memory(run: Run) -> list[int]:
    """Return the indices of the layers that `trace_memory` measures, counted from the lowest."""
    check_has_memory(run)
    stack, state = run.model.stack, run.model.init_state(1)
    assert isinstance(stack, ResidualStack)
    repeats, pattern = len(stack.memories(state)[0]), stack.memory_layers(state)
    return [r * len(stack.layers) + i for r in range(repeats) for i in pattern]


def _whole_blocks(run: Run, document: TracedDocument) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tokens of all blocks in which every token has a next token, the next tokens, and
    whether those belong to the answer: [n w] each.

    Raises:
      UserError: the document is too short, or too long for the model.
    """
    tokens, answer = document
    w = run.model.block_len
    n = (len(tokens) - 1) // w
    if n < 2:
        raise UserError(
            f"{len(tokens):,} tokens are too few: two blocks of {w} and the token after them are "
            f"{2 * w + 1:,}; give a longer document, or raise --length"
        )
    check_capacity(run.model.stack.capacity, n * w)
    end = n * w
    rows = (tokens[:end], tokens[1 : end + 1], answer[1 : end + 1])
    inputs, targets, is_answer = (a.reshape(n, w) for a in rows)
    return inputs, targets, is_answer


def memory_shapes(run: Run) -> set[tuple[int, ...]]:
    """Return the shapes of the memories in a model's layers."""
    stack = run.model.stack
    if not isinstance(stack, ResidualStack):
        return set()
    return {memory.shape for memory in stack.memories(run.model.init_state(1))}


def check_has_memory(run: Run) -> None:
    """Raise a `UserError` for a model without a memory, or with memories of different shapes."""
    model, shapes = run.config.model, memory_shapes(run)
    name = model.mixer if model.stack == "residual" else model.stack
    if not shapes:
        raise UserError(
            f"--memory: {name} has no memory in its layers; give a run with model.mixer=fam or "
            "delta, or with model.ngram_memory"
        )
    if len(shapes) > 1:
        raise UserError(f"--memory: {name} has memories of different shapes; give a run with one")


@functools.partial(jax.jit, static_argnums=0)
def _trace_blocks(
    graph: Any, params: Params, state: State, tokens: Array, targets: Array, answer: Array
) -> tuple[State, tuple[Array, ...]]:
    """Read blocks [n w] one by one, and return the fields of `MemoryTrace`."""
    model = nnx.merge(graph, params)
    stack = model.stack
    initial = stack.memories(model.init_state(1))

    def body(state: State, block: tuple[Array, ...]) -> tuple[State, tuple[Array, ...]]:
        tokens, targets = (a[None] for a in block[:2])
        x, ctx = model.embed(tokens), model.with_tokens(Context(), tokens)
        losses, after = block_losses(model, tokens, targets, state)
        loss = mean_loss(losses, block[2])
        before, fams = (_by_layer(stack.memories(s)) for s in (state, after))
        mass = memory_measures.attention_mass(stack, x, state, ctx).reshape(-1, len(stack.layers))
        f = fams.shape[1]
        own_gates = memory_measures.memory_gates(stack, x, state, ctx)
        own_rates = memory_measures.token_rates(stack, x, state, ctx)
        gates, rates = _mean_gates(own_gates, own_rates, f)
        weights = memory_measures.block_weights(stack, x, state, ctx)
        reads = _reads(weights, own_gates, len(block[0]))

        def increase(removed: Array) -> Array:
            memories = [
                jnp.where(removed.reshape(f, *[1] * (memory.ndim - 3)), first, memory)
                for first, memory in zip(initial, stack.memories(state), strict=True)
            ]
            replaced = stack.replace_memories(state, memories)
            return block_losses(model, tokens, targets, replaced)[0] - losses

        increases = jax.lax.map(increase, jnp.concatenate([jnp.eye(f), jnp.ones((1, f))]) > 0)
        without = jax.vmap(lambda each: mean_loss(each, block[2]))(increases)
        measures = (
            *(_rms(fams), _rotation(before, fams), _similarity(fams), _rank(fams)),
            mass[:, np.array(stack.memory_layers(state))].reshape(-1),
            gates,
        )
        return after, (loss, *measures, without[:-1], without[-1], rates, reads, increases[-1])

    return jax.lax.scan(body, state, (tokens, targets, answer))


def _reads(weights: list[BlockWeights | None], gates: list[Array], w: int) -> Array:
    """Return `MemoryTrace.reads` of a block [w]; [0] if no memory has queries.

    Args:
      weights, gates: for each layer of the mixer pattern, and for each that has gates, with a
        leading axis of its repeats.
    """
    from_memory = [each.from_memory for each in weights if each and each.from_memory is not None]
    if not from_memory:
        return jnp.zeros(0)
    by_token = jnp.stack([each[..., -w:].mean(2) for each in from_memory])  # [l repeats b f w]
    openings = jnp.stack(gates)[..., None] if gates else jnp.ones_like(by_token[..., :1])
    total = jnp.maximum(openings.sum(), 1e-30)
    return (by_token * openings).sum((0, 1, 2, 3)) / total


def _mean_gates(gates: list[Array], rates: list[Array], f: int) -> tuple[Array, Array]:
    """Return a block's mean gates [l f], and the mean rate of each token [w].

    The axes l and w are empty if the memory has no gates, or none for each token.
    """
    if gates:
        return _by_layer(gates), jnp.zeros(0)
    if rates:
        by_token = _by_layer(rates)  # [l w f]
        return by_token.mean(1), by_token.mean((0, 2))
    return jnp.zeros((0, f)), jnp.zeros(0)


def gradient_by_distance(run: Run, document: TracedDocument) -> np.ndarray:
    """Return how much the last block's loss depends on earlier memories: [GRADIENT_BLOCKS l].

    Entry k is |dL/dF| |F| of the memory F that is read by the block k blocks before the last one,
    and was thus written by the block before that. To first order it is the change of the loss for a
    relative change of the memory.

    Raises:
      UserError: as `trace_memory`.
    """
    check_has_memory(run)
    blocks = _whole_blocks(run, document)
    first = max(len(blocks[0]) - GRADIENT_BLOCKS, 1)
    graph, params = nnx.split(run.model)
    state = _read_blocks(graph, params, run.model.init_state(1), blocks[0][:first])
    return np.asarray(_scaled_gradients(graph, params, state, *(a[first:] for a in blocks)))[::-1]


@functools.partial(jax.jit, static_argnums=0)
def _read_blocks(graph: Any, params: Params, state: State, tokens: Array) -> State:
    model = nnx.merge(graph, params)

    def body(state: State, tokens: Array) -> tuple[State, None]:
        return model(tokens[None], state)[1], None

    return jax.lax.scan(body, state, tokens)[0]


@functools.partial(jax.jit, static_argnums=0)
def _scaled_gradients(
    graph: Any, params: Params, state: State, tokens: Array, targets: Array, answer: Array
) -> Array:
    """Return |dL/dF| |F| [n l] for the memories before each block; L is the last block's loss."""
    model = nnx.merge(graph, params)
    stack = model.stack
    n = len(tokens)
    probes = [jnp.zeros((n, *memory.shape), memory.dtype) for memory in stack.memories(state)]

    def last_loss(probes: list[Array]) -> tuple[Array, list[Array]]:
        def body(state: State, xs: Any) -> tuple[State, Any]:
            tokens, targets, answer, probe = xs
            memories = stack.memories(state)
            moved = [memory + p for memory, p in zip(memories, probe, strict=True)]
            state = stack.replace_memories(state, moved)
            each, state = block_losses(model, tokens[None], targets[None], state)
            return state, (mean_loss(each, answer), memories)

        _, (losses, memories) = jax.lax.scan(body, state, (tokens, targets, answer, probes))
        return losses[-1], memories

    grads, memories = jax.grad(last_loss, has_aux=True)(probes)

    def norms(arrays: list[Array]) -> Array:
        return jnp.stack([jax.vmap(_norms)(a) for a in arrays], 2).reshape(n, -1)

    return norms(grads) * norms(memories)


def _norms(memory: Array) -> Array:
    """Return the norm of each repeat's memory: [repeats b f ...] -> [repeats]."""
    return jnp.sqrt(jnp.square(memory.reshape(len(memory), -1)).sum(1))


def block_losses(
    model: LanguageModel, tokens: Array, targets: Array, state: State
) -> tuple[Array, State]:
    """Return the loss of each token of a block [1 w] in nats, [w], and the state after it."""
    y, state = model.stack(model.embed(tokens), state, model.with_tokens(Context(), tokens))
    return model.losses(y, targets)[0][0], state


def mean_loss(losses: Array, answer: Array) -> Array:
    """Return the mean of losses [w] over the tokens of the answer; over all if there are none."""
    weights = jnp.where(answer.any(), answer, 1).astype(losses.dtype)
    return (losses * weights).sum() / weights.sum()


def _by_layer(memories: list[Array]) -> Array:
    """Return one array [l ...] in the order of layers.

    Args:
      memories: for each layer of the mixer pattern, an array [repeats 1 ...].
    """
    stacked = jnp.stack(memories, 1)
    return stacked.reshape(-1, *stacked.shape[3:])


def _rms(fams: Array) -> Array:
    """[l f ...] -> [l]."""
    return jnp.sqrt(jnp.square(fams.reshape(len(fams), -1)).mean(1))


def _rotation(before: Array, after: Array) -> Array:
    """[l f ...], [l f ...] -> [l] in degrees; 0 for parts that were empty."""
    # from the chord, since the arccos of a cosine near 1 has no precision in float32
    chord = jnp.sqrt(jnp.square(_unit(after) - _unit(before)).sum(-1))
    degrees = jnp.rad2deg(2 * jnp.arcsin(jnp.minimum(chord / 2, 1)))
    # of equal parts, too, the norms may be rounded differently
    is_changed = (before != after).reshape(*before.shape[:2], -1).any(-1)
    return jnp.where(_unit(before).any(-1) & is_changed, degrees, 0).mean(-1)


def _similarity(fams: Array) -> Array:
    """[l f ...] -> [l]; pairs with an empty part count as 0, and a single part gives 0."""
    f = fams.shape[1]
    unit = _unit(fams)
    cosines = jnp.einsum("lfd,lgd->lfg", unit, unit) * (1 - jnp.eye(f))
    return cosines.sum((1, 2)) / max(f * (f - 1), 1)


def _rank(fams: Array) -> Array:
    """[l f d] or [l g k e] -> [l]."""
    share = jnp.linalg.svd(fams, compute_uv=False)
    share = share / (share.sum(-1, keepdims=True) + 1e-30)
    ranks = jnp.exp(-(share * jnp.log(share + 1e-12)).sum(-1))
    return ranks.reshape(len(fams), -1).mean(-1)


def _unit(fams: Array) -> Array:
    """[l f ...] -> [l f d], of unit norm."""
    x = fams.reshape(*fams.shape[:2], -1)
    return x / jnp.sqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-30)
