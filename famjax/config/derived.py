"""Properties that follow from a config, such as the mixer of each layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from famjax.config.schema import Config, ModelConfig

AnyModelConfig = TypeVar("AnyModelConfig", bound=ModelConfig)


def mixer_pattern(model: ModelConfig) -> tuple[str, ...]:
    """Return the mixers in `model.mixer`, the pattern that the layers of the residual stack repeat.

    The result is empty for all other stacks.
    """
    return tuple(model.mixer.split(",")) if model.stack == "residual" else ()


def pattern_length(model: ModelConfig) -> int:
    """Return the number of layers in the repeated pattern; 1 for stacks without mixers."""
    return len(mixer_pattern(model)) or 1


def layer_mixers(model: ModelConfig) -> tuple[str, ...]:
    """Return the mixer of every layer; empty for a stack without mixers."""
    names = mixer_pattern(model)
    return tuple(names[i % len(names)] for i in range(model.layers)) if names else ()


def is_segmented(model: ModelConfig) -> bool:
    """Return whether the stack is one of `famjax.stacks.segments`."""
    return model.stack in ("rmt", "autocompressor")


def has_blocks(model: ModelConfig) -> bool:
    """Return whether the stack reads blocks, or segments, of `model.block_len` tokens."""
    return model.stack == "residual" or is_segmented(model)


def kept_segments(model: ModelConfig) -> int:
    """Return the number of segments whose memories a segmented stack keeps."""
    return -(-model.capacity // max(model.block_len, 1)) if model.stack == "autocompressor" else 1


def segment_transformer(model: AnyModelConfig) -> AnyModelConfig:
    """Return the config of the Transformer in a segmented stack.

    The Transformer's KV cache holds the memories of earlier segments, one segment, and the tokens
    that write the segment's memory.
    """
    capacity = (kept_segments(model) + 1) * model.fam_len + model.block_len
    return replace(model, stack="residual", mixer="full", capacity=capacity)


def cutoffs(model: ModelConfig) -> tuple[int, ...]:
    """Return the index of the first word of each cluster after the first; () for one cluster."""
    text = model.adaptive.cutoffs
    return tuple(int(part) for part in text.split(",")) if text else ()


def has_linear_cross(model: ModelConfig) -> bool:
    """Return whether layers attend to an encoder's output with linear attention."""
    return model.encoder.layers > 0 and model.encoder.cross == "linear"


def reads_whole_rows(config: Config) -> bool:
    """Return whether each row of a batch is processed in one call, which starts with empty caches.

    With `train.rsp` it may start with a memory, but keys and values of full attention are not
    passed on.
    """
    return config.data.layout != "lanes" and config.train.bptt_segments == 1


def holds_out_text(config: Config) -> bool:
    """Return whether the run trains on text and holds out some of it for evaluation."""
    data = config.data
    reads_text = data.task == "text" or data.text_rows > 0
    return reads_text and not (data.seqio or data.tfds) and data.holdout > 0
