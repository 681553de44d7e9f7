"""Does a converted model say what Hugging Face's own code says of the same folder?"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from famjax.core.config import ModelConfig
from famjax.core.optional import absent, not_installed
from famjax.core.types import Array
from famjax.models.language_model import LanguageModel
from famjax.models.transplant import abstract, transplant

# of the text that both read
_TOKENS = 32


class Apart(NamedTuple):
    """Attributes: the largest difference of two logits, and as a share of the logits' range."""

    absolute: float
    relative: float


def apart(ours: np.ndarray, theirs: np.ndarray) -> Apart:
    """Return how far logits are apart."""
    difference = float(np.abs(ours.astype(np.float64) - theirs).max())
    return Apart(difference, difference / float(np.ptp(theirs)))


def why_not(model: ModelConfig) -> str:
    """Return why the check cannot be made here, or nothing."""
    if missing := absent(("torch", "transformers")):
        return not_installed(missing)
    _, shapes = abstract(model)
    needed = 4 * sum(shape.size for shape in jax.tree.leaves(shapes))
    free = _free_bytes()
    # what torch holds, and half as much again to compute
    if free is not None and 1.5 * needed > free:
        return f"a second copy of the model needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} are free"
    return ""


def check(folder: Path, source: ModelConfig, model: LanguageModel, to: ModelConfig) -> Apart:
    """Compare the logits of a converted model with those of Hugging Face's code, in float32.

    Args:
      folder: the Hugging Face model.
      source: its config before surgery; what is compared has its attention.
      model: converted, with the config `to`.
    """
    import torch
    import transformers

    tokens = _tokens(source)
    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        # nothing of the folder is run (auto_map, pickles), and nothing is fetched
        trust_remote_code=False,
        use_safetensors=True,
        local_files_only=True,
    )
    with torch.no_grad():
        expected = theirs.eval()(torch.tensor(tokens)).logits.numpy()
    del theirs
    # a cache of its few tokens is enough
    short = source if source.arch.learned_positions else replace(source, capacity=tokens.shape[1])
    params = transplant(nnx.state(model, nnx.Param), to, short)
    # accelerators multiply in fewer bits unless told
    with jax.default_matmul_precision("highest"):
        return apart(np.asarray(_logits(short, params, tokens)), expected)


def _tokens(model: ModelConfig) -> np.ndarray:
    """Return a few tokens, as many as fill blocks."""
    block = model.block_len if "swa" in model.mixer else 1
    longest = model.capacity if "full" in model.mixer else max(_TOKENS, block)
    length = max(min(-(-_TOKENS // block) * block, longest // block * block), block)
    return np.random.default_rng(0).integers(model.vocab_size, size=(1, length))


def _logits(config: ModelConfig, params: object, tokens: np.ndarray) -> Array:
    graph, _ = abstract(config)

    @jax.jit
    def run(params: object, tokens: Array) -> Array:
        model = nnx.merge(graph, params)
        return model(tokens, model.init_state(1))[0]

    return run(params, jnp.asarray(tokens, jnp.int32))


def _free_bytes() -> int | None:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
