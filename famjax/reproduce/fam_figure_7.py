"""TransformerFAM, Figure 7: the probability of random state passing (B.2.3, B.4.3)."""

from __future__ import annotations

from famjax.reproduce import _text
from famjax.reproduce.experiment import Experiment, Ordering, Variant

# rows with a memory of their own at each step, as in the paper
_PACKED = ("data.layout=packed",)


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
            (*_text.CONTINUED, *_text.FAM, "model.fam_len=8", *_PACKED, f"train.rsp={p}"),
            x=p,
            at_paper=(f"train.rsp={p}",),
        )
        for p in (0.0, 0.4, 0.8, 0.95)
    ),
    measure=_text.CODE,
    orderings=(Ordering("RSP 0.8", "no RSP"), Ordering("RSP 0.8", "RSP 0.95")),
    overrides=_text.SHAPE,
    base=_text.BASE,
    paper_config="fam_1b",
    axis="probability",
    note=_text.NOTE + " The paper gives a figure only, no numbers. Rows are packed, without lanes, "
    "so that a memory is longer in training only by what is passed on.",
    minutes=2.0,
)
