"""Models of public PyTorch packages, for comparisons with ours (`public_weights`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from public_weights import Weights

from famjax.core.types import Array


def numpy(a: torch.Tensor) -> np.ndarray:
    return a.detach().numpy()


def draw_weights(model: torch.nn.Module) -> Weights:
    """Draw all parameters anew, so that no norm, bias or initial state is trivial."""
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for a in model.parameters():
            drawn = rng.normal(size=a.shape)
            # vectors are norms' scales, of about 1, and biases
            drawn = 1 + 0.3 * drawn if a.ndim < 2 else 1.5 * a.shape[-1] ** -0.5 * drawn
            a.copy_(torch.tensor(drawn))
    return {name: numpy(a) for name, a in model.named_parameters()}


def read_gradients(model: torch.nn.Module) -> Weights:
    """Return the gradients of all parameters that were used."""
    return {name: numpy(a.grad) for name, a in model.named_parameters() if a.grad is not None}


def approximate_gelu(model: torch.nn.Module) -> None:
    """Give modules called GEGLU the tanh approximation of GELU, which ours have."""

    def geglu(module: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        up, gate = args[0].chunk(2, -1)
        return up * torch.nn.functional.gelu(gate, approximate="tanh")

    for module in model.modules():
        if type(module).__name__ == "GEGLU":
            module.register_forward_hook(geglu)


def split_heads(kernel: Array, heads: int) -> Array:
    """Return the kernel of a projection to heads: [h*e d] -> [d h e]."""
    return kernel.T.reshape(kernel.shape[1], heads, -1)


def merge_heads(kernel: Array, heads: int) -> Array:
    """Return the kernel of a projection from heads: [d h*e] -> [h e d]."""
    return kernel.T.reshape(heads, -1, kernel.shape[0])
