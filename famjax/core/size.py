"""How many numbers a model has, by arithmetic alone: before anything is traced or allocated.

Whole numbers of Python, which no size overflows. A test holds the counts against the models.
"""

from __future__ import annotations

import fnmatch
from typing import NamedTuple

from famjax.core.config import Config, ModelConfig

# bytes of a number
_FLOAT = 4
# A row that a training process reads: its reader, its cursor. About a third of what was measured.
_ROW_BYTES = 1000
# of a token on the host: ids and targets of 4, a weight of 4, three flags
_TOKEN_BYTES = 15


class Count(NamedTuple):
    """Numbers of a model's parameters.

    Attributes:
      weights: all but the adapters.
      adapters: low-rank ones.
      maps: of the weights, those of linear layers' feature maps.
    """

    weights: int
    adapters: int
    maps: int


class _Sizes(NamedTuple):
    """d, h, g, e and the feed-forward's hidden width of a model."""

    d: int
    h: int
    g: int
    e: int
    hidden: int


def _sizes(m: ModelConfig) -> _Sizes:
    e = m.head_dim or m.width // max(m.heads, 1)
    return _Sizes(m.width, m.heads, m.kv_heads or m.heads, e, m.mlp_width or 4 * m.width)


def pattern(model: ModelConfig) -> list[str]:
    """Return the mixers that are repeated up the stack; [] of stacks without any."""
    return model.mixer.split(",") if model.stack == "residual" else []


def count(model: ModelConfig) -> Count:
    """Return how many parameters a model has; its sizes need not go together."""
    vocabulary, top = _vocabulary(model), _norm(model) if model.arch.pre_norm else 0
    if model.stack == "lstm":
        # the two products of each layer, and its biases
        layer = 2 * 4 * model.width**2 + 4 * model.width
        return Count(vocabulary + top + model.layers * layer, 0, 0)
    if model.stack != "residual":
        weights, adapters = _feedback(model)
        return Count(vocabulary + top + weights, adapters, 0)
    names = pattern(model)
    s, layers = _sizes(model), model.layers
    linear = layers * names.count("linear") // len(names)
    maps = linear * _map(model)
    weights = vocabulary + top + maps
    weights += layers * (_queries(model) + _keys(model) + _feed_forward(model))
    weights += model.capacity * s.d if model.arch.learned_positions else 0
    weights += model.fam_len * s.d if "fam" in names else 0
    adapters = _adapters(model, ("q", "k", "v", "out", "gate", "up", "down"))
    return Count(weights, layers * adapters, maps)


def _norm(model: ModelConfig) -> int:
    return model.width * (2 if model.norm == "layernorm" else 1)


def _vocabulary(model: ModelConfig) -> int:
    """The embedding and the head; of a vocabulary that is not known, nothing."""
    v, d = model.vocab_size, model.width
    try:
        cuts = [int(part) for part in model.adaptive.cutoffs.split(",") if part]
    except ValueError:  # refused elsewhere
        cuts = []
    if not cuts:
        return v * d * (1 if model.tied else 2)
    ends = [*cuts, max(v, cuts[-1])]
    narrow = [d // model.adaptive.factor**i for i in range(len(ends))]
    tables = sum((b - a) * c for a, b, c in zip([0, *cuts], ends, narrow, strict=True))
    projections = [c * d for c in narrow]
    own = 0 if model.tied else tables + sum(projections[1:])
    return tables + sum(projections) + len(cuts) * d + own


def _queries(model: ModelConfig) -> int:
    """What makes queries and goes back to the stream, with the norms before and after."""
    (d, h, _, e, _), arch = _sizes(model), model.arch
    total = _norm(model) * (2 if arch.post_norm else 1) + 2 * d * h * e
    total += h * e if arch.qkv_bias else 0
    total += d if arch.out_bias else 0
    return total + (e if arch.qk_norm else 0)


def _keys(model: ModelConfig) -> int:
    (d, _, g, e, _), arch = _sizes(model), model.arch
    total = 2 * d * g * e + (2 * g * e if arch.qkv_bias else 0)
    return total + (e if arch.qk_norm else 0)


def _feed_forward(model: ModelConfig) -> int:
    d, hidden = model.width, _sizes(model).hidden
    up = 2 if model.mlp in ("swiglu", "geglu") else 1
    total = _norm(model) * (2 if model.arch.post_norm else 1) + (up + 1) * d * hidden
    return total + (up * hidden + d if model.arch.mlp_bias else 0)


def _map(model: ModelConfig) -> int:
    """A layer's feature map."""
    s, kind, k = _sizes(model), model.linear.map, model.linear.features
    if kind == "rfa":
        return s.g
    return 0 if kind in ("elu", "performer") else s.g * (s.e + 1) * k


def _adapters(model: ModelConfig, names: tuple[str, ...]) -> int:
    """The adapters of a layer's maps of these names."""
    d, h, g, e, hidden = _sizes(model)
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


def _feedback(model: ModelConfig) -> tuple[int, int]:
    """Weights and adapters of a Feedback Transformer's layers, or of the Transformer's like it."""
    c, layers, arch = model.feedback, model.layers, model.arch
    e = _sizes(model).e
    kind = "previous" if model.stack == "transformer" else c.composition
    each = _queries(model) + _feed_forward(model)
    each += model.heads if c.adaptive_span else 0
    adapters = layers * _adapters(model, ("q", "out", "up", "gate", "down"))
    if c.shared_kv:
        weights = layers * each + _keys(model) + (_norm(model) if arch.pre_norm else 0)
        adapters += _adapters(model, ("k", "v"))
    else:
        weights = layers * (each + _keys(model))
        adapters += layers * _adapters(model, ("k", "v"))
    weights += e * c.span if c.positions == "learned" else 0
    memories = layers if kind in ("same_and_lower", "previous") else 1
    weights += memories * (layers + 1) if kind in ("all", "same_and_lower") else 0
    return weights, adapters


# what is carried ---------------------------------------------------------------------------------


def state_bytes(model: ModelConfig) -> int:
    """Return the bytes of what a model carries along one document, at least."""
    size = 2 if model.dtype == "bfloat16" else _FLOAT
    s, layers = _sizes(model), model.layers
    if model.stack == "lstm":
        return 2 * layers * s.d * _FLOAT
    if model.stack != "residual":
        c = model.feedback
        own = model.stack == "transformer" or c.composition in ("same_and_lower", "previous")
        if c.cache == "memory":
            return (layers if own else 1) * c.span * s.d * size
        return 2 * (1 if c.shared_kv and not own else layers) * s.g * s.e * c.span * size
    names = pattern(model)
    pair = 2 * s.g * s.e * size
    block = model.block_len
    window = pair * (model.memory_segments + 1) * block
    fam = model.fam_len * (s.d * _FLOAT + model.fam_previous * pair)
    k = s.e if model.linear.map == "elu" else model.linear.features
    of = {
        "full": pair * model.capacity,
        "swa": pair * (-(-(model.window - 1) // block) + 1) * block,
        "fam": window + fam,
        "linear": s.g * k * (s.e + 1) * _FLOAT,
    }
    return layers * sum(of.get(name, window) for name in names) // len(names)


# what training takes -----------------------------------------------------------------------------


def weight_bytes(model: ModelConfig) -> int:
    """Return the bytes of a model's parameters, as a run that is used holds them."""
    of = count(model)
    base = 2 if model.lora.rank and model.lora.base == "bfloat16" else _FLOAT
    return base * of.weights + _FLOAT * of.adapters


def training_bytes(config: Config) -> int:
    """Return the bytes of parameters, their gradients and the optimizer's state, at least."""
    model, of = config.model, count(config.model)
    trained = of.weights
    if config.train.only == "maps":
        trained = of.maps
    elif model.lora.rank:
        trained = of.adapters
    elif config.train.only == "not_maps":
        trained = of.weights - of.maps
    # beside a parameter lie one moment, with AdamW two, and its gradient, which clipping waits for
    optimizer = config.optimizer
    copies = 1 + (optimizer.name == "adamw") + (optimizer.clip_norm > 0)
    return weight_bytes(model) + copies * _FLOAT * trained


def batch_bytes(config: Config) -> int:
    """Return the bytes of what a step reads and carries, at least."""
    model, data, train = config.model, config.data, config.train
    size = 2 if model.dtype == "bfloat16" else _FLOAT
    # with BPTT warm-up each row is read by several readers at first
    readers = data.length // train.bptt_start if train.bptt_start else 1
    rows = data.batch * (_ROW_BYTES * readers + _TOKEN_BYTES * data.length)
    parts = train.accumulate * train.bptt_segments
    stream = data.batch * data.length * model.width * size // max(parts, 1)
    carried = data.batch if data.layout == "lanes" else 1
    return rows + stream + _scores(config, size) + carried * state_bytes(model)


def _scores(config: Config, size: int) -> int:
    """The attention weights of one layer, of the rows that are read at once."""
    model, data = config.model, config.data
    rows = max(data.batch // config.train.accumulate, 1)
    of = {
        "full": data.length // config.train.bptt_segments * model.capacity,
        "swa": model.block_len * (model.window + model.block_len - 1),
        "linear": 0,
    }
    window = model.block_len**2 * (model.memory_segments + 1)
    most = max((of.get(name, window) for name in pattern(model)), default=0)
    return rows * model.heads * most * size
