"""The number of tokens that a residual stack's outputs depend on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flax import nnx

from famjax.config.schema import ArchConfig, ModelConfig
from famjax.models.language_model import LanguageModel

WINDOW = ModelConfig(vocab_size=9, layers=3, width=8, heads=2, mixer="swa", block_len=4, window=4)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (WINDOW, 3 * 4),
        (replace(WINDOW, mixer="bswa", memory_segments=2), 3 * 2 * 4),
        (replace(WINDOW, short_conv=4), 3 * 4 + 4),
        (replace(WINDOW, mixer="fam"), None),
        (replace(WINDOW, ngram_memory=2), None),
        # which number of the document a token has depends on all tokens before it
        (replace(WINDOW, arch=ArchConfig(positions="learned"), capacity=64), None),
    ],
    ids=["window", "segments", "convolution", "memory", "n-grams", "positions"],
)
def test_receptive_field(model: ModelConfig, expected: int | None) -> None:
    made = nnx.eval_shape(lambda: LanguageModel(model, rngs=nnx.Rngs(0)))
    assert made.stack.receptive_field == expected
