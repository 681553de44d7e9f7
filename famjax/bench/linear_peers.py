"""Comparison with the causal linear attention of `performer-pytorch` on equal features and values.

That package runs eagerly and without its CUDA kernel, as on a CPU: it computes cumulative sums over
tokens of phi(k) v^T, all materialized, in 128 pieces. It adds 1e-6 to the denominator, where famjax
has a minimum; for positive features the mathematics is the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from famjax.bench.linear import Inputs, chunkwise, forward_backward, random_inputs
from famjax.bench.timing import PairedTimes, compare_times, time_interleaved
from famjax.config.schema import ModelConfig
from famjax.core.optional import missing_modules
from famjax.processes import runtime

PEERS = ("torch", "performer_pytorch")
NAME = "performer-pytorch"
# with longer ones, the package needs gigabytes and seconds
LENGTHS = (512, 2048)


class LinearPeer(NamedTuple):
    """Forward and backward pass of the other package, and of the chunkwise form.

    Attributes:
      length: number of tokens.
      time: times of the package, and of famjax; the ratio is the speedup of famjax.
      max_difference: largest difference of the result or a gradient, relative to its range.
    """

    length: int
    time: PairedTimes
    max_difference: float


def is_installed() -> bool:
    """Return whether the packages of `measure_peers` are installed."""
    return not missing_modules(PEERS)


def measure_peers(
    model: ModelConfig, batch: int, longest: int, repetitions: int
) -> Iterator[LinearPeer]:
    """Measure both at each of `LENGTHS` up to `longest`."""
    for length in (n for n in LENGTHS if n <= longest):
        arrays = random_inputs(model, batch, length, model.linear.features)
        runs = {"theirs": _peer_runner(arrays), "ours": _famjax_runner(model, arrays)}
        times = time_interleaved(runs, repetitions)
        max_difference = check_peer(model, batch, length)
        yield LinearPeer(length, compare_times(times["theirs"], times["ours"]), max_difference)


def check_peer(model: ModelConfig, batch: int, length: int) -> float:
    """Return `LinearPeer.max_difference`."""
    arrays = random_inputs(model, batch, length, model.linear.features)
    theirs, ours = _peer_runner(arrays)(), jax.tree.leaves(_famjax_runner(model, arrays)())
    pairs = zip(theirs, (np.asarray(a) for a in ours), strict=True)
    return max(float(np.abs(a - b).max() / np.ptp(b)) for a, b in pairs)


def _famjax_runner(model: ModelConfig, arrays: Inputs) -> Callable[[], Any]:
    program = jax.jit(forward_backward(chunkwise(model.linear.chunk)))
    return lambda: program(*arrays)


def _peer_runner(arrays: Inputs) -> Callable[[], list[np.ndarray]]:
    """Return a function that computes the package's result and gradients of q, k and v.

    All of them are [b t h ...].
    """
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports names that Python and PyTorch have moved
        from performer_pytorch.performer_pytorch import causal_linear_attention_noncuda

    torch.set_num_threads(runtime.count_cores())
    q, k, v, to_y = (torch.tensor(np.asarray(a)).transpose(1, 2).contiguous() for a in arrays)
    for a in (q, k, v):
        a.requires_grad_()

    def run() -> Any:
        y = causal_linear_attention_noncuda(q, k, v)
        results = (y, *torch.autograd.grad(y, (q, k, v), to_y))
        return [a.detach().transpose(1, 2).numpy() for a in results]

    return run
