"""T2R, Figure 4: the number of features (4)."""

from __future__ import annotations

from itertools import pairwise

from famjax.reproduce.experiment import Experiment, Ordering, PaperSize
from famjax.reproduce.experiments import _t2r
from famjax.reproduce.paper_measures import WIKITEXT_DEV_WINDOWS


def _claims(sizes: tuple[int, ...]) -> tuple[Ordering, ...]:
    pretrained, scratch = (
        [f"{line} {n}" for n in sizes] for line in ("pretrained", "from scratch")
    )
    return (
        *(Ordering(more, fewer) for fewer, more in pairwise(pretrained)),
        # "pretraining achieves a Pareto improvement over random initialization"
        *(Ordering(*both) for both in zip(pretrained, scratch, strict=True)),
        # "as the feature size becomes smaller, pretraining becomes particularly important"
        Ordering(pretrained[0], scratch[0], wider_than=(pretrained[-1], scratch[-1])),
    )


T2R_FIGURE_4 = Experiment(
    id="t2r-figure-4",
    title="Number of features",
    source="T2R, Figure 4",
    config=_t2r.CONFIG,
    variants=(*_t2r.by_features(), _t2r.TRANSFORMER),
    measure=_t2r.WINDOWS,
    orderings=_claims(_t2r.FEATURES),
    base=_t2r.TEACHING,
    base_config=_t2r.TEACHER,
    at_paper=PaperSize(
        config=_t2r.PAPER_CONFIG,
        measure=WIKITEXT_DEV_WINDOWS,
        variants=(*_t2r.by_features(_t2r.PAPER_FEATURES), _t2r.TRANSFORMER),
        orderings=_claims(_t2r.PAPER_FEATURES),
        base_config=_t2r.PAPER_TEACHER,
    ),
    unequal=_t2r.UNEQUAL,
    axis="features",
    note=_t2r.NOTE + " The paper gives a figure.",
    unequal_parameters=_t2r.UNEQUAL_PARAMETERS,
    follow_up="After as many steps from the teacher as from scratch (`famjax reproduce "
    "t2r-figure-4 --seeds 1 --only 'pretrained 64,from scratch 64' train.steps=2400`) 64 features "
    "have 2.251 and 2.350 bits per byte, and 4 features (`'pretrained 4,from scratch 4'`) 2.782 "
    "and 3.004, seed 0. So at equal steps a teacher helps, and more with fewer features, as in the "
    "paper; a third of the steps is not enough here.",
    minutes=_t2r.MINUTES_FROM_SCRATCH,
)
