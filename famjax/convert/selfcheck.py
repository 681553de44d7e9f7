"""Compares the logits of a converted model with those of Hugging Face's code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.config.schema import ModelConfig
from famjax.core.errors import UserError
from famjax.core.host_memory import available_bytes
from famjax.core.json_files import shorten
from famjax.core.optional import missing_message, missing_modules
from famjax.core.types import Array, Context
from famjax.core.units import byte_size
from famjax.mixers import mixer_specs
from famjax.models.language_model import LanguageModel
from famjax.models.remap_params import abstract_inference_model, map_params
from famjax.models.seq2seq import Seq2Seq

# minimum number of compared tokens, which suffices if no layer has a window
_MIN_TOKENS = 128
# longest window that the comparison exceeds, and by how many tokens
_MAX_WINDOW, _BEYOND = 4096, 64
# maximum number of compared logits, those of the last tokens
_MAX_LOGITS = 1 << 26


class Deviation(NamedTuple):
    """The largest difference between two models' logits.

    Attributes:
      absolute: the difference.
      relative: the difference as a share of the logits' range.
    """

    absolute: float
    relative: float


def deviation(ours: np.ndarray, theirs: np.ndarray) -> Deviation:
    """Return the deviation of our logits from theirs."""
    difference = float(np.abs(ours.astype(np.float64) - theirs).max())
    # the range is 0 if all weights are 0
    return Deviation(difference, difference / max(float(np.ptp(theirs)), 1e-30))


def skip_reason(model: ModelConfig) -> str:
    """Return why the comparison is not possible here, or ""."""
    if missing := missing_modules(("torch", "transformers")):
        return missing_message(missing)
    _, shapes = abstract_inference_model(model)
    weights = 4 * sum(shape.size for shape in jax.tree.leaves(shapes))
    # bytes for the scores of a layer, their softmax and a mask, and for two copies of the logits
    read = 4 * (
        3 * model.heads * compared_tokens(model) ** 2
        + 2 * _compared_logits(model) * model.vocab_size
    )
    # torch's weights, and half as much for its computation
    needed, free = 1.5 * weights + read, available_bytes()
    if free is not None and needed > free:
        sizes = f"{byte_size(needed)}, {byte_size(free)} are free"
        return f"a second copy of the model needs {sizes}"
    return ""


def compared_tokens(model: ModelConfig) -> int:
    """Return the number of tokens to compare, more than the window of the model's layers."""
    window = _window(model)
    wanted = max(min(window, _MAX_WINDOW) + _BEYOND if window else 0, _MIN_TOKENS)
    if any(spec.is_bounded for spec in mixer_specs(model)) or model.arch.positions == "learned":
        wanted = min(wanted, model.capacity)
    # a multiple of 8, so that it can be divided into blocks
    return wanted - wanted % 8 if wanted > _BEYOND else wanted


def describe(model: ModelConfig) -> str:
    """Return a description of the compared tokens."""
    count, window = compared_tokens(model), _window(model)
    if count > window:
        return f"{count:,} tokens"
    return f"{count:,} tokens, not more than the window of {window:,}"


def _window(model: ModelConfig) -> int:
    """Return the longest window of the model's local layers; 0 if it has none."""
    return max((spec.window(model) for spec in mixer_specs(model)), default=0)


def _compared_logits(model: ModelConfig) -> int:
    return min(compared_tokens(model), max(_MAX_LOGITS // model.vocab_size, 1))


def compare_with_transformers(
    folder: Path, source: ModelConfig, model: LanguageModel, to: ModelConfig
) -> Deviation:
    """Compare the logits of a converted model with those of Hugging Face's code, in float32.

    Args:
      folder: folder of the Hugging Face model.
      source: config of that model. Our logits are computed with its attention, as before surgery.
      model: the converted model.
      to: config of the converted model.
    """
    import torch
    import transformers

    tokens, last = _sample_tokens(source), _compared_logits(source)
    has_encoder = source.encoder.layers > 0
    kind = transformers.AutoModelForSeq2SeqLM if has_encoder else transformers.AutoModelForCausalLM
    transformers.utils.logging.disable_progress_bar()
    try:
        theirs = kind.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            # runs no code of the folder (auto_map, pickles), and downloads nothing
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
        ).eval()
        with torch.no_grad():
            ids = torch.tensor(tokens)
            # an encoder-decoder reads the same tokens as source and target, as in `_compute_logits`
            rest = {"decoder_input_ids": ids} if has_encoder else {"logits_to_keep": last}
            expected = theirs(ids, **rest).logits[:, -last:].numpy()
    except Exception as error:  # any: transformers may reject values that famjax accepts
        if isinstance(error, ImportError | MemoryError):
            raise
        what = shorten(" ".join(f"{type(error).__name__}: {error}".split()), 300)
        raise UserError(
            f"{folder}: transformers cannot read it ({what}); correct config.json and the index of "
            "its files, or take another copy"
        ) from error
    if not np.isfinite(expected).all():
        raise UserError(
            f"{folder}: its logits in Hugging Face's code are not finite; take another copy"
        )
    del theirs
    short = _shrink(source)
    # unchecked: the source has none of the parts that were added
    params = map_params(nnx.state(model, nnx.Param), to, short)
    # accelerators multiply in lower precision by default
    with jax.default_matmul_precision("highest"):
        return deviation(np.asarray(_compute_logits(short, params, tokens, last)), expected)


def _shrink(model: ModelConfig) -> ModelConfig:
    """Return a config of the same function with small blocks and a small KV cache."""
    count = compared_tokens(model)
    block = next(size for size in range(min(_BEYOND, count), 0, -1) if count % size == 0)
    if _window(model):
        model = replace(model, block_len=block)
    return model if model.arch.positions == "learned" else replace(model, capacity=count)


def _sample_tokens(model: ModelConfig) -> np.ndarray:
    return np.random.default_rng(0).integers(model.vocab_size, size=(1, compared_tokens(model)))


def _compute_logits(config: ModelConfig, params: object, tokens: np.ndarray, last: int) -> Array:
    graph, _ = abstract_inference_model(config)

    @jax.jit
    def run(params: object, tokens: Array) -> Array:
        model = nnx.merge(graph, params)
        ones = jnp.ones_like(tokens)
        source = model.read_source(tokens, ones) if isinstance(model, Seq2Seq) else None
        ctx = model.with_tokens(Context(source=source), tokens)
        x, _ = model.stack(model.embed(tokens), model.init_state(1), ctx)
        return model.logits(x[:, -last:])

    return run(params, jnp.asarray(tokens, jnp.int32))
