"""Sequence parallelism: halo exchange, ring scan and blockwise maps over mesh axis `sequence`.

The n blocks of a call are sharded over the D devices of the axis, n / D consecutive blocks on each.
Attention to a window needs the c entries before each block; a recurrence needs a carry. Only these
are communicated:

    halo_exchange   out[i] = concat(old, new)[i : i + c]    ppermute of the last c entries
    gather_last     out = concat(old, new)[end : end + size]    masked psum
    ring_scan       carry_{i+1}, y_i = f(carry_i, x_i)      ppermute of the carry
    blockwise_map   y_i = f(concat(old, new)[i : i + c + 1], x_i)    halo exchange, then local

`ring_scan` passes the carry through the devices sequentially, then scans each shard in parallel:

    def ring_scan(f, carry, xs):                    # on device k, xs are its own blocks
        for i in range(D):                          # ring_pass, under jax.checkpoint
            if i == k:
                start = carry
                carry = scan(f, carry, xs).carry
            carry = ppermute(carry, k -> k + 1)
        last = psum(carry if k == 0 else 0)         # after D steps device 0 holds it
        return last, scan(f, start, xs).ys

The second scan computes the results and their gradient from local residuals alone; the backward
pass rematerializes the first. If `sequence` does not divide the blocks of a call, every device
computes all of them.

Related work: the halo exchange is that of stencil codes and spatially partitioned convolutions; the
ring is that of Ring Attention (Liu et al., 2023, arXiv 2310.01889) with a recurrent carry in place
of keys and values; LASP (Sun et al., 2024, arXiv 2404.02882) passes the state of linear attention
in the same way.

    n  blocks of the call      c  entries from before the call
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from famjax.core.remat import tag_product
from famjax.core.types import Array
from famjax.parallel.traced import axis_index, sequence_shards, shard_map_sequence

_AXIS = "sequence"

# Pytrees. Xs, NonDiff and Ys are of one block, or stacked, [n ...], in the arguments. The arrays of
# Entries are [b entries ...]: entries from before the call, of the call, of both, or a block's
# window.
Shared = TypeVar("Shared")
Carry = TypeVar("Carry")
Entries = TypeVar("Entries")
Xs = TypeVar("Xs")
NonDiff = TypeVar("NonDiff")
Ys = TypeVar("Ys")
WindowFn = Callable[[Entries, tuple[Xs, NonDiff]], Ys]


def halo_exchange(old: Array, new: Array) -> Array:
    """Return the entries before each block: [b halo ...], [b n ...] -> [b n halo ...].

    Args:
      old: entries from before the call, oldest first; at least 1.
      new: one entry for each block.
    """

    def per_device(old: Array, new: Array) -> Array:
        return _stack_shifts(_receive_halo(old, new), new)

    if sequence_shards(new.shape[1]) == 1:
        return _stack_shifts(old, new)
    return shard_map_sequence(per_device, (None, 1), 1)(old, new)


def _receive_halo(old: Array, new: Array) -> Array:
    """Return the `halo` entries before this device's first block, within `shard_map_sequence`."""
    count, before = old.shape[1], old
    # a device with fewer than `halo` blocks forwards part of the halo that it received
    for _ in range(-(-count // new.shape[1])):
        tail = jnp.concatenate([before, new], 1)[:, -count:]
        before = jnp.where(_is_first(), old, _send_next(tail))
    return before


def _stack_shifts(old: Array, new: Array) -> Array:
    entries, n = jnp.concatenate([old, new], 1), new.shape[1]
    return jnp.stack([entries[:, j : j + n] for j in range(old.shape[1])], axis=2)


def gather_last(old: Array, new: Array, end: Array, size: int) -> Array:
    """Return `size` entries of each lane from index `end` [b] of the concatenated old and new.

    Entries after the last block are zero.

    Args:
      old: [b halo ...].
      new: [b n ...].
    """

    def per_device(old: Array, new: Array, end: Array) -> Array:
        # each device contributes its own entries, the first one the old ones too; the rest is zero
        old = jnp.where(_is_first(), old, 0)
        entries = _pad_ends([old, new], size, size)
        start = size + end - axis_index() * new.shape[1]
        start = jnp.clip(start, 0, entries.shape[1] - size)
        return jax.lax.psum(_slice_lanes(entries, start, size), _AXIS)

    if sequence_shards(new.shape[1]) == 1:
        return _slice_lanes(_pad_ends([old, new], 0, max(0, size - old.shape[1])), end, size)
    return shard_map_sequence(per_device, (None, 1, None), None)(old, new, end)


def _pad_ends(parts: list[Array], before: int, after: int) -> Array:
    """Concatenate [b entries ...] with that many zeros before and after."""

    def zeros(count: int) -> Array:
        return jnp.zeros_like(parts[0], shape=(parts[0].shape[0], count, *parts[0].shape[2:]))

    return jnp.concatenate([zeros(before), *parts, zeros(after)], 1)


def _slice_lanes(entries: Array, start: Array, size: int) -> Array:
    """Return entries of each lane from index `start`: [b entries ...] -> [b size ...]."""
    return jax.vmap(lambda x, i: jax.lax.dynamic_slice_in_dim(x, i, size, 0))(entries, start)


def ring_scan(
    f: Callable[[Shared, Carry, Xs], tuple[Carry, Ys]], shared: Shared, carry: Carry, xs: Xs
) -> tuple[Carry, Ys]:
    """Return `jax.lax.scan` of f over blocks; see the module's pseudocode.

    One device after the other scans its blocks for the carry; then all scan theirs in parallel for
    the results and their gradient, which saves no residuals of other devices' blocks.

    Args:
      f: shared, carry, x -> carry, y; closes over no arrays.
      shared: arguments that all blocks share, replicated.
      carry: the initial carry, which should be small.
      xs: pytree of [n ...].
    """

    def per_device(shared: Shared, carry: Carry, xs: Xs) -> tuple[Carry, Ys]:
        def scan_local(carry: Carry) -> tuple[Carry, Ys]:
            return jax.lax.scan(lambda c, x: f(shared, c, x), carry, xs)

        start, last = ring_pass(lambda carry: scan_local(carry)[0], carry)
        return last, scan_local(start)[1]

    if sequence_shards(len(jax.tree.leaves(xs)[0])) == 1:
        return jax.lax.scan(lambda c, x: f(shared, c, x), carry, xs)
    return shard_map_sequence(per_device, (None, None, 0), (None, 0))(shared, carry, xs)


def blockwise_map(
    f: WindowFn[Entries, Xs, NonDiff, Ys], old: Entries, new: Entries, xs: Xs, non_diff: NonDiff
) -> Ys:
    """Return f of each block and the `halo` entries before it, computed block by block.

    This is `jax.lax.map` over `halo_exchange`, except that the windows of halo + 1 entries of all
    blocks are never materialized together, nor are their gradients, and that f's arguments are the
    only residuals.

    Args:
      f: window, (x, non_diff) -> y; a window is a pytree of [b halo+1 ...]. It closes over no
        arrays.
      old, new: pytrees of arrays as `halo_exchange` takes them; halo may be 0.
      xs: pytree of [n ...].
      non_diff: pytree of [n ...] without gradients.
    """

    def per_device(old: Entries, new: Entries, xs: Xs, non_diff: NonDiff) -> Ys:
        return map_local(jax.tree.map(_receive_halo, old, new), new, xs, non_diff)

    def map_local(old: Entries, new: Entries, xs: Xs, non_diff: NonDiff) -> Ys:
        entries = jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), old, new)
        return _blockwise(f, entries, xs, non_diff)

    if sequence_shards(len(jax.tree.leaves(xs)[0])) == 1:
        return map_local(old, new, xs, non_diff)
    return shard_map_sequence(per_device, (None, 1, 0, 0), 0)(old, new, xs, non_diff)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blockwise(
    f: WindowFn[Entries, Xs, NonDiff, Ys], entries: Entries, xs: Xs, non_diff: NonDiff
) -> Ys:
    return _blockwise_forward(f, entries, xs, non_diff)[0]


def _blockwise_forward(
    f: WindowFn[Entries, Xs, NonDiff, Ys], entries: Entries, xs: Xs, non_diff: NonDiff
) -> tuple[Ys, tuple[Entries, Xs, NonDiff]]:
    n = len(jax.tree.leaves(xs)[0])

    def apply_block(block: tuple[Array, Xs, NonDiff]) -> Ys:
        i, x, non_diff = block
        return f(_window(entries, i, n), (x, non_diff))

    ys = jax.lax.map(apply_block, (jnp.arange(n), xs, non_diff))
    return ys, (entries, xs, non_diff)


def _blockwise_backward(
    f: WindowFn[Entries, Xs, NonDiff, Ys], residuals: tuple[Entries, Xs, NonDiff], d_ys: Ys
) -> tuple[Entries, Xs, None]:
    entries, xs, non_diff = residuals
    n = len(jax.tree.leaves(xs)[0])

    def block_backward(
        later: Entries, block: tuple[Array, Xs, NonDiff, Ys]
    ) -> tuple[Entries, tuple[Entries, Xs]]:
        i, x, non_diff, d_y = block
        _, vjp = jax.vjp(lambda window, x: f(window, (x, non_diff)), _window(entries, i, n), x)
        d_window, d_x = vjp(d_y)
        # all entries but the first are also in the next block's window; the last is in no window
        # of an earlier block
        d_window = jax.tree.map(lambda a, b: a.at[:, 1:].add(b), d_window, later)
        complete = jax.tree.map(lambda a: a[:, -1], d_window)
        return jax.tree.map(lambda a: a[:, :-1], d_window), (complete, d_x)

    zeros = jax.tree.map(lambda a: jnp.zeros_like(a[:, : a.shape[1] - n]), entries)
    d_old, (d_new, d_xs) = jax.lax.scan(
        block_backward, zeros, (jnp.arange(n), xs, non_diff, d_ys), reverse=True
    )
    d_entries = jax.tree.map(
        lambda a, b: jnp.concatenate([a, jnp.moveaxis(b, 0, 1)], 1), d_old, d_new
    )
    return d_entries, d_xs, None


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


def _window(entries: Entries, i: Array, n: int) -> Entries:
    """Return entries i to i + c of c + n."""

    def window(a: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(a, i, a.shape[1] - n + 1, 1)

    return jax.tree.map(window, entries)


def ring_pass(f: Callable[[Carry], Carry], carry: Carry) -> tuple[Carry, Carry]:
    """Apply f: carry -> carry on one device after the other, within `shard_map_sequence`.

    Returns:
      the carry that this device received; the carry after the last device, on all devices.
    """
    devices, device = jax.lax.axis_size(_AXIS), axis_index()

    # Checkpointed, so that the only residual of an iteration is its carry. All devices compute f in
    # each iteration: GSPMD may communicate over all devices in f, and XLA on CPU mixed up arrays
    # when `lax.cond` skipped f on some of them.
    @jax.checkpoint
    def apply(carry: Carry, i: Array) -> Carry:
        return jax.tree.map(lambda new, old: jnp.where(device == i, new, old), f(carry), carry)

    def iteration(state: tuple[Carry, Carry], i: Array) -> tuple[tuple[Carry, Carry], None]:
        carry, received = state
        # saved under remat: recomputing it would run the whole ring again
        carry = jax.tree.map(tag_product, carry)
        received = jax.tree.map(lambda new, old: jnp.where(device == i, new, old), carry, received)
        return (jax.tree.map(_ring_permute, apply(carry, i)), received), None

    (carry, received), _ = jax.lax.scan(iteration, (carry, carry), jnp.arange(devices))
    # after the last iteration the first device holds the final carry
    last = jax.tree.map(lambda a: jax.lax.psum(jnp.where(_is_first(), a, 0), _AXIS), carry)
    return received, last


def _is_first() -> Array:
    return axis_index() == 0


def _send_next(x: Array) -> Array:
    """Send to the next device; the first one receives zeros."""
    return jax.lax.ppermute(x, _AXIS, [(i, i + 1) for i in range(jax.lax.axis_size(_AXIS) - 1)])


def _ring_permute(x: Array) -> Array:
    devices = jax.lax.axis_size(_AXIS)
    return jax.lax.ppermute(x, _AXIS, [(i, (i + 1) % devices) for i in range(devices)])
