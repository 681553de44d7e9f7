"""Feedback Transformer v3, Figure 7 left: a small set, by the depth of the decoder (6.2)."""

from __future__ import annotations

from dataclasses import replace

from famjax.reproduce.experiment import Experiment, Ordering, PaperSize
from famjax.reproduce.experiments import _translation
from famjax.reproduce.translation_measure import TranslationMeasure

_MEASURE = TranslationMeasure("iwslt14", length_penalty=1.0, tokenized=True, compounds=False)

FT_FIGURE_7_TRANSLATION = Experiment(
    id="ft-figure-7-translation",
    title="Translation of talks by the depth of the decoder",
    source="Feedback Transformer v3, Figure 7 left",
    config=_translation.CONFIG,
    variants=_translation.by_depth(256),
    measure=_MEASURE,
    orderings=(
        Ordering("Feedback 1", "Transformer 1"),
        Ordering("Feedback 2", "Transformer 2"),
    ),
    overrides=_translation.SHAPE,
    at_paper=PaperSize(
        config="iwslt14_paper",
        measure=replace(_MEASURE, folder=""),
        variants=_translation.by_depth(256, depths=_translation.PAPER_DEPTHS),
    ),
    timed=True,
    axis="layers of the decoder",
    note="German-English talks of IWSLT14, lower case and tokenized. "
    + _translation.NOTE
    + _translation.POSITIONS
    + _translation.WHOLE
    + " No checkpoints are averaged. The length penalty is 1. "
    "The paper gives a figure.",
    unequal_parameters=_translation.DECODERS,
    minutes=13.0,
)
