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
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from famjax.config.derived import (
    cutoffs,
    is_segmented,
    kept_segments,
    layer_mixers,
    reads_whole_rows,
)
from famjax.config.resolved import ResolvedConfig, ResolvedModelConfig, num_features, sizes
from famjax.config.schema import DataConfig, ModelConfig
from famjax.layers import feature_map, ngram_memory, short_conv
from famjax.mixers import MIXERS
from famjax.mixers.mixer import attention_flops, layer_weights

MATMUL_SECONDS = 0.08

# Dense bfloat16 FLOP/s of one device. The first entry is used of which all words occur in
# `device_kind`. Sources: NVIDIA's data sheets (without sparsity), cloud.google.com/tpu/docs.
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
        ("t4", 65e12),  # in float16: this device has no bfloat16
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


class SourceTokens(NamedTuple):
    """The source tokens of an encoder-decoder.

    Attributes:
      per_target: number of source tokens for each token of a target.
      keys: number of source tokens that a token's scores are counted for, in the encoder and in
        cross attention; 0 if sources have few tokens compared with the width.
    """

    per_target: float = 1.0
    keys: int = 0


_ONE_PER_TARGET = SourceTokens()


def forward_flops(
    model: ResolvedModelConfig, computed: bool = False, sources: SourceTokens = _ONE_PER_TARGET
) -> float:
    """Return the model FLOPs of the forward pass for one token of a long document.

    Args:
      computed: in layers of the residual stack, count all query-key pairs that are computed, not
        only unmasked ones.
      sources: the source tokens, with an encoder; their `keys` are counted in every stack.

    Raises:
      ValueError: the vocabulary size is not resolved.
    """
    if not model.vocab_size:
        raise ValueError("vocab_size 0 stands for the tokenizer's: fill it in first")
    encoder = _source_weight_flops(model, sources) + _source_score_flops(model, sources)
    if model.stack == "lstm":
        return model.layers * 2 * 8 * model.width**2 + _vocabulary_flops(model)
    if is_segmented(model):
        return _segmented_flops(model) + _vocabulary_flops(model)
    if model.stack != "residual":
        return _feedback_flops(model) + encoder + _vocabulary_flops(model)
    layers = (MIXERS[name].flops(model, computed) for name in layer_mixers(model))
    at_input = ngram_memory.flops(model) + short_conv.flops(model)
    return sum(layers) + at_input + encoder + _vocabulary_flops(model)


def _source_weight_flops(model: ResolvedModelConfig, sources: SourceTokens) -> float:
    """Return a target token's products with weights in the encoder and in cross attention."""
    s, encoder = sizes(model), model.encoder
    if not encoder.layers:
        return 0.0
    cross = 2 * s.d * (2 * s.h * s.e + sources.per_target * 2 * s.g * s.e)
    return sources.per_target * encoder.layers * 2 * layer_weights(model) + model.layers * cross


def _source_score_flops(model: ResolvedModelConfig, sources: SourceTokens) -> float:
    """Return a target token's other products in the encoder and in cross attention.

    In softmax attention these are the scores and the sums of values; in linear attention phi, the
    sums of phi(k) v^T, and the products of phi(q) with them.
    """
    s, encoder = sizes(model), model.encoder
    if not encoder.layers:
        return 0.0
    scores = attention_flops(model, sources.keys)
    cross = scores
    if encoder.cross == "linear":
        linear = replace(model.linear, features=encoder.features)
        k = num_features(replace(model, linear=linear))
        vectors = feature_map.num_vectors(replace(model, linear=linear))
        keys = sources.per_target * s.g * s.e * (vectors + k)
        cross = 2 * (s.h * s.e * vectors + keys + s.h * k * (s.e + 1))
    return sources.per_target * encoder.layers * scores + model.layers * cross


def training_flops(
    model: ResolvedModelConfig,
    only: str = "all",
    computed: bool = False,
    sources: SourceTokens = _ONE_PER_TARGET,
) -> float:
    """Return the model FLOPs of a training step for one token.

    The backward pass has two products for each product of the forward pass. With adapters, or if
    only feature maps are trained (`train.only`), it has one for each product with a weight, since
    frozen weights need no gradient. The adapters' few products are not counted, and the gradient of
    the memory's keys and values is counted although bswa_sg skips it.
    """
    frozen = weight_flops(model, sources) if model.lora.rank or only == "maps" else 0.0
    return 3 * forward_flops(model, computed, sources) - frozen


def weight_flops(model: ResolvedModelConfig, sources: SourceTokens = _ONE_PER_TARGET) -> float:
    """Return the part of `forward_flops` that adapters freeze: products with a weight.

    All of it in stacks other than the residual one, whose attention scores are not told apart.
    """
    if model.stack != "residual":
        return forward_flops(model, sources=sources)
    layers = (MIXERS[name].weight_flops(model) for name in layer_mixers(model))
    return sum(layers) + _source_weight_flops(model, sources) + _vocabulary_flops(model)


def softmax_matching_flops(model: ResolvedModelConfig, length: int) -> float:
    """Return the model FLOPs of one token in the first stage (`train.match`), for rows of `length`.

    The forward pass runs all layers, but no output projection to the vocabulary.
    """
    return sum(MIXERS[name].softmax_matching_flops(model, length) for name in layer_mixers(model))


def step_flops(config: ResolvedConfig, computed: bool = False) -> float:
    """Return the model FLOPs of a run's training step for one token, that of a target for pairs.

    Args:
      computed: see `forward_flops`.
    """
    data = config.data
    if config.train.match:
        return softmax_matching_flops(config.model, data.length)
    sources = source_tokens(data, computed)
    return training_flops(model_of_rows(config), config.train.only, computed, sources)


def source_tokens(data: DataConfig, computed: bool) -> SourceTokens:
    """Return the source tokens of rows of pairs.

    Args:
      computed: whether to count the scores of all source tokens of a row. Unmasked are those of a
        token's own pair, of which a row has many.
    """
    length = data.source_length or data.length
    return SourceTokens(length / data.length, length if computed else 0)


def model_of_rows(config: ResolvedConfig) -> ResolvedModelConfig:
    """Return the model with a KV cache no larger than what a training step uses of it.

    Rows that are processed in one call attend to no earlier keys, however long the cache is.
    """
    model = config.model
    if model.stack != "residual" or not reads_whole_rows(config):
        return model
    return replace(model, capacity=min(model.capacity, config.data.length))


def linear_attention_flops(tokens: int, k: int, e: int, chunk: int) -> int:
    """Return the model FLOPs of chunkwise linear attention for one head, forward and backward.

    Forward: phi(q) phi(k) for all pairs in a chunk, the sums over v with these weights, and k x e
    products to update and to read S. Backward: two products for each. Recomputation is not counted.
    """
    return 3 * 2 * tokens * (chunk * (k + e) + 2 * k * e)


def peak_flops(device: jax.Device) -> float | None:
    """Return a device's peak FLOP/s for dense bfloat16 products; None for a CPU or an unknown kind.

    Also None for a slice of a GPU (MIG), and for smaller chips that are named like a larger one.
    """
    words = set(device.device_kind.lower().replace("-", " ").split())
    if words & {"mig", "laptop", "d"}:
        return None
    return next((peak for name, peak in _PEAKS if name <= words), None)


def all_devices_peak_flops(dtype: str) -> float:
    """Return the peak FLOP/s of all devices of all processes; on CPUs, measured for `dtype`."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        # its devices share the cores, all of which compute a product on one of them
        return measure_peak_flops(dtype) * jax.process_count()
    return (peak_flops(device) or measure_peak_flops(dtype)) * jax.device_count()


@functools.cache
def measure_peak_flops(dtype: str) -> float:
    """Return the default device's FLOP/s in the fastest of a few square matrix products of `dtype`.

    Measured once per process, in about 0.3 s on a CPU. Each size is chosen so that its product
    takes up to MATMUL_SECONDS at the speed of the previous one. So few sizes are tried, since each
    has to be compiled, and there is no long wait if `dtype` is slow.
    """
    best, size, growth = 0.0, 256, 2
    while growth > 1 and size <= 8192:
        seconds = _matmul_seconds(size, dtype)
        best = max(best, 2 * size**3 / seconds)
        growth = 2 ** max(0, int(math.log2(MATMUL_SECONDS / seconds) / 3))
        size *= growth
    return best


def _feedback_flops(model: ResolvedModelConfig) -> float:
    """Return the model FLOPs of the layers of the stacks `feedback` and `transformer`."""
    c, s = model.feedback, sizes(model)
    flops = model.layers * (2 * layer_weights(model) + attention_flops(model, c.span))
    if c.positions == "learned":
        flops += model.layers * 2 * model.heads * s.e * c.span
    per_layer = model.stack == "transformer" or c.composition in ("same_and_lower", "previous")
    if c.shared_kv and not per_layer:
        # all layers share one projection to keys and values
        flops -= (model.layers - 1) * 2 * 2 * model.width * s.g * s.e
    return flops


def _segmented_flops(model: ResolvedModelConfig) -> float:
    """Return the model FLOPs of the layers of a segmented stack.

    With each w tokens it reads f memory tokens and f tokens that write the memory. For a memory
    that grows, the result is an average over a document.
    """
    f, w = model.fam_len, model.block_len
    memory = f * (kept_segments(model) + 1) / 2
    per_token = 2 * layer_weights(model) + attention_flops(model, memory + (w + f) / 2)
    return model.layers * per_token * (w + 2 * f) / w


def _vocabulary_flops(model: ModelConfig) -> int:
    """Return the model FLOPs of the softmax.

    An adaptive softmax computes all clusters, so all are counted, and the projections of the
    adaptive input embedding as well.
    """
    d, cuts = model.width, cutoffs(model)
    if not cuts:
        return 2 * d * model.vocab_size
    head = 2 * d * (cuts[0] + len(cuts))
    widths = [d // model.adaptive.factor**i for i in range(len(cuts) + 1)]
    sizes = [b - a for a, b in itertools.pairwise((*cuts, model.vocab_size))]
    tails = sum(2 * c * (d + s) for c, s in zip(widths[1:], sizes, strict=True))
    return head + tails + 2 * d * sum(widths)


def _matmul_seconds(size: int, dtype: str) -> float:
    """Return the seconds of a square product, measured after a first one that compiles it."""
    matrix = jnp.ones((size, size), dtype)
    product = jax.jit(jnp.dot)
    product(matrix, matrix).block_until_ready()
    start = time.perf_counter()
    product(matrix, matrix).block_until_ready()
    return time.perf_counter() - start
