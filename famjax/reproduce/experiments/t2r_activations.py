"""T2R, 2.2, note 4: the activation of the feature map."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, PaperSize, Variant
from famjax.reproduce.experiments import _t2r
from famjax.reproduce.paper_measures import WIKITEXT_DEV_WINDOWS

# a quarter of a head, here and in the paper's Table 1
_FEATURES, _PAPER_FEATURES = 16, 32
_MAPS = {"relu": "relu", "elu": "learned_elu", "cos": "cos", "tanh": "tanh"}
# as in Table 1: in bits, and in perplexity
_MARGIN, _PAPER_MARGIN = 0.02, 0.2


def _variant(name: str, features: int | None = None) -> Variant:
    """Return a variant; one with its own number of features is not in the paper."""
    own = (f"model.linear.map={_MAPS[name]}",)
    return Variant(
        f"T2R {name}" + (f" {features}" if features else ""),
        (*_t2r.FINETUNED, *_t2r.linear(features or _FEATURES), *own),
        at_paper=(*_t2r.linear(_PAPER_FEATURES), *own),
        here_only=features is not None,
    )


def _claims(margin: float) -> tuple[Ordering, ...]:
    """Return the claims: "cos, tanh, and elu, did not improve performance"."""
    others = [name for name in _MAPS if name != "relu"]
    return tuple(
        Ordering("T2R relu", f"T2R {name}", margin=margin, may_be_better=True) for name in others
    )


T2R_ACTIVATIONS = Experiment(
    id="t2r-activations",
    title="Activation of the feature map",
    source="T2R, 2.2, note 4",
    config=_t2r.CONFIG,
    variants=(
        *(_variant(name) for name in _MAPS),
        # a second look at the one map that was better: as many features as a head has
        *(_variant(name, 64) for name in ("relu", "elu")),
    ),
    measure=_t2r.WINDOWS,
    orderings=(
        *_claims(_MARGIN),
        Ordering("T2R relu 64", "T2R elu 64", margin=_MARGIN, may_be_better=True, ours=True),
    ),
    base=_t2r.TEACHING,
    base_config=_t2r.TEACHER,
    at_paper=PaperSize(
        config=_t2r.PAPER_CONFIG,
        measure=WIKITEXT_DEV_WINDOWS,
        orderings=_claims(_PAPER_MARGIN),
        base_config=_t2r.PAPER_TEACHER,
    ),
    note=_t2r.FINETUNED_NOTE
    + " Each map has 16 features, or 64; elu is 1 + elu, which is positive. The paper gives "
    "no numbers.",
    unequal_parameters=_t2r.UNEQUAL_PARAMETERS,
    follow_up="With as many features as a head has, 64, relu has 2.533 bits per byte and 1 + elu "
    "2.518, in the rows above, which three seeds cannot tell apart. Where features are few, 1 + "
    "elu is better here, also after twice the finetuning, of a teacher of 1,600 steps: 2.442 and "
    "2.539 bits per byte with 16 features (`famjax reproduce t2r-activations --seeds 1 --only 'T2R "
    "relu,T2R elu' train.steps=1600`).",
    minutes=_t2r.MINUTES,
)
