"""What experiments with the Feedback Transformer as a language model share: bytes of code."""

from __future__ import annotations

from famjax.reproduce.measures import CodeMeasure

BYTES = CodeMeasure(vocabulary=0, modules=6)
TRANSFORMER = ("model.stack=transformer",)
NOTE = (
    "Bytes of Python's standard library, six held-out modules, where the paper has characters of "
    "Penn Treebank; four layers of width 128 and a span of 64, 1,200 steps of 1,024 "
    "bytes."
)
MINUTES = 6.0


def at_depth(layers: int) -> tuple[str, ...]:
    """Return overrides of a model of so many layers with as many parameters as four layers have.

    Heads and feed-forward are as much wider (v3 6.5).
    """
    wider = 4 // layers
    return (
        f"model.layers={layers}",
        f"model.head_dim={32 * wider}",
        f"model.mlp_width={512 * wider}",
    )
