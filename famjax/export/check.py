"""Compares the logits of an export with those of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.config.schema import ModelConfig
from famjax.core.errors import UserError
from famjax.core.types import Context, Params
from famjax.mixers import is_bounded, mixer_specs
from famjax.models.language_model import LanguageModel
from famjax.models.seq2seq import Seq2Seq
from famjax.ops.kernels import without_kernels
from famjax.ops.ngrams import context_lengths

# largest accepted difference of logits, as a fraction of their range
_LIMIT = 1e-4
# maximum number of tokens, unless two blocks are longer
_TOKENS = 4096
# maximum number of compared logits, those of the last tokens
_LOGITS = 1 << 26


def sample_tokens(config: ModelConfig) -> tuple[np.ndarray, int]:
    """Return random tokens [2 t], and how many of the last positions to compare.

    The tokens are more than the last one attends to directly, and end within a block, unless that
    takes more than `_TOKENS`. For an n-gram memory the second half repeats the first.
    """
    specs = mixer_specs(config)
    block = max([config.block_len, *(spec.window(config) for spec in specs)])
    seen = 0
    if config.stack in ("feedback", "transformer"):
        seen = config.feedback.span
    elif any("model.memory_segments" in spec.keys for spec in specs):
        seen = config.memory_segments * config.block_len
    count = max(2 * block, min(block + seen, _TOKENS)) + 3
    if config.ngram_memory:
        count = max(count, 2 * context_lengths(config.ngram_memory)[-1] + 4)
    if is_bounded(config):
        count = min(count, config.capacity)
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(2, count))
    if config.ngram_memory:  # which finds nothing unless contexts recur
        tokens[:, count // 2 :] = tokens[:, : count - count // 2]
    return tokens, min(count, max(_LOGITS // config.vocab_size // 2, 1))


def sample_capacity(config: ModelConfig) -> int:
    """Return the KV capacity that the sample needs; the model's own may take gigabytes."""
    if config.arch.positions == "learned":
        return config.capacity
    return min(config.capacity, sample_tokens(config)[0].shape[1])


def compute_logits(model: LanguageModel, tokens: np.ndarray, last: int) -> np.ndarray:
    """Return the logits [b last v] of the last tokens."""
    count = tokens.shape[1]
    padded = np.pad(tokens, ((0, 0), (0, -count % model.block_len)))
    graph, params = nnx.split(model)

    @jax.jit
    def read(params: Params, tokens: Any, valid: Any) -> Any:
        model = nnx.merge(graph, params)
        state = model.init_state(len(tokens))
        source = None
        if isinstance(model, Seq2Seq):
            # an encoder-decoder reads the same tokens as source and target
            source = model.read_source(tokens, valid.astype(jnp.int32))
        ctx = model.with_tokens(Context(valid=valid, source=source), tokens)
        x, _ = model.stack(model.embed(tokens), state, ctx)
        return model.logits(x[:, count - last : count])

    valid = np.broadcast_to(np.arange(padded.shape[1]) < count, padded.shape)
    # accelerators multiply in lower precision than PyTorch by default; exported programs, whose
    # batch may have any size, have no attention kernel
    with jax.default_matmul_precision("highest"), without_kernels():
        return np.asarray(read(params, jnp.asarray(padded, jnp.int32), valid))


def run_logits(model: LanguageModel, tokens: np.ndarray, last: int) -> np.ndarray:
    """Return the logits of the run's model; raise a `UserError` if they are not finite."""
    logits = compute_logits(model, tokens, last)
    _check_finite(logits)
    return logits


def _check_finite(logits: np.ndarray) -> None:
    if not np.isfinite(logits).all():
        raise UserError("the run's logits are not finite; export a run that has not diverged")


def compare_logits(by: str, exported: np.ndarray, run: np.ndarray) -> str:
    """Return a line about the difference of the logits.

    Args:
      by: name of what computed the logits of the export, for messages.

    Raises:
      UserError: the difference is above the limit, or the run's logits are not finite.
    """
    _check_finite(run)
    difference = np.abs(exported - run).max()
    share = difference / max(run.max() - run.min(), np.finfo(np.float32).tiny)
    summary = f"logits differ by {difference:.1e} at most, {share:.1e} of their range"
    if not share <= _LIMIT:
        raise UserError(f"{by}: {summary}, over {_LIMIT:.0e}; export removed; please report it")
    return f"compared with {by}: {summary}"


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence transformers' warnings and progress bars, which are expected here."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
