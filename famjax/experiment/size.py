"""Parameter counts and memory, computed by arithmetic before anything is traced or allocated.

All numbers are Python ints, which do not overflow. A test compares the counts with the models.
"""

from __future__ import annotations

import fnmatch
from dataclasses import replace
from typing import NamedTuple

from famjax.config.derived import is_segmented, mixer_pattern, segment_transformer
from famjax.config.resolved import sizes
from famjax.config.schema import Config, ModelConfig
from famjax.layers import ngram_memory, short_conv
from famjax.layers.feature_map import count_params as feature_map_params
from famjax.mixers import MIXERS, MixerSpec, mixer_specs
from famjax.optimizers import OPTIMIZERS

# bytes of a float32
_FLOAT = 4
# host bytes of a row in a training process, for its reader and cursor: a third of the measured size
_ROW_BYTES = 1000
# host bytes of a token: id, target and weight of 4 bytes each, and three flags
_TOKEN_BYTES = 15
# host bytes of a source's token: its id and the number of its source
_SOURCE_BYTES = 8


class ParamCount(NamedTuple):
    """Parameter counts of a model.

    Attributes:
      weights: number of all parameters except adapters.
      adapters: number of parameters of low-rank adapters.
      maps: number of parameters of the feature maps of linear layers, which `weights` includes.
    """

    weights: int
    adapters: int
    maps: int


def count_params(model: ModelConfig) -> ParamCount:
    """Return a model's parameter counts, even if its sizes are inconsistent."""
    decoder, encoder = _decoder_params(model), _encoder_params(model)
    return ParamCount(*(a + b for a, b in zip(decoder, encoder, strict=True)))


def _encoder_params(model: ModelConfig) -> ParamCount:
    """Count the parameters of the encoder, and of the decoder's attention to its output."""
    encoder, depth = model.encoder, model.layers
    if not encoder.layers:
        return ParamCount(0, 0, 0)
    attention = _query_params(model) + _kv_params(model)
    is_linear = encoder.cross == "linear"
    linear = replace(model.linear, features=encoder.features)
    maps = depth * feature_map_params(replace(model, linear=linear)) if is_linear else 0
    weights = encoder.layers * (attention + _mlp_params(model)) + depth * attention + maps
    weights += _norm_params(model) if model.arch.pre_norm else 0
    weights += _position_params(model)
    weights += 0 if encoder.shared else model.vocab_size * model.width
    names = ("q", "k", "v", "out")
    adapters = encoder.layers * _adapter_params(model, (*names, "gate", "up", "down"))
    return ParamCount(weights, adapters + depth * _adapter_params(model, names), maps)


def _decoder_params(model: ModelConfig) -> ParamCount:
    vocabulary, top = _embedding_params(model), _norm_params(model) if model.arch.pre_norm else 0
    if model.stack == "lstm":
        # two matrices and the biases of each layer
        layer = 2 * 4 * model.width**2 + 4 * model.width
        return ParamCount(vocabulary + top + model.layers * layer, 0, 0)
    if is_segmented(model):
        transformer = _decoder_params(replace(model, stack="residual", mixer="full"))
        own = model.fam_len * model.width + _norm_params(model)
        return transformer._replace(weights=transformer.weights + own)
    if model.stack != "residual":
        weights, adapters = _feedback_params(model)
        return ParamCount(vocabulary + top + weights, adapters, 0)
    specs, s, layers = _pattern(model), sizes(model), model.layers
    of_mixers = layers * sum(spec.count_params(model) for spec in specs) // len(specs)
    mapped = [spec.count_params(model) for spec in specs if spec.has_feature_map]
    maps = layers * sum(mapped) // len(specs)
    weights = vocabulary + top + of_mixers
    weights += layers * (_query_params(model) + _kv_params(model) + _mlp_params(model))
    weights += _position_params(model) + ngram_memory.count_params(model)
    weights += short_conv.count_params(model)
    has_prompt = model.fam_init == "prompt" and any(spec.has_memory_prompt for spec in specs)
    weights += model.fam_len * s.d if has_prompt else 0
    adapters = _adapter_params(model, ("q", "k", "v", "out", "gate", "up", "down"))
    return ParamCount(weights, layers * adapters, maps)


def _pattern(model: ModelConfig) -> list[MixerSpec]:
    """Return the specs of the mixers in the pattern.

    An unknown mixer, which another check reports, is replaced by the first of `MIXERS`.
    """
    first = next(iter(MIXERS.values()))
    return [MIXERS.get(name, first) for name in mixer_pattern(model)]


def _norm_params(model: ModelConfig) -> int:
    return model.width * (2 if model.norm == "layernorm" else 1)


def _embedding_params(model: ModelConfig) -> int:
    """Count the parameters of embedding and head; 0 if the vocabulary size is not known."""
    v, d = model.vocab_size, model.width
    try:
        cuts = [int(part) for part in model.adaptive.cutoffs.split(",") if part]
    except ValueError:  # reported by another check
        cuts = []
    if not cuts:
        return v * d * (1 if model.tied else 2) + (v if model.arch.logit_bias else 0)
    ends = [*cuts, max(v, cuts[-1])]
    narrow = [d // model.adaptive.factor**i for i in range(len(ends))]
    tables = sum((b - a) * c for a, b, c in zip([0, *cuts], ends, narrow, strict=True))
    projections = [c * d for c in narrow]
    head = 0 if model.tied else tables + sum(projections[1:])
    return tables + sum(projections) + len(cuts) * d + head


def _position_params(model: ModelConfig) -> int:
    """Count the parameters that decoder or encoder apply to embeddings: positions and norm."""
    arch = model.arch
    table = (arch.position_offset + model.capacity) * model.width
    total = table if arch.positions == "learned" else 0
    return total + (_norm_params(model) if arch.embed_norm else 0)


def _query_params(model: ModelConfig) -> int:
    """Count the parameters of query and output projections, and of the norms around them."""
    s, arch = sizes(model), model.arch
    total = _norm_params(model) * (2 if arch.post_norm else 1) + 2 * s.d * s.h * s.e
    total += s.h * s.e if arch.qkv_bias else 0
    total += s.d if arch.out_bias else 0
    return total + (s.e if arch.qk_norm else 0)


def _kv_params(model: ModelConfig) -> int:
    s, arch = sizes(model), model.arch
    total = 2 * s.d * s.g * s.e + (2 * s.g * s.e if arch.qkv_bias else 0)
    return total + (s.e if arch.qk_norm else 0)


def _mlp_params(model: ModelConfig) -> int:
    d, hidden = model.width, sizes(model).hidden
    up = 2 if model.mlp in ("swiglu", "geglu") else 1
    total = _norm_params(model) * (2 if model.arch.post_norm else 1) + (up + 1) * d * hidden
    return total + (up * hidden + d if model.arch.mlp_bias else 0)


def _adapter_params(model: ModelConfig, names: tuple[str, ...]) -> int:
    """Count the parameters of the adapters on those of a layer's projections in `names`."""
    d, h, g, e, hidden = sizes(model)
    shapes = {
        "attention.q": d + h * e,
        "attention.k": d + g * e,
        "attention.v": d + g * e,
        "attention.out": h * e + d,
        "mlp.up": d + hidden,
        "mlp.down": hidden + d,
    }
    if model.mlp in ("swiglu", "geglu"):
        shapes["mlp.gate"] = d + hidden
    wanted = model.lora.on.split(",")
    return model.lora.rank * sum(
        size
        for name, size in shapes.items()
        if name.partition(".")[2] in names and any(fnmatch.fnmatchcase(name, on) for on in wanted)
    )


def _feedback_params(model: ModelConfig) -> tuple[int, int]:
    """Count weights and adapters of the layers of the stack `feedback` or `transformer`."""
    c, layers, arch = model.feedback, model.layers, model.arch
    e = sizes(model).e
    kind = "previous" if model.stack == "transformer" else c.composition
    each = _query_params(model) + _mlp_params(model)
    each += model.heads if c.adaptive_span else 0
    adapters = layers * _adapter_params(model, ("q", "out", "up", "gate", "down"))
    if c.shared_kv:
        weights = layers * each + _kv_params(model) + (_norm_params(model) if arch.pre_norm else 0)
        adapters += _adapter_params(model, ("k", "v"))
    else:
        weights = layers * (each + _kv_params(model))
        adapters += layers * _adapter_params(model, ("k", "v"))
    weights += e * c.span if c.positions == "learned" else 0
    memories = layers if kind in ("same_and_lower", "previous") else 1
    weights += memories * (layers + 1) if kind in ("all", "same_and_lower") else 0
    return weights, adapters


def state_bytes(model: ModelConfig) -> int:
    """Return a lower bound on the bytes of the state that a model carries along one document."""
    size = 2 if model.dtype == "bfloat16" else _FLOAT
    s, layers = sizes(model), model.layers
    if model.stack == "lstm":
        return 2 * layers * s.d * _FLOAT
    if is_segmented(model):
        held = model.fam_len * s.d * _FLOAT if model.stack == "rmt" else 0
        return held + state_bytes(segment_transformer(model))
    if model.stack != "residual":
        c = model.feedback
        per_layer = model.stack == "transformer" or c.composition in ("same_and_lower", "previous")
        if c.cache == "memory":
            return (layers if per_layer else 1) * c.span * s.d * size
        return 2 * (1 if c.shared_kv and not per_layer else layers) * s.g * s.e * c.span * size
    specs = _pattern(model)
    held = layers * sum(spec.state_bytes(model) for spec in specs) // len(specs)
    return held + ngram_memory.state_bytes(model) + short_conv.state_bytes(model, size)


def weight_bytes(model: ModelConfig, only: str = "all") -> int:
    """Return the bytes of a model's parameters at inference.

    Args:
      only: `train.only`, which parameters are trained; the others may have fewer bytes.
    """
    params, trained = count_params(model), _trained(model, only)
    frozen = params.weights + params.adapters - trained
    return (2 if model.lora.base == "bfloat16" else _FLOAT) * frozen + _FLOAT * trained


def _trained(model: ModelConfig, only: str) -> int:
    """Return the number of parameters that are trained."""
    params = count_params(model)
    if only == "maps":
        return params.maps
    if model.lora.rank:
        return params.adapters + params.maps
    return params.weights - (params.maps if only == "not_maps" else 0)


def training_bytes(config: Config) -> int:
    """Return a lower bound on the bytes of parameters, gradients and optimizer state."""
    model, only = config.model, config.train.only
    trained = _trained(model, only)
    # with clipping all gradients exist at once
    optimizer = config.optimizer
    spec = OPTIMIZERS.get(optimizer.name)  # another check reports an unknown name
    copies = (spec.moments if spec else 1) + (optimizer.clip_norm > 0)
    return weight_bytes(model, only) + copies * _FLOAT * trained


def batch_bytes(config: Config, has_kernels: bool = False) -> int:
    """Return a lower bound on the bytes of a step's batch, carried state and activations.

    Args:
      has_kernels: whether attention may be a kernel, which stores the mask, but no weights.
    """
    model, data, train = config.model, config.data, config.train
    size = 2 if model.dtype == "bfloat16" else _FLOAT
    # with BPTT warm-up each row has several readers at first
    readers = data.length // train.bptt_start if train.bptt_start else 1
    rows = data.batch * (_ROW_BYTES * readers + _TOKEN_BYTES * data.length)
    source = _source_length(config)
    rows += data.batch * _SOURCE_BYTES * source
    parts = train.accumulate * train.bptt_segments
    stream = data.batch * (data.length + source) * model.width * size // max(parts, 1)
    carried = data.batch if data.layout == "lanes" else 1
    scores = model.heads * size * _attention_weights(config)
    if has_kernels:
        scores = _attention_weights(config)  # a mask for all heads, of one byte for each pair
    return rows + stream + scores + carried * state_bytes(model)


def _attention_weights(config: Config) -> int:
    """Return the number of attention weights of a head for the rows of one microbatch."""
    model, data = config.model, config.data
    rows = max(data.batch // config.train.accumulate, 1)
    max_weights = max(
        (spec.max_attention_weights(config) for spec in mixer_specs(model)), default=0
    )
    source = _source_length(config)
    return rows * max(max_weights, source * max(source, data.length))


def _source_length(config: Config) -> int:
    """Return the number of tokens for the sources in a row; 0 without an encoder."""
    data = config.data
    return (data.source_length or data.length) if config.model.encoder.layers else 0
