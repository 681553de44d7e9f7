"""Feedback Transformer v3, Figure 7 right (6.3); v1, Figure 3 right (4.2): summaries by depth.

At the paper's size the feedback memory has a span of 256, which are all tokens of a summary, and
the layers of a decoder have keys and values of their own; the paper gives neither. It does not give
the depths of the figure's points either: they are those of Figure 4.
"""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, PaperSize
from famjax.reproduce.experiments import _translation
from famjax.reproduce.summary_measure import PairSummaryMeasure

_DECODING = (
    "Beam 5, which the paper does not give; no three tokens occur twice in a summary in the same "
    "order, for the paper's 3-gram blocking; the length penalty is the best one of a development "
    "set, for the paper's tuned length. ROUGE-L is rouge-score's ROUGE-Lsum with its stemmer, as "
    "published for CNN-Dailymail. "
)


def _claims(depths: tuple[int, ...]) -> tuple[Ordering, ...]:
    """Return the claim that feedback is better "for all model depths" (6.3)."""
    return tuple(Ordering(f"Feedback {layers}", f"Transformer {layers}") for layers in depths)


FT_FIGURE_7_SUMMARIES = Experiment(
    id="ft-figure-7-summaries",
    title="Summaries by the depth of the decoder",
    source="Feedback Transformer v3, Figure 7 right; v1, Figure 3 right",
    config=_translation.CONFIG,
    variants=_translation.by_depth(256, span_here=128),
    measure=PairSummaryMeasure(words=64),
    orderings=_claims(_translation.DEPTHS),
    overrides=(
        *_translation.SHAPE,
        # summaries are longer than captions
        "data.batch=8",
        "data.length=128",
        "data.source_length=336",
        "train.steps=1000",
    ),
    at_paper=PaperSize(
        config="cnn_dm_paper",
        measure=PairSummaryMeasure(words=0),
        variants=_translation.by_depth(256, depths=_translation.PAPER_DEPTHS),
        orderings=_claims(_translation.PAPER_DEPTHS),
        note=_DECODING + "Tokens of the outputs a second, where v1 has words.",
    ),
    timed=True,
    axis="layers of the decoder",
    # as in v1, but greedily: a search takes as long as its length penalty makes it
    drawn=("ROUGE-L", "greedy tokens/s"),
    note="About 5,200 functions of Python's standard library, cut to 64 words, and the first "
    "paragraphs of their docstrings, up to 60 words and 20 on average, where the paper has 280,000 "
    "news articles, cut to 400 words, and summaries of 40 to 60 words. An encoder of six layers "
    "of width 128, 1,000 steps of 1,024 tokens of summaries, with a SentencePiece model of 4,000 "
    "tokens; pairs with more than 336 tokens of a function or 128 of a summary are not trained on, "
    "and outputs have at most 128. " + _DECODING + f"{_translation.SPEEDS}{_translation.POSITIONS} "
    "The paper has also six layers; it gives a figure.",
    unequal_parameters=_translation.DECODERS,
    minutes=11.0,
)
