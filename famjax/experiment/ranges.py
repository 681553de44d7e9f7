"""Checks of each config value by itself: its type, and the range of numbers.

The checks in `famjax.experiment.checks` run after these and rely on them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields

from famjax.config.keys import key_values
from famjax.config.schema import Config, DropoutConfig
from famjax.core.json_files import shorten
from famjax.core.paths import url_message
from famjax.core.units import byte_size
from famjax.experiment.size import batch_bytes, weight_bytes

_LOWEST: dict[str, float] = {
    "seed": 0,
    "model.vocab_size": 0,
    "model.layers": 1,
    "model.width": 1,
    "model.heads": 1,
    "model.kv_heads": 0,
    "model.head_dim": 0,
    "model.mlp_width": 0,
    "model.block_len": 1,
    "model.memory_segments": 0,
    "model.window": 1,
    "model.capacity": 1,
    "model.fam_len": 1,
    "model.fam_previous": 1,
    "model.delta_order": 1,
    "model.delta_heads": 0,
    "model.short_conv": 0,
    "model.ngram_memory": 0,
    "model.ngram_slots": 1,
    "model.arch.position_offset": 0,
    "model.arch.query_scale": 0,
    "model.arch.embed_scale": 0,
    "model.arch.attention_cap": 0,
    "model.arch.logit_cap": 0,
    "model.arch.local_rope_base": 0,
    "model.arch.rope_length": 1,
    "model.linear.features": 1,
    "model.encoder.layers": 0,
    "model.encoder.features": 1,
    "model.linear.chunk": 1,
    "model.feedback.span": 1,
    "model.feedback.layer": 0,
    "model.feedback.span_ramp": 2,
    "model.feedback.span_loss": 0,
    "model.feedback.sweeps": 0,
    "model.feedback.tolerance": 0,
    "model.lora.rank": 0,
    "model.adaptive.factor": 1,
    "model.lora.alpha": 0,
    "data.batch": 1,
    "data.length": 1,
    "data.source_length": 0,
    "data.source_words": 0,
    "data.part_bytes": 0,
    "data.holdout": 0,
    "data.text_rows": 0,
    "data.text_weight": 0,
    "data.repeat_len": 0,
    "data.repeat_weight": 0,
    "data.passkey.digits": 1,
    "data.passkey.keys": 1,
    "data.passkey.min_length": 1,
    "data.passkey.needle_within": 0,
    "data.passkey.max_length": 1,
    "data.passkey.start_length": 1,
    "data.passkey.multiple": 1,
    "data.passkey.ask_every": 0,
    "data.passkey.other_weight": 0,
    "data.long.min_length": 1,
    "data.long.max_length": 1,
    "data.long.other_weight": 0,
    "data.toy.episodes": 1,
    "data.toy.steps": 0,
    "data.toy.start_steps": 0,
    "data.toy.test_steps": 0,
    "data.toy.size": 2,
    "data.toy.variables": 1,
    "optimizer.warmup_steps": 0,
    "optimizer.weight_decay": 0,
    "optimizer.clip_norm": 0,
    "train.steps": 1,
    "train.accumulate": 1,
    "train.bptt_segments": 1,
    "train.bptt_start": 0,
    "train.bptt_double_every": 0,
    "train.rsp_ramp": 0,
    "train.diversity_loss": 0,
    "train.reconstruction_loss": 0,
    "train.write_loss": 0,
    "train.log_every": 1,
    "train.checkpoint_every": 1,
    "train.keep": 1,
    "eval.every": 0,
    "eval.batches": 1,
    "eval.examples": 0,
    "eval.beam": 1,
    "eval.length_penalty": -5,
    "eval.no_repeat_ngram": 0,
    "profile.memory": 0,
}
# maximum of every int except the seed: shapes and step counts are 32-bit integers
MAX_INT32 = 2**31 - 1
# limits of floats: in float32 larger numbers are infinite, and smaller ones 0
_LARGEST_FLOAT, _SMALLEST_FLOAT = 3.4e38, 1.2e-38
HIGHEST = {
    # ten times the deepest model ever trained; each layer is a name in a checkpoint
    "model.layers": 10_000,
    "model.encoder.layers": 10_000,
    # each length, and each token of the convolution, is a part of the program
    "model.ngram_memory": 12,
    "model.short_conv": 64,
    "data.passkey.digits": 1000,
    "data.passkey.keys": 8,
    # an episode is generated as a whole, in memory
    "data.toy.steps": 100_000,
    "data.toy.start_steps": 100_000,
    "data.toy.test_steps": 100_000,
    "eval.length_penalty": 5,
}
_POSITIVE = (
    "model.rope_base",
    "model.arch.norm_eps",
    "model.arch.rope_factor",
    "model.arch.rope_low",
    "model.arch.rope_high",
    "optimizer.learning_rate",
)
_FRACTIONS = (
    "data.passkey.threshold",
    "data.passkey.hard_keys",
    "data.toy.threshold",
    "optimizer.decay_fraction",
    "optimizer.final_fraction",
    "train.rsp",
    "model.feedback.span_start",
)
# keys whose value must be at least 0 and less than 1
_SHARES = (
    "optimizer.beta1",
    "optimizer.beta2",
    "train.label_smoothing",
    "model.fam_gate_threshold",
    "model.lora.dropout",
    *(f"model.dropout.{field.name}" for field in fields(DropoutConfig)),
)


def check_ranges(config: Config) -> Iterator[str]:
    current = key_values(config)
    for key, value in current.items():
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{key}={value}: must be a finite number"
        if isinstance(value, float) and abs(value) > _LARGEST_FLOAT:
            yield f"{key}={value}: is infinite in float32; must be at most {_LARGEST_FLOAT}"
        if isinstance(value, float) and 0 < abs(value) < _SMALLEST_FLOAT:
            yield f"{key}={value}: is 0 in float32; must be 0 or at least {_SMALLEST_FLOAT}"
    for key, lowest in _LOWEST.items():
        if current[key] < lowest:
            yield f"{key}={current[key]}: must be at least {lowest}"
    for key, highest in HIGHEST.items():
        if current[key] > highest:
            yield f"{key}={shorten(current[key])}: must be at most {highest:,}"
    for key, value in current.items():
        if type(value) is int and value > MAX_INT32 and key != "seed":
            note = _memory_note(config, key)
            yield f"{key}={shorten(value)}: must be at most {MAX_INT32:,}{note}"
        if isinstance(value, str) and not _is_text(value):
            yield f"{key}={shorten(repr(value))}: contains a NUL byte or an unpaired surrogate"
    for key in _POSITIVE:
        if current[key] <= 0:
            yield f"{key}={current[key]}: must be greater than 0"
    for key in _FRACTIONS:
        if not 0 <= current[key] <= 1:
            yield f"{key}={current[key]}: must be from 0 to 1"
    for key in _SHARES:
        if not 0 <= current[key] < 1:
            yield f"{key}={current[key]}: must be at least 0 and less than 1"
    if config.seed >= 2**32:
        yield f"seed={shorten(config.seed)}: must be less than {2**32}"
    if message := url_message(config.name):
        yield f"name={message}"
    if not config.name or config.name in (".", "..") or set(config.name) & set("/\\\0"):
        yield f"name={config.name!r}: names the run's folder; give a name without slashes"


def _memory_note(config: Config, key: str) -> str:
    """Return the memory that a rejected size would take, as a note for its error message."""
    if key.startswith("model."):
        return f"; the model's parameters would take {byte_size(weight_bytes(config.model))}"
    if key in ("data.batch", "data.length"):
        return f"; the batch of a step would take {byte_size(batch_bytes(config))}"
    return ""


def _is_text(value: str) -> bool:
    """Return whether the operating system accepts a value as a path."""
    try:
        return b"\0" not in value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
