"""Feedback Transformer v3, Figure 7 right; v1, Figure 3 right: summaries by the decoder's depth."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, PaperSize
from famjax.reproduce.experiments import _translation
from famjax.reproduce.summary_measure import SummaryMeasure


def _claims(depths: tuple[int, ...]) -> tuple[Ordering, ...]:
    """Return the claim that feedback is better "for all model depths" (6.3)."""
    return tuple(Ordering(f"Feedback {layers}", f"Transformer {layers}") for layers in depths)


FT_FIGURE_7_SUMMARIES = Experiment(
    id="ft-figure-7-summaries",
    title="Summaries by the depth of the decoder",
    source="Feedback Transformer v3, Figure 7 right; v1, Figure 3 right",
    config=_translation.CONFIG,
    variants=_translation.by_depth(256),
    measure=SummaryMeasure(words=64),
    orderings=_claims(_translation.DEPTHS),
    overrides=(*_translation.SHAPE, "data.source_length=272"),
    at_paper=PaperSize(
        config="cnn_dm_paper",
        measure=SummaryMeasure(words=0),
        variants=_translation.by_depth(256, depths=_translation.PAPER_DEPTHS),
        orderings=_claims(_translation.PAPER_DEPTHS),
        note="The length penalty is 1, where the paper tunes the length.",
    ),
    timed=True,
    axis="layers of the decoder",
    note="Functions of Python's standard library, cut to 64 words, and the first paragraphs of "
    "their docstrings, where the paper has news articles, cut to 400 words, and several sentences. "
    + _translation.SIZES
    + "Beam 5; no 3-gram occurs twice in a summary, as in the paper; the length penalty is 1, "
    "where the paper tunes the length. ROUGE-L is that of sentences. "
    + _translation.SPEEDS
    + " The paper gives a figure.",
    minutes=12.0,
)
