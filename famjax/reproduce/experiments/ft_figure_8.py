"""Feedback Transformer v3, Figure 8: one layer as the memory (6.4)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, PaperSize, Variant
from famjax.reproduce.experiments import _bytes
from famjax.reproduce.paper_measures import PENN_TREEBANK

_COMPOSITION = "model.feedback.composition"
_TRANSFORMER = "Transformer"
# in bits; the stacks differ by 0.05
_MARGIN = 0.02


def _layer(number: int) -> Variant:
    own = (f"{_COMPOSITION}=layer", f"model.feedback.layer={number}")
    return Variant(f"layer {number}", own, x=number, line="one layer")


_OTHERS = (
    Variant("average", (f"{_COMPOSITION}=average",)),
    Variant("weighted sum", (f"{_COMPOSITION}=all",)),
    Variant(_TRANSFORMER, _bytes.TRANSFORMER),
)


FT_FIGURE_8 = Experiment(
    id="ft-figure-8",
    title="One layer as the feedback memory",
    source="Feedback Transformer v3, Figure 8",
    config="char_ptb_feedback",
    variants=(*map(_layer, range(3)), *_OTHERS),
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
    at_paper=PaperSize(
        config="char_ptb_paper",
        measure=PENN_TREEBANK,
        variants=(*map(_layer, range(7)), *_OTHERS),
        orderings=(
            Ordering("layer 6", "layer 1"),
            Ordering("weighted sum", "layer 1"),
            Ordering("average", "layer 1"),
            Ordering("layer 1", _TRANSFORMER, margin=_MARGIN),
            *(
                Ordering("weighted sum", f"layer {n}", margin=_MARGIN, may_be_better=True)
                for n in (5, 6)
            ),
        ),
    ),
    axis="layer",
    note=_bytes.NOTE + " Layer 0 is the embedding, layer 2 the last one, as the paper's layer 6; "
    "layer 1 is half of the model here and a sixth of it there. The paper gives a figure.",
    minutes=_bytes.MINUTES,
)
