"""TransformerFAM, Table 8: block sliding window attention against Transformer-XL (B.4.5)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, PaperSize, Variant
from famjax.reproduce.experiments import _text
from famjax.reproduce.long_context_measure import SETS, LongContextMeasure

_BSWA, _XL = "TransformerBSWA", "Transformer-XL"
_SETS = ("pg19", "isabelle", "narrativeqa", "qasper", "quality", "xlsum")


def _paper(*percent: float) -> dict[str, float]:
    scores = (SETS[name].score for name in _SETS)
    return {score: value / 100 for score, value in zip(scores, percent, strict=True)}


FAM_TABLE_8 = Experiment(
    id="fam-table-8",
    title="Block sliding window attention and Transformer-XL",
    source="TransformerFAM, Table 8",
    config="text_bswa",
    variants=(
        Variant(
            _BSWA,
            (*_text.CONTINUED, "model.mixer=bswa", "model.memory_segments=1"),
            _paper(46.4, 72.6, 11.1, 5.0, 26.3, 13.6),
            at_paper=(*_text.SHAPE_AT_PAPER, "model.mixer=bswa", "model.memory_segments=1"),
        ),
        Variant(
            _XL,
            (*_text.CONTINUED, "model.mixer=swa", "model.window=64"),
            _paper(46.1, 72.2, 11.0, 4.9, 26.5, 13.7),
            at_paper=(*_text.BLOCK_AT_PAPER, "model.mixer=swa", "model.window=1024"),
        ),
    ),
    measure=_text.CODE,
    orderings=(Ordering(_BSWA, _XL, margin=_text.MARGIN),),
    # Transformer-XL's layers have no smeared keys
    overrides=_text.PLAIN_SHAPE,
    base=_text.BASE,
    at_paper=PaperSize(
        config="fam_1b",
        measure=LongContextMeasure(_SETS),
        orderings=tuple(
            Ordering(_BSWA, _XL, SETS[name].score, margin=_text.PAPER_MARGIN) for name in _SETS
        ),
    ),
    note=_text.NOTE + " Transformer-XL's window is a block, as in the paper: it sees half a block "
    "less than BSWA with one memory segment, on average. The paper's GPT-3 tasks have no "
    "counterpart here.",
    minutes=4.0,
)
