"""Feedback Transformer v3, Figure 4 left: translation by the depth of the decoder (4.2.1)."""

from __future__ import annotations

from dataclasses import replace

from famjax.reproduce.experiment import Experiment, Ordering
from famjax.reproduce.experiments import _translation
from famjax.reproduce.translation_measure import TranslationMeasure

_MEASURE = TranslationMeasure("multi30k", length_penalty=0.6)

FT_FIGURE_4_TRANSLATION = Experiment(
    id="ft-figure-4-translation",
    title="Translation by the depth of the decoder",
    source="Feedback Transformer v3, Figure 4 left",
    config=_translation.CONFIG,
    variants=_translation.by_depth(
        512, ("optimizer.learning_rate=1e-3",), {"Transformer 1": 27.3, "Feedback 1": 28.3}
    ),
    measure=_MEASURE,
    orderings=(
        *(
            Ordering(f"Feedback {layers}", f"Transformer {layers}")
            for layers in _translation.DEPTHS
        ),
        Ordering("Feedback 1", "Transformer 1", wider_than=("Feedback 4", "Transformer 4")),
        Ordering("Feedback 1", "Feedback 4", "tokens/s"),
    ),
    overrides=_translation.SHAPE,
    paper_config="wmt14_ende_paper",
    paper_measure=replace(_MEASURE, folder=""),
    averaged=10,
    axis="layers of the decoder",
    note="German-English captions of Multi30k, where the paper has WMT14 English-German. "
    + _translation.NOTE
    + _translation.SPLIT
    + " The mean of the last five checkpoints, in the paper of ten. The paper has also six layers, "
    "and tunes the length penalty, which is 0.6 here.",
    minutes=11.0,
)
