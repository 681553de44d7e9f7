"""The short convolution, token by token."""

from __future__ import annotations

import numpy as np


def convolve(embedded: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Return x_i + sum_j x_{i-j} W_j of a document: [t d], [k-1 d d] -> [t d]."""
    out = np.array(embedded)
    for i in range(len(embedded)):
        for j, w in enumerate(kernel, start=1):
            if i >= j:
                out[i] += embedded[i - j] @ w
    return out
