"""Rematerialization: `checkpoint_name` tags, and the policies of `model.remat` that save them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from famjax.core.types import Array

_PRODUCT, _ATTENTION, _SMALL = "product", "attention", "small"
# model.remat -> names that are saved
_SAVED_NAMES = {"none": (_PRODUCT, _SMALL), "attention": (_ATTENTION, _SMALL)}


def tag_product(x: Array) -> Array:
    """Tag an array that is expensive to recompute: a matrix product or a softmax."""
    return checkpoint_name(x, _PRODUCT)


def tag_attention(x: Array) -> Array:
    """Tag attention's output: as small as a layer's input, expensive without saved scores."""
    return checkpoint_name(x, _ATTENTION)


def tag_small(x: Array) -> Array:
    """Tag an array that is small and takes a scan to recompute; every policy saves it."""
    return checkpoint_name(x, _SMALL)


def remat_with_policy(body: Callable[..., Any], remat: str, *, scanned: bool) -> Callable[..., Any]:
    """Return `jax.checkpoint` of `body`, which saves arrays as `remat` says and recomputes others.

    Norms, gates, masks and rotations are cheaper to recompute than to write and read. Without
    saving them, a layer of block sliding window attention adds 314 MB to a training step instead of
    794 (16 x 1,024 tokens; docs/results.md, "What the FAM costs").

    Args:
      remat: `model.remat`. "none" saves what `tag_product` tags, "attention" what `tag_attention`
        tags, and any other value only the arguments. All of them save what `tag_small` tags.
      scanned: whether `body` runs more than once in a `jax.lax.scan`, where XLA cannot merge
        forward pass and recomputation (CSE). XLA unrolls a scan of one iteration.
    """
    policy = jax.checkpoint_policies.save_only_these_names(*_SAVED_NAMES.get(remat, (_SMALL,)))
    return jax.checkpoint(body, policy=policy, prevent_cse=not scanned)
