"""TransformerFAM, Figure 7: the probability of random state passing (B.2.3, B.4.3)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, PaperSize, Variant
from famjax.reproduce.experiments import _text
from famjax.reproduce.paper_measures import PG19


def _name(probability: float) -> str:
    return f"RSP {probability:g}" if probability else "no RSP"


FAM_FIGURE_7 = Experiment(
    id="fam-figure-7",
    title="Probability of random state passing",
    source="TransformerFAM, Figure 7",
    config="text_bswa",
    variants=tuple(
        Variant(
            _name(p),
            (*_text.CONTINUED, *_text.FAM, "model.fam_len=8", *_text.PACKED, *_text.passed(p)),
            x=p,
            at_paper=(*_text.FAM_AT_PAPER, f"train.rsp={p}"),
        )
        for p in (0.0, 0.4, 0.8, 0.95)
    ),
    measure=_text.CODE,
    orderings=tuple(Ordering("RSP 0.8", name) for name in ("no RSP", "RSP 0.4", "RSP 0.95")),
    overrides=_text.SHAPE,
    base=_text.BASE,
    at_paper=PaperSize(
        config="fam_1b",
        measure=PG19,
    ),
    axis="probability",
    note=_text.FAM_NOTE
    + " The paper gives a figure only, no numbers. Rows are packed, without lanes, "
    "so that a memory is longer in training only by what is passed on, with a probability that "
    "grows over 100 steps.",
    minutes=4.0,
)
