"""What followed the last occurrence of each context, by search through the document."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from famjax.ops import ngrams

LENGTHS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]


def recall(tokens: np.ndarray, count: int, slots: int) -> np.ndarray:
    """Return what followed each token's contexts in a document: [t] -> [t o], -1 if nothing did.

    An occurrence is lost if a later context of as many tokens had the same slot; the hash that
    gives the slot is famjax's.
    """
    found = np.full((len(tokens), count), -1)
    for row, k in enumerate(LENGTHS[:count]):
        contexts = [tuple(tokens[i - k + 1 : i + 1]) for i in range(k - 1, len(tokens))]
        slot = _slots(contexts, slots)
        for i in range(1, len(contexts)):
            for j in reversed(range(i)):
                if contexts[j] == contexts[i]:
                    found[i + k - 1, row] = tokens[j + k]
                if slot[contexts[j]] == slot[contexts[i]]:
                    break
    return found


def recalled(
    tokens: np.ndarray, embedded: np.ndarray, kernel: np.ndarray, bias: np.ndarray, slots: int
) -> np.ndarray:
    """Return what the memory adds to the embeddings [t d] of tokens [t]."""
    added = np.zeros_like(embedded)
    table = dict(zip(tokens.tolist(), embedded, strict=True))
    for i, followers in enumerate(recall(tokens, len(kernel), slots)):
        for k, token in enumerate(followers):
            if token >= 0:
                added[i] += table[token] @ kernel[k] + bias[k]
    return added


def _slots(contexts: list[tuple[Any, ...]], slots: int) -> dict[tuple[Any, ...], int]:
    """Return the slot of each context, all of the same length."""
    if not contexts:
        return {}
    # padded, so that few shapes are compiled
    known = np.zeros((-(-len(contexts) // 256) * 256, len(contexts[0])), np.int32)
    known[: len(contexts)] = contexts
    hashes, _ = ngrams._contexts(jnp.asarray(known), jnp.zeros_like(known), [known.shape[1]])
    found = ngrams._slots(hashes[: len(contexts), -1, -1], slots).tolist()
    return dict(zip(contexts, found, strict=True))
