"""T2R, Figure 4: the number of features (4)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering
from famjax.reproduce.experiments import _t2r

T2R_FIGURE_4 = Experiment(
    id="t2r-figure-4",
    title="Number of features",
    source="T2R, Figure 4",
    config=_t2r.CONFIG,
    variants=_t2r.by_features(),
    measure=_t2r.WINDOWS,
    orderings=(
        Ordering("pretrained 16", "pretrained 4"),
        Ordering("pretrained 64", "pretrained 16"),
        # "pretraining achieves a Pareto improvement over random initialization"
        *(Ordering(f"pretrained {n}", f"from scratch {n}") for n in _t2r.FEATURES),
        # "as the feature size becomes smaller, pretraining becomes particularly important"
        Ordering("pretrained 4", "from scratch 4", wider_than=("pretrained 64", "from scratch 64")),
    ),
    base=_t2r.TEACHING,
    base_config=_t2r.TEACHER,
    unequal=_t2r.UNEQUAL,
    axis="features",
    note=_t2r.NOTE + " The paper gives a figure.",
    minutes=_t2r.MINUTES,
)
