"""T2R, Figures 5 and 6: what becomes of the attention weights (4, A.2)."""

from __future__ import annotations

from famjax.reproduce.attention_measure import AttentionMeasure
from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.experiments import _t2r

# one step, whose learning rate is too low to change a weight
_UNTRAINED = ("train.steps=1", "optimizer.learning_rate=1e-12")
_TRAININGS = {
    "before finetuning": _UNTRAINED,
    "feature maps frozen": (*_t2r.FINETUNED, "train.only=not_maps"),
    "T2R": _t2r.FINETUNED,
}


T2R_FIGURE_5 = Experiment(
    id="t2r-figure-5",
    title="Distance of attention weights from the Transformer's",
    source="T2R, Figure 5",
    config=_t2r.CONFIG,
    variants=tuple(
        Variant(f"{line} {features}", (*own, *_t2r.linear(features)), x=features, line=line)
        for line, own in _TRAININGS.items()
        for features in _t2r.FEATURES
    ),
    measure=AttentionMeasure(),
    orderings=(
        Ordering("T2R 16", "feature maps frozen 16"),
        Ordering("T2R 16", "before finetuning 16"),
        Ordering("T2R 64", "T2R 4"),
    ),
    base=_t2r.TEACHING,
    base_config=_t2r.TEACHER,
    unequal=_t2r.UNEQUAL,
    axis="features",
    note=_t2r.NOTE + " Euclidean distance of the last token's weights in 32 windows of 256 bytes, "
    "the mean over layers and heads. The paper gives a figure.",
    minutes=_t2r.MINUTES,
)

T2R_FIGURE_6 = Experiment(
    id="t2r-figure-6",
    title="Entropy of attention weights",
    source="T2R, Figure 6",
    config=_t2r.CONFIG,
    variants=(
        *_t2r.by_features(),
        Variant("Transformer", (), continues=False),
    ),
    measure=AttentionMeasure(has_teacher=False),
    orderings=(
        Ordering("Transformer", "pretrained 16"),
        Ordering("pretrained 16", "from scratch 16"),
        # "The entropy decreases [...] when a large feature size is used"
        Ordering("pretrained 64", "pretrained 4"),
        Ordering("from scratch 64", "from scratch 4"),
    ),
    base=_t2r.TEACHING,
    base_config=_t2r.TEACHER,
    unequal=_t2r.UNEQUAL,
    axis="features",
    note=_t2r.NOTE + " In nats, of the last token's weights in 32 windows of 256 bytes, the mean "
    "over layers and heads; lower is sharper. The paper gives a figure.",
    minutes=_t2r.MINUTES,
)
