"""TransformerFAM, Table 4: how many previous memories a block attends to (3.4.2)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, PaperSize, Variant
from famjax.reproduce.experiments import _text
from famjax.reproduce.long_context_measure import LongContextMeasure

_PAPER = {1: 0.159, 2: 0.158, 3: 0.157, 4: 0.151, 6: 0.162}


def _name(previous: int) -> str:
    return f"{previous} previous"


FAM_TABLE_4 = Experiment(
    id="fam-table-4",
    title="Number of previous feedback memories",
    source="TransformerFAM, Table 4",
    config="text_bswa",
    variants=tuple(
        Variant(
            _name(previous),
            (*_text.CONTINUED, *_text.FAM, "model.fam_len=8", f"model.fam_previous={previous}"),
            {"XLSum": score},
            x=previous,
            at_paper=(*_text.FAM_AT_PAPER, f"model.fam_previous={previous}"),
        )
        for previous, score in _PAPER.items()
    ),
    measure=_text.CODE,
    orderings=tuple(Ordering(_name(n), _name(1), margin=_text.MARGIN) for n in _PAPER if n > 1),
    overrides=_text.SHAPE,
    base=_text.BASE,
    at_paper=PaperSize(
        config="fam_1b",
        measure=LongContextMeasure(("xlsum",)),
        orderings=tuple(Ordering(_name(n), _name(1), margin=0.011) for n in _PAPER if n > 1),
    ),
    # in ROUGE-L; the paper's numbers of one to six differ by 0.011
    axis="previous memories",
    note=_text.FAM_NOTE,
    minutes=4.0,
)
