"""T2R, Figure 4: the number of features (4)."""

from __future__ import annotations

from famjax.reproduce import _t2r
from famjax.reproduce.experiment import Experiment, Ordering, Variant

_FEATURES = (8, 32, 128)


def _variant(line: str, features: int) -> Variant:
    is_pretrained = line == "pretrained"
    own = (*_t2r.LINEAR, f"model.linear.features={features}")
    return Variant(
        f"{line} {features}",
        (*_t2r.FINETUNED, *own) if is_pretrained else own,
        x=features,
        line=line,
        continues=is_pretrained,
    )


T2R_FIGURE_4 = Experiment(
    id="t2r-figure-4",
    title="Number of features",
    source="T2R, Figure 4",
    config=_t2r.CONFIG,
    variants=tuple(
        _variant(line, features)
        for line in ("pretrained", "from scratch")
        for features in _FEATURES
    ),
    measure=_t2r.WINDOWS,
    orderings=(
        Ordering("pretrained 32", "pretrained 8"),
        Ordering("pretrained 128", "pretrained 32"),
        Ordering("pretrained 32", "from scratch 32"),
    ),
    base=_t2r.TEACHING,
    base_config=_t2r.TEACHER,
    axis="features",
    note=_t2r.NOTE + " The paper gives a figure.",
    minutes=_t2r.MINUTES,
)
