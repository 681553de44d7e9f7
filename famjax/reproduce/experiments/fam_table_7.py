"""TransformerFAM, Table 7: the position of the memory (B.2.1, B.4.1)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, PaperSize, Variant
from famjax.reproduce.experiments import _text
from famjax.reproduce.long_context_measure import SETS, LongContextMeasure

_LAST, _BETWEEN, _ZERO = "last numbers", "float numbers", "zero"
_SETS = ("pg19", "isabelle")


def _variant(name: str, position: str, pg19: float, isabelle: float) -> Variant:
    own = (f"model.fam_position={position}",)
    return Variant(
        name,
        (*_text.CONTINUED, *_text.FAM, "model.fam_len=8", *own),
        {"PG-19 accuracy": pg19, "Isabelle accuracy": isabelle},
        at_paper=(*_text.FAM_AT_PAPER, *own),
    )


def _claims(score: str = "") -> tuple[Ordering, ...]:
    pairs = (_LAST, _BETWEEN), (_LAST, _ZERO), (_BETWEEN, _ZERO)
    return tuple(Ordering(*pair, score) for pair in pairs)


FAM_TABLE_7 = Experiment(
    id="fam-table-7",
    title="Position of the feedback memory",
    source="TransformerFAM, Table 7",
    config="text_bswa",
    variants=(
        _variant(_LAST, "last", 0.477, 0.736),
        _variant(_BETWEEN, "between", 0.476, 0.734),
        _variant(_ZERO, "zero", 0.473, 0.721),
    ),
    measure=_text.CODE,
    orderings=_claims(),
    overrides=_text.SHAPE,
    base=_text.BASE,
    at_paper=PaperSize(
        config="fam_1b",
        measure=LongContextMeasure(_SETS),
        orderings=tuple(claim for name in _SETS for claim in _claims(SETS[name].score)),
    ),
    note=_text.FAM_NOTE,
    minutes=4.0,
)
