"""What goes from block to block of a call, on one device or on several that each have some blocks.

The devices of mesh axis `sequence` stand in a line, each with an equal number of whole blocks. To
the next one goes what its blocks need and no more: the last blocks' keys and values, or a memory
that is handed on. Where `sequence` does not divide a call all of it is done on each device.

    n  blocks of the call      c  entries kept from before it
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from famjax.core.remat import tag_product
from famjax.core.sharding import axis_index, sequence_shards, shard_map_sequence
from famjax.core.types import Array

_AXIS = "sequence"


def halo_exchange(old: Array, new: Array) -> Array:
    """Return the c entries before each block: [b c ...], [b n ...] -> [b n c ...].

    Args:
      old: before the call, the oldest first; at least one.
      new: one of each block.
    """

    def per_device(old: Array, new: Array) -> Array:
        return _stack_shifts(_received_halo(old, new), new)

    if sequence_shards(new.shape[1]) == 1:
        return _stack_shifts(old, new)
    return shard_map_sequence(per_device, (None, 1), 1)(old, new)


def _received_halo(old: Array, new: Array) -> Array:
    """Return the c entries before this device's first block, within `shard_map_sequence`."""
    count, before = old.shape[1], old
    # a device that has fewer blocks than are seen passes on what it was given itself
    for _ in range(-(-count // new.shape[1])):
        tail = jnp.concatenate([before, new], 1)[:, -count:]
        before = jnp.where(_is_first(), old, _send_next(tail))
    return before


def _stack_shifts(old: Array, new: Array) -> Array:
    line, n = jnp.concatenate([old, new], 1), new.shape[1]
    return jnp.stack([line[:, j : j + n] for j in range(old.shape[1])], axis=2)


def gather_last(old: Array, new: Array, end: Array, size: int) -> Array:
    """Return `size` entries of each lane from `end` [b] on, of [b c ...] and then [b n ...].

    Behind the last block all is zero.
    """

    def per_device(old: Array, new: Array, end: Array) -> Array:
        # each device gives what it has, the first one what is old too, and zeros for the rest
        old = jnp.where(_is_first(), old, 0)
        line = _pad_ends([old, new], size, size)
        start = size + end - axis_index() * new.shape[1]
        start = jnp.clip(start, 0, line.shape[1] - size)
        return jax.lax.psum(_slice_lanes(line, start, size), _AXIS)

    if sequence_shards(new.shape[1]) == 1:
        return _slice_lanes(_pad_ends([old, new], 0, size - old.shape[1]), end, size)
    return shard_map_sequence(per_device, (None, 1, None), None)(old, new, end)


def _pad_ends(parts: list[Array], before: int, behind: int) -> Array:
    """Join [b s ...] with so many zeros at the ends."""

    def zeros(count: int) -> Array:
        return jnp.zeros_like(parts[0], shape=(parts[0].shape[0], count, *parts[0].shape[2:]))

    return jnp.concatenate([zeros(before), *parts, zeros(behind)], 1)


def _slice_lanes(line: Array, start: Array, size: int) -> Array:
    """Return entries of each lane from `start` on, within the line: [b s ...] -> [b size ...]."""
    return jax.vmap(lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, size, 0))(line, start)


def ring_scan(
    f: Callable[[Any, Any, Any], tuple[Any, Any]], shared: Any, carry: Any, xs: Any
) -> tuple[Any, Any]:
    """Return `jax.lax.scan` of f over blocks, which is given what all blocks share.

    One device after the other goes through its blocks and hands the carry on; all know it at the
    end. Then each goes through its blocks again from where they began, for the results and for
    their gradient, which keeps nothing of other devices' blocks. In the backward pass what went
    before is done once more.

    Args:
      f: shared, carry, x -> carry, y; closes over no arrays.
      carry: small.
      xs: blocks on the first axis.
    """

    def per_device(shared: Any, carry: Any, xs: Any) -> tuple[Any, Any]:
        def scan_local(carry: Any) -> tuple[Any, Any]:
            return jax.lax.scan(lambda c, x: f(shared, c, x), carry, xs)

        start, last = ring_pass(lambda carry: scan_local(carry)[0], carry)
        return last, scan_local(start)[1]

    if sequence_shards(len(jax.tree.leaves(xs)[0])) == 1:
        return jax.lax.scan(lambda c, x: f(shared, c, x), carry, xs)
    return shard_map_sequence(per_device, (None, None, 0), (None, 0))(shared, carry, xs)


def blockwise_map(f: Callable[[Any, Any], Any], old: Any, new: Any, xs: Any, rest: Any) -> Any:
    """Return f of each block with the c entries before it, one after the other.

    As `jax.lax.map` of what `halo_exchange` gives, but the c + 1 entries of all blocks never are an
    array of their own, nor are their gradients, and of f nothing is kept but what went in.

    Args:
      f: window, (x, rest) -> y; a window is a pytree of [b c+1 ...]. It closes over no arrays.
      old, new: pytrees as those of `halo_exchange`; c may be 0.
      xs: pytree of [n ...].
      rest: pytree of [n ...] that has no gradient.
    """

    def per_device(old: Any, new: Any, xs: Any, rest: Any) -> Any:
        return read(jax.tree.map(_received_halo, old, new), new, xs, rest)

    def read(old: Any, new: Any, xs: Any, rest: Any) -> Any:
        line = jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), old, new)
        return _blockwise(f, line, xs, rest)

    if sequence_shards(len(jax.tree.leaves(xs)[0])) == 1:
        return read(old, new, xs, rest)
    return shard_map_sequence(per_device, (None, 1, 0, 0), 0)(old, new, xs, rest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(f: Callable[[Any, Any], Any], line: Any, xs: Any, rest: Any) -> Any:
    return _blockwise_forward(f, line, xs, rest)[0]


def _blockwise_forward(f: Callable[[Any, Any], Any], line: Any, xs: Any, rest: Any) -> Any:
    n = len(jax.tree.leaves(xs)[0])
    ys = jax.lax.map(lambda of: f(_window(line, of[0], n), of[1:]), (jnp.arange(n), xs, rest))
    return ys, (line, xs, rest)


def _blockwise_backward(f: Callable[[Any, Any], Any], saved: Any, to_ys: Any) -> Any:
    line, xs, rest = saved
    n = len(jax.tree.leaves(xs)[0])

    def back(later: Any, of: Any) -> Any:
        i, x, rest, to_y = of
        _, vjp = jax.vjp(lambda window, x: f(window, (x, rest)), _window(line, i, n), x)
        window, to_x = vjp(to_y)
        # all but the first entry are in the window of the next block too, the last in none before
        window = jax.tree.map(lambda a, b: a.at[:, 1:].add(b), window, later)
        done = jax.tree.map(lambda a: a[:, -1], window)
        return jax.tree.map(lambda a: a[:, :-1], window), (done, to_x)

    none = jax.tree.map(lambda a: jnp.zeros_like(a[:, : a.shape[1] - n]), line)
    old, (new, to_xs) = jax.lax.scan(back, none, (jnp.arange(n), xs, rest, to_ys), reverse=True)
    to_line = jax.tree.map(lambda a, b: jnp.concatenate([a, jnp.moveaxis(b, 0, 1)], 1), old, new)
    return to_line, to_xs, None


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


def _window(line: Any, i: Array, n: int) -> Any:
    """Return entries i to i + c of a line of c + n."""

    def of(a: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(a, i, a.shape[1] - n + 1, 1)

    return jax.tree.map(of, line)


def ring_pass(f: Callable[[Any], Any], carry: Any) -> tuple[Any, Any]:
    """Apply f device by device, within `shard_map_sequence`: carry -> carry.

    Returns:
      the carry that this device was given; the carry behind the last device, on all.
    """
    parts, here = jax.lax.axis_size(_AXIS), axis_index()

    # Nothing is kept of a turn but what went in. All take part in each: within f GSPMD may exchange
    # over all devices, and XLA on CPU mixed up arrays where `lax.cond` left it out on some.
    @jax.checkpoint
    def turn(carry: Any, i: Array) -> Any:
        return jax.tree.map(lambda new, old: jnp.where(here == i, new, old), f(carry), carry)

    def one(state: tuple[Any, Any], i: Array) -> tuple[tuple[Any, Any], None]:
        carry, mine = state
        carry = jax.tree.map(tag_product, carry)
        mine = jax.tree.map(lambda new, old: jnp.where(here == i, new, old), carry, mine)
        return (jax.tree.map(_ring_permute, turn(carry, i)), mine), None

    (carry, mine), _ = jax.lax.scan(one, (carry, carry), jnp.arange(parts))
    # behind the last turn the first device has it
    last = jax.tree.map(lambda a: jax.lax.psum(jnp.where(_is_first(), a, 0), _AXIS), carry)
    return mine, last


def _is_first() -> Array:
    return axis_index() == 0


def _send_next(x: Array) -> Array:
    """Send to the device behind; the first one gets zeros."""
    return jax.lax.ppermute(x, _AXIS, [(i, i + 1) for i in range(jax.lax.axis_size(_AXIS) - 1)])


def _ring_permute(x: Array) -> Array:
    parts = jax.lax.axis_size(_AXIS)
    return jax.lax.ppermute(x, _AXIS, [(i, (i + 1) % parts) for i in range(parts)])
