"""What followed the last occurrence of the latest tokens, in a table of constant size.

For each of o lengths k, the context of token i is the k tokens that end with it. `recall` returns
the token that followed the context's last earlier occurrence in the document:

    j    = max {j' < i : context_k(j') = context_k(i)}
    out  = token_{j+1}

Contexts are in a hash table with s slots for each length. A slot holds the hash of its context and
the token that followed; a newer context replaces an older one in the same slot. After n further
contexts were written, a context is still there with probability (1 - 1/s)^n: 37% for n = s. Two
contexts are confused only if their hashes of 32 bits are equal. Tokens are read and written one
after the other, which is computed for a chunk at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from famjax.core.types import Array

# tokens whose contexts are compared with each other before they are written to the table
_CHUNK = 64
# there is no such token
ABSENT = -1
# hash of no tokens; like `_mix`, it determines what saved states and exported code mean
_SEED = 0x2545F491


class NgramState(NamedTuple):
    """The table of a document, and its latest tokens.

    Attributes:
      hashes: [b o s] int32, the hash of each slot's context.
      followers: [b o s] int32, the token that followed it; ABSENT in an empty slot.
      recent: [b l] int32, the document's last l tokens, oldest first, where l is the longest
        context; ABSENT if it has fewer.
    """

    hashes: Array
    followers: Array
    recent: Array


class _Chunk(NamedTuple):
    """Tokens of a chunk [b c], their contexts [b o c], and the contexts before them.

    Attributes:
      document: int32, number of resets in the chunk up to a token.
      hashes: the hash of the context that ends with a token, by which it is looked up.
      is_context: whether the document has as many tokens.
      before: the hash of the context that ends before a token, under which it is written.
      is_written: whether there is such a context, and the token is valid.
    """

    tokens: Array
    document: Array
    hashes: Array
    is_context: Array
    before: Array
    is_written: Array


def context_lengths(count: int) -> tuple[int, ...]:
    """Return lengths of contexts: 1, 2, 3, 4, 6, 8, 12, 16, ..., which double every second time.

    The longer two contexts are, the more often they recall the same token, so not all are needed.
    """
    return (1, *((3 if n % 2 else 2) * 2 ** (n // 2 - 1) for n in range(2, count + 1)))[:count]


def init_state(batch: int, count: int, slots: int) -> NgramState:
    """Return the state of empty documents, for that many context lengths."""
    empty = jnp.full((batch, count, slots), ABSENT, jnp.int32)
    recent = jnp.full((batch, context_lengths(count)[-1]), ABSENT, jnp.int32)
    return NgramState(jnp.zeros_like(empty), empty, recent)


def recall(
    state: NgramState, tokens: Array, reset: Array | None, valid: Array | None
) -> tuple[Array, NgramState]:
    """Return what followed each token's contexts, and the state after the tokens.

    Args:
      tokens: [b t] int32.
      reset: [b t] bool, True at the first token of a document, before which the state is emptied.
      valid: [b t] bool, False at padding (`famjax.core.types.Context`).

    Returns:
      [b t o] int32, ABSENT where the context is new.
    """
    tokens = tokens.astype(jnp.int32)
    b, t = tokens.shape
    o = state.hashes.shape[1]
    longest = state.recent.shape[1]
    valid = jnp.ones((b, t), bool) if valid is None else valid
    has_resets = reset is not None
    reset = jnp.zeros((b, t), bool) if reset is None else reset & valid
    known = jnp.concatenate([state.recent, tokens], 1)
    document = jnp.cumsum(reset, 1, dtype=jnp.int32)
    documents = jnp.pad(document, ((0, 0), (longest, 0)))
    # contexts that end with each token, and with the one before the first
    hashes, is_context = _contexts(known, documents, context_lengths(o))
    continues = documents[:, longest - 1 : -1] == document
    is_written = is_context[..., :-1] & (continues & valid)[:, None]
    chunks = _Chunk(
        _split(tokens),
        jnp.cumsum(_split(reset), -1, dtype=jnp.int32),
        _split(hashes[..., 1:]),
        _split(is_context[..., 1:]),
        _split(hashes[..., :-1]),
        _split(is_written),
    )

    has_reset = (chunks.document[..., -1] > 0).any(-1) if has_resets else None

    def body(
        table: tuple[Array, Array], xs: tuple[_Chunk, Array | None]
    ) -> tuple[tuple[Array, Array], Array]:
        chunk, has_reset = xs
        found = _read(*table, chunk)
        # Always true. Because of it XLA does not write before it has read, and so writes the table
        # in place instead of copying it.
        is_read = (found >= ABSENT).all((1, 2))[:, None]
        chunk = chunk._replace(
            document=jnp.where(is_read, chunk.document, 0),
            is_written=chunk.is_written & is_read[..., None],
        )
        return _write(*table, chunk, has_reset), found

    table, found = jax.lax.scan(body, state[:2], (chunks, has_reset))
    found = jnp.moveaxis(found, 0, 2).reshape(b, o, -1)[..., :t]
    recent = _recent(state.recent, known, documents, valid)
    return jnp.where(valid[..., None], found.mT, ABSENT), NgramState(*table, recent)


def _contexts(known: Array, documents: Array, lengths: Sequence[int]) -> tuple[Array, Array]:
    """Return the hash of each context, and whether there is such a context: [b o t+1].

    They end with the last token before the call and with each of the call.

    Args:
      known: [b l+t] int32, the l tokens before the call, the longest length, and those of the call.
      documents: [b l+t] int32, number of each token's document in the call.
      lengths: number of tokens of a context, increasing.
    """
    longest = lengths[-1]
    ends = known.shape[1] - longest + 1

    def last(x: Array, k: int) -> Array:
        """Return the k-th last element of each context."""
        return x[:, longest - k :][:, :ends]

    hashes, exists = [], []
    value = jnp.full_like(last(known, 1), _SEED, jnp.uint32)
    for k in range(1, longest + 1):
        value = _mix(value, last(known, k).astype(jnp.uint32))
        if k in lengths:
            hashes.append(jax.lax.bitcast_convert_type(value, jnp.int32))
            is_known = last(known, k) != ABSENT
            exists.append(is_known & (last(documents, k) == last(documents, 1)))
    return jnp.stack(hashes, 1), jnp.stack(exists, 1)


def _mix(value: Array, token: Array) -> Array:
    """Return the hash of a hash and a token, by the finalizer of MurmurHash3: uint32."""
    h = value ^ (token * jnp.uint32(0x9E3779B1))
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def _slots(hashes: Array, slots: int) -> Array:
    unsigned = jax.lax.bitcast_convert_type(hashes, jnp.uint32)
    return (unsigned % jnp.uint32(slots)).astype(jnp.int32)


def _read(hashes: Array, followers: Array, chunk: _Chunk) -> Array:
    """Return what followed the contexts of a chunk: [b o c]."""
    slot = _slots(chunk.hashes, hashes.shape[-1])
    is_stored = jnp.take_along_axis(hashes, slot, -1) == chunk.hashes
    is_stored &= (chunk.document == 0)[:, None]
    stored = jnp.where(is_stored, jnp.take_along_axis(followers, slot, -1), ABSENT)
    # the chunk's latest write to the slot, of this context or another
    index = jnp.arange(slot.shape[-1])
    seen = (index <= index[:, None]) & (chunk.document[:, None] == chunk.document[..., None])
    written = _slots(chunk.before, hashes.shape[-1])
    same = (written[..., None, :] == slot[..., None]) & seen[:, None]
    latest = jnp.where(same & chunk.is_written[..., None, :], index, -1).max(-1)
    position = jnp.maximum(latest, 0)
    is_new = jnp.take_along_axis(chunk.before, position, -1) == chunk.hashes
    new = jnp.where(is_new, jnp.take_along_axis(chunk.tokens[:, None], position, -1), ABSENT)
    return jnp.where(chunk.is_context, jnp.where(latest < 0, stored, new), ABSENT)


def _write(
    hashes: Array, followers: Array, chunk: _Chunk, has_reset: Array | None
) -> tuple[Array, Array]:
    """Return the table after a chunk.

    Args:
      has_reset: scalar bool, whether the chunk has a reset in any row; None if there are none.
    """
    s = hashes.shape[-1]
    newest = chunk.document[:, -1:]
    if has_reset is not None:
        hashes, followers = jax.lax.cond(
            has_reset, _empty, lambda *table: table[:2], hashes, followers, newest
        )
    is_written = chunk.is_written & (chunk.document == newest)[:, None]
    slot = _slots(chunk.before, s)
    index = jnp.arange(slot.shape[-1])
    # of several writes to a slot the last one counts
    later = (slot[..., None, :] == slot[..., None]) & (index > index[:, None])
    is_last = is_written & ~(later & is_written[..., None, :]).any(-1)
    at = jnp.where(is_last, slot, s)  # s is out of bounds, so nothing is written

    @jax.vmap
    @jax.vmap
    def store(table: Array, at: Array, values: Array) -> Array:
        return table.at[at].set(values, mode="drop")

    token = jnp.broadcast_to(chunk.tokens[:, None], slot.shape)
    return store(hashes, at, chunk.before), store(followers, at, token)


def _empty(hashes: Array, followers: Array, newest: Array) -> tuple[Array, Array]:
    """Empty the rows with a reset in the chunk."""
    is_new = (newest > 0)[..., None]
    return jnp.where(is_new, 0, hashes), jnp.where(is_new, ABSENT, followers)


def _recent(recent: Array, known: Array, documents: Array, valid: Array) -> Array:
    """Return the last tokens of the newest document, padding aside: [b l]."""
    longest = recent.shape[1]
    last = jnp.where(valid, jnp.arange(valid.shape[1]), -1).max(-1) + longest
    indices = last[:, None] + jnp.arange(1 - longest, 1)
    owners = jnp.take_along_axis(documents, indices, 1)
    return jnp.where(owners == owners[:, -1:], jnp.take_along_axis(known, indices, 1), ABSENT)


def _split(x: Array) -> Array:
    """[b ... t] -> [n b ... c], padded with zeros."""
    t = x.shape[-1]
    c = min(t, _CHUNK)
    n = -(-t // c)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, n * c - t)])
    return jnp.moveaxis(padded.reshape(*x.shape[:-1], n, c), -2, 0)
