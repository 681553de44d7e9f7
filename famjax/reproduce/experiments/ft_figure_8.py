"""Feedback Transformer v3, Figure 8: one layer as the memory."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _bytes

_COMPOSITION = "model.feedback.composition"
_TRANSFORMER = "Transformer"
# in bits; the stacks differ by 0.05
_MARGIN = 0.02


def _layer(number: int) -> Variant:
    own = (f"{_COMPOSITION}=layer", f"model.feedback.layer={number}")
    return Variant(f"layer {number}", own, x=number, line="one layer")


FT_FIGURE_8 = Experiment(
    id="ft-figure-8",
    title="One layer as the feedback memory",
    source="Feedback Transformer v3, Figure 8",
    config="char_ptb_feedback",
    variants=(
        *map(_layer, range(3)),
        Variant("average", (f"{_COMPOSITION}=average",)),
        Variant("weighted sum", (f"{_COMPOSITION}=all",)),
        Variant(_TRANSFORMER, _bytes.TRANSFORMER),
    ),
    measure=_bytes.BYTES,
    orderings=(
        # "representations from higher layers work better"
        Ordering("layer 2", "layer 1"),
        Ordering("weighted sum", "layer 1"),
        # "simply averaging all layers together works reasonably well as well"
        Ordering("average", "layer 1"),
        # "when all layers attend to the first layer output, it works as good"
        Ordering("layer 1", _TRANSFORMER, margin=_MARGIN),
        # "the weighted sum approach matches the best performance"
        Ordering("weighted sum", "layer 2", margin=_MARGIN),
    ),
    overrides=_bytes.SHAPE,
    axis="layer",
    note=_bytes.NOTE + " Layer 0 is the embedding, layer 2 the last one, as the paper's layer 6; "
    "layer 1 is half of the model here and a sixth of it there. The paper gives a figure.",
    minutes=_bytes.MINUTES,
)
