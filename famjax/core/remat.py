"""What the backward pass takes from the forward pass, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from famjax.core.types import Array

_KEPT, _ALWAYS = "kept", "always kept"


def keep(x: Array) -> Array:
    """Mark what is too dear to compute twice: a product's result, or a softmax."""
    return checkpoint_name(x, _KEPT)


def keep_always(x: Array) -> Array:
    """Mark what is small and takes a loop to compute again: it is kept though nothing else is."""
    return checkpoint_name(x, _ALWAYS)


def recomputing(body: Callable[..., Any], *, all_of_it: bool, scanned: bool) -> Callable[..., Any]:
    """Return `body`, whose backward pass computes again what lies between the products, or all.

    Norms, gates, masks and rotations cost less to compute again than to write and to read: a layer
    of block sliding window attention adds 314 MB to a training step then where it added 794 (16 x
    1,024 tokens; docs/results.md, "What the FAM costs").

    Args:
      all_of_it: keep the arguments and what `keep_always` has marked, not what `keep` has.
      scanned: `body` runs more than once in a `jax.lax.scan`, where XLA cannot merge both
        computations. A scan of one turn is no loop to it.
    """
    names = [_ALWAYS] if all_of_it else [_ALWAYS, _KEPT]
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint(body, policy=policy, prevent_cse=not scanned)
