"""What the backward pass takes from the forward pass, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from famjax.core.types import Array

_KEPT, _ATTENDED, _ALWAYS = "kept", "attended", "always kept"
# of `model.remat`
_NAMES = {"none": (_KEPT, _ALWAYS), "attention": (_ATTENDED, _ALWAYS)}


def tag_product(x: Array) -> Array:
    """Mark what is too dear to compute twice: a product's result, or a softmax."""
    return checkpoint_name(x, _KEPT)


def tag_attention(x: Array) -> Array:
    """Mark what attention gave: as small as a layer's input, and dear where scores are not kept."""
    return checkpoint_name(x, _ATTENDED)


def tag_small(x: Array) -> Array:
    """Mark what is small and takes a loop to compute again: it is kept though nothing else is."""
    return checkpoint_name(x, _ALWAYS)


def remat_with_policy(body: Callable[..., Any], remat: str, *, scanned: bool) -> Callable[..., Any]:
    """Return `body`, whose backward pass computes again what lies between the products, or more.

    Norms, gates, masks and rotations cost less to compute again than to write and to read: a layer
    of block sliding window attention adds 314 MB to a training step then where it added 794 (16 x
    1,024 tokens; docs/results.md, "What the FAM costs").

    Args:
      remat: `model.remat`. With "none" what `keep` has marked is kept, with "attention" what
        `tag_attention` has; else the arguments alone, and what `tag_small` has marked.
      scanned: `body` runs more than once in a `jax.lax.scan`, where XLA cannot merge both
        computations. A scan of one turn is no loop to it.
    """
    policy = jax.checkpoint_policies.save_only_these_names(*_NAMES.get(remat, (_ALWAYS,)))
    return jax.checkpoint(body, policy=policy, prevent_cse=not scanned)
