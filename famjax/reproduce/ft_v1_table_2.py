"""Feedback Transformer v1, Table 2: characters of Penn Treebank (4.3)."""

from __future__ import annotations

from famjax.reproduce import _bytes
from famjax.reproduce.experiment import Experiment, Ordering, Variant
from famjax.reproduce.penn_treebank import PennTreebankMeasure

_TRANSFORMER, _FEEDBACK = "Transformer", "Feedback"

FT_V1_TABLE_2 = Experiment(
    id="ft-v1-table-2",
    title="Characters of Penn Treebank",
    source="Feedback Transformer v1, Table 2",
    config="char_ptb_feedback",
    variants=(
        Variant(_TRANSFORMER, _bytes.TRANSFORMER, {"dev": 1.256, "test": 1.227}),
        Variant(_FEEDBACK, (), {"dev": 1.181, "test": 1.160}),
    ),
    measure=PennTreebankMeasure(),
    orderings=(Ordering(_FEEDBACK, _TRANSFORMER, "test"),),
    paper_config="char_ptb_paper",
    note="Four layers of width 128 and a span of 64, 0.8 million parameters, 1,200 steps of 1,024 "
    "characters, where the paper has 10.7 million parameters and 15,000 steps of 262,144.",
    minutes=_bytes.MINUTES,
)
