"""Feedback Transformer v3, Figure 8: one layer as the memory."""

from __future__ import annotations

from famjax.reproduce import _bytes
from famjax.reproduce.experiment import Experiment, Ordering, Variant

_COMPOSITION = "model.feedback.composition"


def _layer(number: int) -> Variant:
    own = (f"{_COMPOSITION}=layer", f"model.feedback.layer={number}")
    return Variant(f"layer {number}", own, x=number, line="one layer")


FT_FIGURE_8 = Experiment(
    id="ft-figure-8",
    title="One layer as the feedback memory",
    source="Feedback Transformer v3, Figure 8",
    config="char_ptb_feedback",
    variants=(
        *map(_layer, range(5)),
        Variant("average", (f"{_COMPOSITION}=average",)),
        Variant("weighted sum", (f"{_COMPOSITION}=all",)),
    ),
    measure=_bytes.BYTES,
    orderings=(Ordering("layer 4", "layer 1"), Ordering("weighted sum", "layer 1")),
    axis="layer",
    note=_bytes.NOTE + " Layer 0 is the embedding. The paper has six layers, and gives a figure.",
    minutes=_bytes.MINUTES,
)
