"""What experiments with the Feedback Transformer as a language model share: bytes of code."""

from __future__ import annotations

from famjax.reproduce.measures import CodeMeasure

BYTES = CodeMeasure(vocabulary=0, whole=False)
TRANSFORMER = ("model.stack=transformer",)
STEPS = 1400
# from an eighth of the row to all of it, a quarter of the steps each (v1: from 32 to 256 words)
GROWING = ("train.bptt_start=8", f"train.bptt_double_every={STEPS // 4}")


def at_depth(layers: int) -> tuple[str, ...]:
    """Return overrides of a model of so many layers with as many parameters as four layers have.

    Heads and feed-forward are as much wider (v3 6.4).
    """
    wider = 4 // layers
    return (
        f"model.layers={layers}",
        f"model.head_dim={32 * wider}",
        f"model.mlp_width={512 * wider}",
    )


# with four layers the stacks differ by no more than seeds do (docs/feedback.md)
SHAPE = (*at_depth(2), f"train.steps={STEPS}")
_SIZES = "a width of 128, a span of 64, 0.8 million parameters, 1,400 steps of 1,024 bytes"
_TEXTS = (
    "Bytes of Python's standard library, 16 kB of each held-out module, where the paper has "
    "characters of Penn Treebank; "
)
NOTE = f"{_TEXTS}two layers instead of six, {_SIZES}."
DEPTHS_NOTE = f"{_TEXTS}{_SIZES}."
MINUTES = 6.0
