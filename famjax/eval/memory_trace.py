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
"""

from __future__ import annotations

import functools
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
from famjax.models.language_model import LanguageModel
from famjax.stacks.residual import ResidualStack
from famjax.tasks.passkey import evaluated_task
from famjax.train.run import Run

# number of blocks in one compiled call
_BLOCKS = 32
# number of blocks before the last one to which gradients are followed
REACH = 32


class MemoryTrace(NamedTuple):
    """Measures of a memory, as float32 arrays over blocks (n), layers with a memory (l), parts (f).

    Attributes:
      loss: [n], nats per token.
      rms, rotation, similarity, rank, mass: [n l], see the module.
      gates: [n l f]; [n 0 f] if the memory's update has no gates.
      without_each: [n f], by how much the loss exceeds `loss` if one part is set back to its
        initial value in all layers before the block.
      without: [n], the same if all parts are set back.
      rates: [n w], the mean rate of each token of a block; [n 0] for FAM, which has one gate for
        the whole block.
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


def memory_tokens(run: Run, files: str | None, length: int, passkey: bool = False) -> np.ndarray:
    """Return the tokens of the first document that has `length` tokens, [length].

    Args:
      files: texts, in the form of `data.files`; None takes a document of the run's own task.
      passkey: take a passkey document whatever the run's task is; `files` must be None then.

    Raises:
      UserError: no document has that length.
    """
    if length < 1:
        raise UserError(f"--length {length}: must be at least 1")
    if passkey or (files is None and run.config.data.task == "passkey"):
        task = evaluated_task(run.tokenizer, run.config.data.passkey)
        pieces = task.document(np.random.default_rng([0, length, 0, 2]), length)
        return np.concatenate([piece.tokens for piece in pieces])
    return text_spans(run, files, length, 1)[0]


def trace_memory(run: Run, tokens: np.ndarray, quiet: bool = False) -> MemoryTrace:
    """Read a document [t] and return the measures of the memory after each of its whole blocks.

    Raises:
      UserError: the model has no memory, or memories of different shapes; or the document is
        shorter than two blocks and one token, or longer than full attention's cache.
    """
    model, n, w = run.model, _whole_blocks(run, tokens), run.model.block_len
    graph, params = nnx.split(model)
    state, parts = model.init_state(1), []
    targets = np.stack([tokens[: n * w], tokens[1 : n * w + 1]]).reshape(2, n, w)
    with TokenProgress("memory", n * w, quiet) as progress:
        for first in range(0, n, _BLOCKS):
            blocks = targets[:, first : first + _BLOCKS]
            count = blocks.shape[1]
            blocks = np.pad(blocks, ((0, 0), (0, _BLOCKS - count), (0, 0)))
            if first:
                state, out = _trace_blocks(graph, params, state, *blocks)
            else:
                with progress.compiling():
                    state, out = _trace_blocks(graph, params, state, *blocks)
            parts.append(jax.tree.map(lambda a, count=count: np.asarray(a)[:count], out))
            progress.advance(count * w)
    return MemoryTrace(*(np.concatenate(field) for field in zip(*parts, strict=True)))


def layers_with_memory(run: Run) -> list[int]:
    """Return the indices of the layers that `trace_memory` measures, counted from the lowest."""
    check_has_memory(run)
    stack, state = run.model.stack, run.model.init_state(1)
    assert isinstance(stack, ResidualStack)
    repeats, pattern = len(stack.memories(state)[0]), stack.memory_layers(state)
    return [r * len(stack.layers) + i for r in range(repeats) for i in pattern]


def _whole_blocks(run: Run, tokens: np.ndarray) -> int:
    """Return the number of blocks of a document [t] in which every token has a next token.

    Raises:
      UserError: as `trace_memory`.
    """
    check_has_memory(run)
    w = run.model.block_len
    n = (len(tokens) - 1) // w
    if n < 2:
        raise UserError(
            f"{len(tokens):,} tokens are too few: two blocks of {w} and the token after them are "
            f"{2 * w + 1:,}; give a longer document, or raise --length"
        )
    check_capacity(run.model.stack.capacity, n * w)
    return n


def check_has_memory(run: Run) -> None:
    """Raise a `UserError` for a model without a memory, or with memories of different shapes."""
    model, stack = run.config.model, run.model.stack
    name = model.mixer if model.stack == "residual" else model.stack
    memories = stack.memories(run.model.init_state(1)) if isinstance(stack, ResidualStack) else []
    if not memories:
        raise UserError(
            f"--memory: {name} has no memory in its layers; give a run with model.mixer=fam or "
            "delta"
        )
    if len({memory.shape for memory in memories}) > 1:
        raise UserError(f"--memory: {name} has memories of different shapes; give a run with one")


@functools.partial(jax.jit, static_argnums=0)
def _trace_blocks(
    graph: Any, params: Params, state: State, tokens: Array, targets: Array
) -> tuple[State, tuple[Array, ...]]:
    """Read blocks [n w] one by one, and return the fields of `MemoryTrace`."""
    model = nnx.merge(graph, params)
    stack = model.stack
    initial = stack.memories(model.init_state(1))

    def body(state: State, block: tuple[Array, Array]) -> tuple[State, tuple[Array, ...]]:
        tokens, targets = (a[None] for a in block)
        x, ctx = model.embed(tokens), model.with_tokens(Context(), tokens)
        loss, after = _block_loss(model, tokens, targets, state)
        before, fams = (_by_layer(stack.memories(s)) for s in (state, after))
        mass = stack.attention_mass(x, state, ctx).reshape(-1, len(stack.layers))
        f = fams.shape[1]
        gates, rates = _mean_gates(stack.memory_gates(x, state, ctx), f)

        def loss_without(removed: Array) -> Array:
            memories = [
                jnp.where(removed.reshape(f, *[1] * (memory.ndim - 3)), first, memory)
                for first, memory in zip(initial, stack.memories(state), strict=True)
            ]
            replaced = stack.replace_memories(state, memories)
            return _block_loss(model, tokens, targets, replaced)[0] - loss

        without = jax.lax.map(loss_without, jnp.concatenate([jnp.eye(f), jnp.ones((1, f))]) > 0)
        measures = (
            *(_rms(fams), _rotation(before, fams), _similarity(fams), _rank(fams)),
            mass[:, np.array(stack.memory_layers(state))].reshape(-1),
            gates,
        )
        return after, (loss, *measures, without[:-1], without[-1], rates)

    return jax.lax.scan(body, state, (tokens, targets))


def _mean_gates(gates: list[Array], f: int) -> tuple[Array, Array]:
    """Return a block's mean gates [l f], and the mean rate of each token [w].

    The axes l and w are empty if the memory has no gates, or none for each token.
    """
    if not gates:
        return jnp.zeros((0, f)), jnp.zeros(0)
    by_layer = _by_layer(gates)
    if by_layer.ndim == 2:
        return by_layer, jnp.zeros(0)
    return by_layer.mean(1), by_layer.mean((0, 2))


def gradient_reach(run: Run, tokens: np.ndarray) -> np.ndarray:
    """Return how much the last block's loss depends on earlier memories: [REACH l].

    Entry k is |dL/dF| |F| of the memory F that is read by the block k blocks before the last one,
    and was thus written by the block before that. To first order it is the change of the loss for a
    relative change of the memory.

    Raises:
      UserError: as `trace_memory`.
    """
    model, n, w = run.model, _whole_blocks(run, tokens), run.model.block_len
    reach = min(REACH, n - 1)
    graph, params = nnx.split(model)
    state = model.init_state(1)
    blocks = np.stack([tokens[: n * w], tokens[1 : n * w + 1]]).reshape(2, n, w)
    state = _read_blocks(graph, params, state, blocks[0, : n - reach])
    return np.asarray(_reach(graph, params, state, *blocks[:, n - reach :]))[::-1]


@functools.partial(jax.jit, static_argnums=0)
def _read_blocks(graph: Any, params: Params, state: State, tokens: Array) -> State:
    model = nnx.merge(graph, params)

    def body(state: State, tokens: Array) -> tuple[State, None]:
        return model(tokens[None], state)[1], None

    return jax.lax.scan(body, state, tokens)[0]


@functools.partial(jax.jit, static_argnums=0)
def _reach(graph: Any, params: Params, state: State, tokens: Array, targets: Array) -> Array:
    """Return |dL/dF| |F| [n l] for the memories before each block; L is the last block's loss."""
    model = nnx.merge(graph, params)
    stack = model.stack
    n = len(tokens)
    probes = [jnp.zeros((n, *memory.shape), memory.dtype) for memory in stack.memories(state)]

    def last_loss(probes: list[Array]) -> tuple[Array, list[Array]]:
        def body(state: State, xs: Any) -> tuple[State, Any]:
            tokens, targets, probe = xs
            memories = stack.memories(state)
            moved = [memory + p for memory, p in zip(memories, probe, strict=True)]
            state = stack.replace_memories(state, moved)
            loss, state = _block_loss(model, tokens[None], targets[None], state)
            return state, (loss, memories)

        _, (losses, memories) = jax.lax.scan(body, state, (tokens, targets, probes))
        return losses[-1], memories

    grads, memories = jax.grad(last_loss, has_aux=True)(probes)

    def norms(arrays: list[Array]) -> Array:
        return jnp.stack([jax.vmap(_norms)(a) for a in arrays], 2).reshape(n, -1)

    return norms(grads) * norms(memories)


def _norms(memory: Array) -> Array:
    """Return the norm of each repeat's memory: [repeats b f ...] -> [repeats]."""
    return jnp.sqrt(jnp.square(memory.reshape(len(memory), -1)).sum(1))


def _block_loss(
    model: LanguageModel, tokens: Array, targets: Array, state: State
) -> tuple[Array, State]:
    """Return the mean loss of a block in nats, and the state after it."""
    y, state = model.stack(model.embed(tokens), state, model.with_tokens(Context(), tokens))
    return model.losses(y, targets)[0].mean(), state


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
    return jnp.where(_unit(before).any(-1), degrees, 0).mean(-1)


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
