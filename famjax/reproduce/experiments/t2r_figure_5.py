"""T2R, Figures 5 and 6: what becomes of the attention weights (4, A.2).

At the paper's size all whole windows of 512 words of the validation texts are read; the paper does
not number its samples.
"""

from __future__ import annotations

from collections.abc import Mapping

from famjax.reproduce.attention_measure import AttentionMeasure, TextAttentionMeasure
from famjax.reproduce.experiment import Experiment, Ordering, PaperSize, Variant
from famjax.reproduce.experiments import _t2r

# the number that the paper takes, the smallest and the largest
_SIZES_AT_PAPER = (32, 8, 512)
# one step, whose learning rate is too low to change a weight
_UNTRAINED = ("train.steps=1", "optimizer.learning_rate=1e-12")
_TRAININGS = {
    "before finetuning": _UNTRAINED,
    "feature maps frozen": (*_t2r.FINETUNED, "train.only=not_maps"),
    "T2R": _t2r.FINETUNED,
}

_AT_PAPER = {
    "before finetuning": _UNTRAINED,
    "feature maps frozen": ("train.only=not_maps",),
    "T2R": (),
}


def _points(
    trainings: Mapping[str, tuple[str, ...]], sizes: tuple[int, ...]
) -> tuple[Variant, ...]:
    return tuple(
        Variant(f"{line} {features}", (*own, *_t2r.linear(features)), x=features, line=line)
        for line, own in trainings.items()
        for features in sizes
    )


def _distances(middle: int, smallest: int, largest: int) -> tuple[Ordering, ...]:
    """Return the claims of Figure 5, of three sizes."""
    return (
        Ordering(f"T2R {middle}", f"feature maps frozen {middle}"),
        Ordering(f"T2R {middle}", f"before finetuning {middle}"),
        Ordering(f"T2R {largest}", f"T2R {smallest}"),
    )


def _entropies(middle: int, smallest: int, largest: int) -> tuple[Ordering, ...]:
    """Return the claims of Figure 6, of three sizes."""
    return (
        Ordering("Transformer", f"pretrained {middle}"),
        # "The entropy decreases [...] when a large feature size is used or the transformer
        # pretraining is applied"
        *(Ordering(f"pretrained {n}", f"from scratch {n}") for n in (smallest, middle, largest)),
        *(
            Ordering(f"{line} {largest}", f"{line} {smallest}")
            for line in ("pretrained", "from scratch")
        ),
    )


T2R_FIGURE_5 = Experiment(
    id="t2r-figure-5",
    title="Distance of attention weights from the Transformer's",
    source="T2R, Figure 5",
    config=_t2r.CONFIG,
    variants=_points(_TRAININGS, _t2r.FEATURES),
    measure=AttentionMeasure(),
    orderings=_distances(16, 4, 64),
    base=_t2r.TEACHING,
    base_config=_t2r.TEACHER,
    at_paper=PaperSize(
        config=_t2r.PAPER_CONFIG,
        measure=TextAttentionMeasure(),
        variants=_points(_AT_PAPER, _t2r.PAPER_FEATURES),
        orderings=_distances(*_SIZES_AT_PAPER),
        base_config=_t2r.PAPER_TEACHER,
    ),
    unequal=_t2r.UNEQUAL,
    axis="features",
    note=_t2r.WEIGHTS_NOTE + " Euclidean distance of the last token's weights in 32 windows of 256 "
    "bytes, the mean over layers and heads. The paper gives a figure.",
    unequal_parameters=_t2r.UNEQUAL_PARAMETERS,
    minutes=_t2r.MINUTES,
)

T2R_FIGURE_6 = Experiment(
    id="t2r-figure-6",
    title="Entropy of attention weights",
    source="T2R, Figure 6",
    config=_t2r.CONFIG,
    variants=(*_t2r.by_features(), _t2r.TRANSFORMER),
    measure=AttentionMeasure(has_teacher=False),
    orderings=_entropies(16, 4, 64),
    base=_t2r.TEACHING,
    base_config=_t2r.TEACHER,
    at_paper=PaperSize(
        config=_t2r.PAPER_CONFIG,
        measure=TextAttentionMeasure(has_teacher=False),
        variants=(*_t2r.by_features(_t2r.PAPER_FEATURES), _t2r.TRANSFORMER),
        orderings=_entropies(*_SIZES_AT_PAPER),
        base_config=_t2r.PAPER_TEACHER,
    ),
    unequal=_t2r.UNEQUAL,
    axis="features",
    note=_t2r.WEIGHTS_NOTE
    + " Those from scratch are trained for 2,400 steps. In nats, of the last "
    "token's weights in 32 windows of 256 bytes, the mean over layers and heads; lower is sharper. "
    "The paper gives a figure.",
    unequal_parameters=_t2r.UNEQUAL_PARAMETERS,
    minutes=_t2r.MINUTES_FROM_SCRATCH,
)
