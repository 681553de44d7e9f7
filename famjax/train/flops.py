"""Model FLOPs of a token, and the peak FLOP/s of a device.

Model FLOPs (PaLM, arXiv 2204.02311, appendix B): the multiplications and additions of the matrix
products in the model's definition, two for each multiplied pair. Not counted: norms, softmax,
activations, rotary embeddings, the embedding lookup, and rematerialization.
"""

from __future__ import annotations

import functools
import itertools
import math
import time

import jax
import jax.numpy as jnp

from famjax.config.derived import cutoffs, is_segmented, kept_segments, layer_mixers
from famjax.config.resolved import ResolvedConfig, ResolvedModelConfig, sizes
from famjax.config.schema import ModelConfig
from famjax.mixers import MIXERS
from famjax.mixers.mixer import attention_flops, layer_weights

MATMUL_SECONDS = 0.08

# Dense bfloat16 FLOP/s of one device, by words of `device_kind`: the first entry whose words all
# occur is used. Sources: NVIDIA's data sheets (without sparsity), cloud.google.com/tpu/docs.
_PEAKS: tuple[tuple[frozenset[str], float], ...] = tuple(
    (frozenset(words.split()), peak)
    for words, peak in [
        ("h200 nvl", 836e12),
        ("h200", 989e12),
        ("h100 pcie", 756e12),
        ("h100 nvl", 836e12),
        ("h100", 989e12),
        ("a100", 312e12),
        ("l4", 121e12),
        ("t4", 65e12),  # float16: it has no bfloat16
        ("rtx 4090", 165e12),
        ("tpu v4", 275e12),
        ("tpu v5 lite", 197e12),
        ("tpu v5e", 197e12),
        ("tpu v5p", 459e12),
        ("tpu v5", 459e12),
        ("tpu v6 lite", 918e12),
        ("tpu v6e", 918e12),
    ]
)


def forward_flops(model: ResolvedModelConfig, computed: bool = False) -> float:
    """Model FLOPs of the forward pass of one token, in a long document.

    Args:
      computed: count all query-key pairs in layers of the residual stack, not only unmasked ones.

    Raises:
      ValueError: the vocabulary size is not resolved.
    """
    if not model.vocab_size:
        raise ValueError("vocab_size 0 stands for the tokenizer's: fill it in first")
    encoder = _encoder_flops(model)
    if model.stack == "lstm":
        return model.layers * 2 * 8 * model.width**2 + _vocabulary_flops(model)
    if is_segmented(model):
        return _segmented_flops(model) + _vocabulary_flops(model)
    if model.stack != "residual":
        return _feedback_flops(model) + encoder + _vocabulary_flops(model)
    layers = (MIXERS[name].flops(model, computed) for name in layer_mixers(model))
    return sum(layers) + encoder + _vocabulary_flops(model)


def _encoder_flops(model: ResolvedModelConfig) -> float:
    """Model FLOPs of one token of a source, and of one token's attention to the source.

    Sources are taken to have as many tokens as targets, few against the width: the products of
    queries and keys are not counted.
    """
    (d, h, g, e, _), encoder = sizes(model), model.encoder
    if not encoder.layers:
        return 0.0
    cross = 2 * d * (2 * h * e + 2 * g * e)
    if encoder.cross == "linear":
        cross += 2 * encoder.features * e * (2 * h + 2 * g)
    return encoder.layers * 2 * layer_weights(model) + model.layers * cross


def training_flops(model: ResolvedModelConfig, only: str = "all", computed: bool = False) -> float:
    """Model FLOPs of a training step for one token: backward has two products for each of forward.

    With adapters, or if only feature maps are trained (`train.only`), backward has one: frozen
    weights need no gradient. The few products of the adapters are not counted, nor is it
    subtracted that bswa_sg skips the gradient of the memory's keys and values.
    """
    return (2 if model.lora.rank or only == "maps" else 3) * forward_flops(model, computed)


def matching_flops(model: ResolvedModelConfig, length: int) -> float:
    """Model FLOPs of one token of a row of `length` in the first stage (`train.match`).

    Forward runs all layers without the vocabulary.
    """
    return sum(MIXERS[name].matching_flops(model, length) for name in layer_mixers(model))


def step_flops(config: ResolvedConfig, computed: bool = False) -> float:
    """Model FLOPs of one token of a run's training step; `computed` as in `forward_flops`."""
    if config.train.match:
        return matching_flops(config.model, config.data.length)
    return training_flops(config.model, config.train.only, computed)


def fam_floor(f: int, w: int) -> float:
    """Lower bound on FAM's time over that of BSWA with the same memory: f more tokens per w."""
    return 1 + f / w


def linear_attention_flops(tokens: int, k: int, e: int, chunk: int) -> int:
    """Model FLOPs of chunkwise linear attention for one head, forward and backward.

    Forward: phi(q) phi(k) of the pairs in a chunk, their sums over v, and k x e products into and
    out of S. Backward: two products for each. Recomputation is not counted.
    """
    return 3 * 2 * tokens * (chunk * (k + e) + 2 * k * e)


def peak_flops(device: jax.Device) -> float | None:
    """Peak FLOP/s of a device in dense bfloat16 products; None for a CPU or an unknown kind.

    None also for a slice of a GPU (MIG), and for smaller chips with the name of a larger one.
    """
    words = set(device.device_kind.lower().replace("-", " ").split())
    if words & {"mig", "laptop", "d"}:
        return None
    return next((peak for name, peak in _PEAKS if name <= words), None)


@functools.cache
def measure_peak_flops(dtype: str) -> float:
    """FLOP/s of the default device in the fastest of a few square products of `dtype`.

    Measured once in a process, in about 0.3 s on a CPU. Each size is chosen so that its product
    takes up to MATMUL_SECONDS at the speed of the previous one: few sizes, since each is compiled,
    and no long wait if `dtype` is slow.
    """
    best, size, growth = 0.0, 256, 2
    while growth > 1 and size <= 8192:
        seconds = _matmul_seconds(size, dtype)
        best = max(best, 2 * size**3 / seconds)
        growth = 2 ** max(0, int(math.log2(MATMUL_SECONDS / seconds) / 3))
        size *= growth
    return best


def _feedback_flops(model: ResolvedModelConfig) -> float:
    """Model FLOPs of the layers of a Feedback Transformer, or of its Transformer twin."""
    c, (_, _, g, e, _) = model.feedback, sizes(model)
    flops = model.layers * (2 * layer_weights(model) + attention_flops(model, c.span))
    if c.positions == "learned":
        flops += model.layers * 2 * model.heads * e * c.span
    per_layer = model.stack == "transformer" or c.composition in ("same_and_lower", "previous")
    if c.shared_kv and not per_layer:
        # a single projection to keys and values
        flops -= (model.layers - 1) * 2 * 2 * model.width * g * e
    return flops


def _segmented_flops(model: ResolvedModelConfig) -> float:
    """Model FLOPs of the layers of a segmented stack, which reads f tokens of memory and f that
    write it for each w; of a memory that grows, on average over a document."""
    f, w = model.fam_len, model.block_len
    memory = f * (kept_segments(model) + 1) / 2
    each = 2 * layer_weights(model) + attention_flops(model, memory + (w + f) / 2)
    return model.layers * each * (w + 2 * f) / w


def _vocabulary_flops(model: ModelConfig) -> int:
    """The softmax; if adaptive, all clusters, which are all computed, and the input embedding's."""
    d, cuts = model.width, cutoffs(model)
    if not cuts:
        return 2 * d * model.vocab_size
    head = 2 * d * (cuts[0] + len(cuts))
    widths = [d // model.adaptive.factor**i for i in range(len(cuts) + 1)]
    sizes = [b - a for a, b in itertools.pairwise((*cuts, model.vocab_size))]
    tails = sum(2 * c * (d + s) for c, s in zip(widths[1:], sizes, strict=True))
    return head + tails + 2 * d * sum(widths)


def _matmul_seconds(size: int, dtype: str) -> float:
    """Time of a square product, after a first one that compiles."""
    matrix = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.dot)
    product(matrix, matrix).block_until_ready()
    start = time.perf_counter()
    product(matrix, matrix).block_until_ready()
    return time.perf_counter() - start
