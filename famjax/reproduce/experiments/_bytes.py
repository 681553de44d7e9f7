"""Shared settings of experiments with Feedback Transformers as language models of code bytes."""

from __future__ import annotations

from famjax.reproduce.measures import CodeMeasure

BYTES = CodeMeasure(vocabulary=0, whole=False)
TRANSFORMER = ("model.stack=transformer",)
STEPS = 1400
# the BPTT length doubles from an eighth of the row to all of it, with a quarter of the steps for
# each length (v1: from 32 to 256 words)
GROWING = ("train.bptt_start=8", f"train.bptt_double_every={STEPS // 4}")


def at_depth(layers: int) -> tuple[str, ...]:
    """Return overrides for a model of `layers` layers with as many parameters as four layers have.

    Fewer layers have wider heads and feed-forwards (v3 6.4).
    """
    wider = 4 // layers
    return (
        f"model.layers={layers}",
        f"model.head_dim={32 * wider}",
        f"model.mlp_width={512 * wider}",
    )


# two layers: with four, the stacks differ by no more than seeds do (docs/feedback.md)
SHAPE = (*at_depth(2), f"train.steps={STEPS}")
_SIZES = "a width of 128, a span of 64, 0.8 million parameters, 1,400 steps of 1,024 bytes"
_TEXTS = "Bytes of Python's standard library, 16 kB of each held-out module, where the paper has "
_CHARACTERS = f"{_TEXTS}characters of Penn Treebank; "
NOTE = f"{_CHARACTERS}two layers instead of six, {_SIZES}."
DEPTHS_NOTE = f"{_CHARACTERS}{_SIZES}."
# of tables whose models the paper trains on words
WORDS_NOTE = f"{_TEXTS}words of WikiText-103; two layers, {_SIZES}."
MINUTES = 6.0
