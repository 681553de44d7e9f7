"""Blocks of a call: their boundaries and inputs, and where memories are reset."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from famjax.core.lanes import select_state
from famjax.core.types import Array, Context, PyTree, State
from famjax.mixers.mixer import Mixer


class Blocks(NamedTuple):
    """Document boundaries and padding of a call, by block.

    Attributes:
      reset: [b n] bool, whether a document starts with the block.
      valid: [b n] int32, number of valid tokens of the block; padding follows them.
      start: [b] int32, index of the first block of the lane's newest document; 0 if it began before
        the call.
      end: [b] int32, index after the last full block of the lane's newest document.
      fresh: [b] bool, whether that document started within the call.
      all_padding: [b] bool, whether the lane has only padding.
    """

    reset: Array
    valid: Array
    start: Array
    end: Array
    fresh: Array
    all_padding: Array

    @classmethod
    def from_context(cls, ctx: Context, batch: int, tokens: int, block_len: int) -> Blocks:
        n = tokens // block_len
        reset = jnp.zeros((batch, n), bool) if ctx.reset is None else ctx.reset[:, ::block_len]
        if ctx.valid is None:
            count = jnp.full((batch, n), block_len, jnp.int32)
        else:
            count = ctx.valid.reshape(batch, n, block_len).sum(-1, dtype=jnp.int32)
        index = jnp.arange(n, dtype=jnp.int32)
        start = jnp.where(reset, index, 0).max(-1)
        full = (count == block_len) & (index >= start[:, None])
        end = start + full.sum(-1, dtype=jnp.int32)
        return cls(reset, count, start, end, reset.any(-1), ~(count > 0).any(-1))

    def blocks_since_reset(self, before: Array) -> Array:
        """Return how many blocks of its document precede each block: [b n].

        Args:
          before: [b], number of the current document's blocks before the call.
        """
        index = jnp.arange(self.reset.shape[1], dtype=jnp.int32)
        start = jax.lax.cummax(jnp.where(self.reset, index, -1), axis=1)
        return jnp.where(start < 0, index + before[:, None], index - start)


class BlockInputs(NamedTuple):
    """A call's queries, keys and values [b n w h|g e].

    Attributes:
      q, k, v: queries, keys and values; queries and keys are rotated by their offset in their own
        block, and keys are not smeared.
      seen_k: keys as queries see them: `k`, or the smeared keys (`model.smeared_keys`).
      blocks: boundaries and padding of the call's blocks.
      unrotated_q: queries without positions.
    """

    q: Array
    k: Array
    v: Array
    seen_k: Array
    blocks: Blocks
    unrotated_q: Array


class ExtraKV(NamedTuple):
    """Keys and values that blocks attend to in addition to memory segments and themselves.

    Attributes:
      k, v: [b n s g e], keys rotated to their positions relative to the block's start.
      visible: [b n s] bool.
    """

    k: Array
    v: Array
    visible: Array

    def mask(self, queries: int) -> Array:
        """Return the mask of a block's queries over these keys, the same for all: [b n w s]."""
        *lead, s = self.visible.shape
        return jnp.broadcast_to(self.visible[..., None, :], (*lead, queries, s))


def to_block_major(tree: PyTree) -> PyTree:
    """Return a tree's arrays [b n ...] as [n b ...], the order of a scan over blocks."""
    return jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), tree)


def from_block_major(tree: PyTree) -> PyTree:
    """Return a tree's arrays [n b ...], such as the results of a scan, as [b n ...]."""
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1), tree)


def join_keys(segments: Array, extra: Array | None, block: Array, axis: int) -> Array:
    """Concatenate memory segments, `ExtraKV` and a block's own keys along the axis of keys.

    All keys, values and masks are joined here, so that they have one order. Dropout masks depend on
    it, and measures take the weights apart by it.
    """
    return jnp.concatenate([a for a in (segments, extra, block) if a is not None], axis)


def memory_resets(blocks: Blocks, ctx: Context, block_len: int) -> Array:
    """Return before which blocks of a call the memory is reset: [b n] bool.

    They are the first blocks of documents, except of those that begin with the memory of the
    document before (`Context.pass_state`).
    """
    if ctx.pass_state is None:
        return blocks.reset
    return blocks.reset & ~ctx.pass_state[:, ::block_len]


def start_documents(mixer: Mixer, state: State, ctx: Context) -> State:
    """Return the state before one token: that of a new document in lanes where one starts.

    It is the counterpart of `memory_resets` in `step`.
    """
    if ctx.reset is None:
        return state
    fresh = mixer.init_state(ctx.reset.shape[0], ctx.prompt)
    if ctx.pass_state is not None:
        fresh = select_state(ctx.pass_state[:, 0], mixer.pass_state(fresh, state), fresh)
    return select_state(ctx.reset[:, 0], fresh, state)
