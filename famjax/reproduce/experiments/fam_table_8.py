"""TransformerFAM, Table 8: block sliding window attention against Transformer-XL (B.4.5)."""

from __future__ import annotations

from famjax.reproduce.experiment import Experiment, Ordering, PaperSize, Variant
from famjax.reproduce.experiments import _text
from famjax.reproduce.paper_measures import PG19

_BSWA, _XL = "TransformerBSWA", "Transformer-XL"

FAM_TABLE_8 = Experiment(
    id="fam-table-8",
    title="Block sliding window attention and Transformer-XL",
    source="TransformerFAM, Table 8",
    config="text_bswa",
    variants=(
        Variant(
            _BSWA,
            (*_text.CONTINUED, "model.mixer=bswa", "model.memory_segments=1"),
            {"PG-19 accuracy": 0.464, "Isabelle accuracy": 0.726},
            at_paper=(*_text.SHAPE_AT_PAPER, "model.mixer=bswa", "model.memory_segments=1"),
        ),
        Variant(
            _XL,
            (*_text.CONTINUED, "model.mixer=swa", "model.window=64"),
            {"PG-19 accuracy": 0.461, "Isabelle accuracy": 0.722},
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
        measure=PG19,
        orderings=(Ordering(_BSWA, _XL, margin=_text.PAPER_MARGIN),),
    ),
    note=_text.NOTE + " Transformer-XL's window is a block, as in the paper: it sees half a block "
    "less than BSWA with one memory segment, on average.",
    minutes=4.0,
)
