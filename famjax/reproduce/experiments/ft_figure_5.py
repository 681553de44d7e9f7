"""Feedback Transformer v3, Figure 5, and v1, Table 5: what the memory is made of."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, PaperSize, Variant
from famjax.reproduce.experiments import _bytes
from famjax.reproduce.paper_measures import PENN_TREEBANK_VALIDATION

_SCORE = "bits per character"


def _variant(name: str, composition: str, paper: float | None = None) -> Variant:
    figures = {} if paper is None else {_SCORE: paper}
    return Variant(name, (f"model.feedback.composition={composition}",), figures)


FT_FIGURE_5 = Experiment(
    id="ft-figure-5",
    title="What the feedback memory is made of",
    source="Feedback Transformer v3, Figure 5",
    config="char_ptb_feedback",
    variants=(
        _variant("all layers", "all", 1.197),
        _variant("last layer", "top", 1.202),
        _variant("same and lower layers", "same_and_lower", 1.267),
        _variant("previous layer", "previous", 1.285),
    ),
    measure=_bytes.BYTES,
    orderings=(
        Ordering("all layers", "same and lower layers"),
        Ordering("all layers", "previous layer"),
        Ordering("last layer", "same and lower layers"),
        Ordering("same and lower layers", "previous layer"),
        Ordering("last layer", "all layers", margin=0.02),
    ),
    overrides=_bytes.SHAPE,
    at_paper=PaperSize(
        config="char_ptb_paper",
        measure=PENN_TREEBANK_VALIDATION,
    ),
    note=_bytes.NOTE + " The numbers are those of v1's Table 5, bits per character. The previous "
    "layer is a Transformer, without its parallel training.",
    minutes=_bytes.MINUTES,
)
