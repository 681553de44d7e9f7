"""Where blocks and their feedback memory attend to (TransformerFAM F, Figure 12)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.config.derived import mixer_pattern
from famjax.core.errors import UserError
from famjax.core.types import Array, Context, Params, State
from famjax.eval.progress import TokenProgress
from famjax.eval.streaming import check_capacity
from famjax.mixers.mixer import BlockWeights
from famjax.mixers.window import WindowAttention
from famjax.stacks import memory_measures
from famjax.stacks.residual import ResidualStack
from famjax.train.run import Run

# maximum number of blocks in a call whose gradient is taken
GRADIENT_BLOCKS = 32


class LayerAttention(NamedTuple):
    """The attention of a layer.

    Attributes:
      number: index of the layer, from 0.
      mixer: name of the layer's mixer.
      memories, segments: how many keys of a query lie in feedback memories, and in memory segments.
      mass: [h 3], the shares of the blocks' attention weights on memory segments, on memories and
        on the block itself, averaged over all blocks.
      memory_mass: [h 2], the shares of the memory's attention weights on itself and on the block
        that it reads; None without a memory.
      weights: attention weights of the last block, without the axis of lanes, on the device.
    """

    number: int
    mixer: str
    memories: int
    segments: int
    mass: np.ndarray
    memory_mass: np.ndarray | None
    weights: BlockWeights


def measure_attention(
    run: Run, tokens: np.ndarray, needed: Sequence[int] = (), quiet: bool = False
) -> list[LayerAttention]:
    """Read the whole blocks of a document [t]; return the attention of every layer with blocks.

    Args:
      needed: indices of layers that must have blocks.

    Raises:
      UserError: no layer has blocks, or a needed layer has none, or the document is shorter than
        a block.
    """
    model = run.model
    w = model.block_len
    stack = model.stack
    n = len(tokens) // w
    if not isinstance(stack, ResidualStack):
        raise UserError(
            f"--attention: model.stack={run.config.model.stack} has no such maps; give a run with "
            "model.stack=residual"
        )
    if not n:
        raise UserError(f"--length {len(tokens)}: less than a block of {w}; give more")
    check_capacity(stack.capacity, n * w)
    pattern = mixer_pattern(run.config.model)
    graph, params = nnx.split(model)
    state = model.init_state(1)
    sums: Any = None
    with TokenProgress("attention", n * w, quiet) as progress:
        for block in tokens[: n * w].reshape(n, 1, w):
            found, masses, state = _read_block(graph, params, state, block)
            if sums is None:
                _check_layers(run, found, needed)
            masses = jax.device_get(masses)
            sums = masses if sums is None else jax.tree.map(np.add, sums, masses)
            progress.advance(w)
    layers = []
    for repeat in range(stack.repeats):
        for i, (name, weights, total) in enumerate(zip(pattern, found, sums, strict=True)):
            if weights is None:
                continue
            number = repeat * len(pattern) + i
            mass, memory_mass = jax.tree.map(lambda a, repeat=repeat: a[repeat] / n, total)
            of_repeat = jax.tree.map(lambda a, repeat=repeat: a[repeat], weights)
            keys = weights.memory.shape[-1], weights.segments.shape[-1]
            layers.append(LayerAttention(number, name, *keys, mass, memory_mass, of_repeat))
    return layers


def _check_layers(run: Run, found: Sequence[BlockWeights | None], layers: Sequence[int]) -> None:
    """Refuse a model without blocks, and requested layers that do not exist or have no blocks."""
    model = run.config.model
    if not any(each is not None for each in found):
        raise UserError(
            f"--attention: model.mixer={model.mixer} has no blocks; give a run with fam, delta, "
            "bswa or swa"
        )
    known = [i for i in range(model.layers) if found[i % len(found)] is not None]
    if wrong := [i for i in layers if i not in known]:
        raise UserError(
            f"--layers {','.join(map(str, wrong))}: is no layer with blocks; the run has "
            f"{', '.join(map(str, known))}"
        )


@functools.partial(jax.jit, static_argnums=0)
def _read_block(
    graph: Any, params: Params, state: State, tokens: Array
) -> tuple[list[BlockWeights | None], list[Any], State]:
    """Return the attention weights of a block [1 w], their masses, and the state after the block.

    Weights and masses are lists over the layers of the mixer pattern.
    """
    model = nnx.merge(graph, params)
    x, ctx = model.embed(tokens), model.with_tokens(Context(), tokens)
    weights = memory_measures.block_weights(model.stack, x, state, ctx)
    # the only lane
    first = jax.tree.map(lambda a: a[:, 0], weights)
    masses = [None if each is None else _masses(each) for each in first]
    return first, masses, model.stack(x, state, ctx)[1]


def _masses(weights: BlockWeights) -> tuple[Array, Array | None]:
    """Return `mass` and `memory_mass` of a block, [repeats h 3] and [repeats h 2]."""
    parts = [weights.segments, weights.memory, weights.block]
    mass = jnp.stack([_mean_mass(part) for part in parts], -1)
    if weights.from_memory is None:
        return mass, None
    f = weights.from_memory.shape[-2]
    own = jnp.split(weights.from_memory, [f], -1)
    return mass, jnp.stack([_mean_mass(part) for part in own], -1)


def _mean_mass(weights: Array) -> Array:
    return weights.astype(jnp.float32).sum(-1).mean(-1)


def gradient_by_block(run: Run, tokens: np.ndarray, stop_gradient: bool = False) -> np.ndarray:
    """Return how much the last block's loss depends on the tokens of each block: [n].

    Entry k is |dL/dx|, where x are the embeddings of the block that is k blocks before the last
    one. The last `GRADIENT_BLOCKS` blocks of the document [t] are read with an empty memory. This
    measures the effective receptive field; the theoretical one is depth times window
    (TransformerFAM 2.1, Figure 1d).

    Args:
      stop_gradient: whether to stop the gradient into memory segments, as training with `bswa_sg`
        does.

    Raises:
      UserError: the document is shorter than a block and one more token.
    """
    w = run.model.block_len
    whole = (len(tokens) - 1) // w
    n = min(whole, GRADIENT_BLOCKS)
    if n < 1:
        raise UserError(f"--length {len(tokens)}: less than a block of {w} and a token; give more")
    check_capacity(run.model.stack.capacity, n * w)
    tokens = tokens[(whole - n) * w : whole * w + 1]
    graph, params = nnx.split(run.model)
    blocks = _gradient(graph, params, tokens[None, :-1], tokens[None, 1:], stop_gradient)
    return np.asarray(blocks)[::-1]


@functools.partial(jax.jit, static_argnums=(0, 4))
def _gradient(
    graph: Any, params: Params, tokens: Array, targets: Array, stop_gradient: bool
) -> Array:
    model = nnx.merge(graph, params)
    w = model.block_len
    if stop_gradient:
        for layer in model.stack.layers:
            for module in (layer.mixer, getattr(layer.mixer, "window", None)):
                if isinstance(module, WindowAttention):
                    module.stop_gradient = True

    def last_loss(x: Array) -> Array:
        y, _ = model.stack(x, model.init_state(1), model.with_tokens(Context(), tokens))
        return model.losses(y[:, -w:], targets[:, -w:])[0].mean()

    grad = jax.grad(last_loss)(model.embed(tokens))
    return jnp.linalg.norm(grad.reshape(grad.shape[1] // w, -1), axis=-1)
